"""The command ``attnplug tune``: measure the candidates of a model on this machine, and keep the times as a profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnplug.errors import RequestError

if TYPE_CHECKING:
    import argparse

    from attnplug.request import Requirements
    from attnplug_kit.tune.grid import Cell

SUMMARY: Final = "the candidates of a model, measured on this machine: a profile that selections follow"

_EPILOG: Final = """\
Each candidate that can serve a layer is measured in batches of each phase. It runs as an engine runs it: in random
pages, with a cold L2 cache, decodes as replays of a CUDA graph where it has them. First its results are compared with
the conformance kit's oracle: one with a wrong result is rejected, and named; one that cannot be loaded is refused.
Candidates are measured in turn, in 7 rounds at least; rounds in which the clock of the device moved do not count. An
advantage of less than 2 %, or less than twice the spread, changes nothing: the default order decides.

A time is that of a layer's call, and a 32nd of the build of a step, which all layers share. Kernels are compiled first,
on a GPU in eight processes (--jobs), and --seconds counts from then on. What a candidate takes until its first result
after that is not part of a time, and is listed.

The grid and its estimated seconds are printed first. Each measured batch of a layer is a separate file, written as a
whole: an interrupted command goes on where it was. Files are read in the first selection of later processes. A process
that serves measures nothing.

Where decodes and other batches have different fastest candidates, their routed pair is measured too, if it is expected
to gain more than the margin. Selections follow it where its measured gain does.

Batches are written as decode:64x4096 (requests x keys), verify:64x4@4092 (drafts: requests x new tokens @ cached),
prefill:4x4096, chunk:4x1024@4096 and mixed:64x4096+2x1024.

--export writes all entries of the folder to one file, and prints the value of ATTNPLUG_PROFILE with which every rank of
a model decides on these times alone. --merge adds the entries of such files to the folder.

examples:
  attnplug tune Qwen/Qwen3-8B --tp 2 --seconds 300
  attnplug tune --requirements @layers.json --batch decode:64x4096 --batch prefill:4x4096 --out profiles
  attnplug tune --steps steps.jsonl --seconds 300
  attnplug tune --merge h200.json --merge mine.json --export all.json
  attnplug tune --compare monday.json tuesday.json

exit codes: 0 measured, 1 a candidate was rejected, time ran out, or profiles differ by more than the margin, 2 the
request is invalid
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "attnplug tune [CONFIG] [options]"
    parser.description = "Measure the candidates of a model's layers on this machine, and keep the times as a profile."
    parser.epilog = _EPILOG
    declare_layers(parser)
    parser.add_argument("--dtype", metavar="NAME", help="dtype of the model; default: its configuration's")
    parser.add_argument("--kv-cache-dtype", metavar="NAME", help="dtype of the KV cache; default: the model's dtype")
    parser.add_argument("--draft", type=int, metavar="N", help="new tokens of a verification; default: no drafts")
    parser.add_argument("--batch", action="append", metavar="BATCH", help="a batch, repeatable; default: eight batches")
    parser.add_argument("--backend", action="append", metavar="NAME", help="measure these only; repeatable")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where; default: this machine's")
    parser.add_argument(
        "--seconds", type=float, metavar="S", help="start no batch after so many seconds; default: no limit"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="processes that compile first; default: 8 on GPUs")
    parser.add_argument("--out", metavar="DIR", help="folder of the entries; default: profiles, beside config.toml")
    parser.add_argument("--again", action="store_true", help="measure what is in the folder already, too")
    parser.add_argument("--dry-run", action="store_true", help="print the grid and its estimate alone")
    parser.add_argument("--export", metavar="FILE", help="write all entries of the folder to one file at the end")
    parser.add_argument("--merge", action="append", metavar="FILE", help="add the entries of this file; repeatable")
    parser.add_argument(
        "--compare",
        nargs=2,
        metavar=("A", "B"),
        help="print where two profiles choose differently; nothing is measured",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def declare_layers(parser: argparse.ArgumentParser) -> None:
    """Declare the options that name layers; `attnplug trace` has them too."""
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="a model's config.json, its folder, or a model id in the Hugging Face cache",
    )
    parser.add_argument("--requirements", metavar="JSON", help="layers instead: a JSON object, a list, or @FILE")
    parser.add_argument("--steps", metavar="FILE", help="layers and batches of a file of ATTNPLUG_RECORD instead")
    parser.add_argument("--tp", type=int, metavar="N", help="devices of the tensor-parallel group; default 1")


def run(arguments: argparse.Namespace) -> int:
    """Measure."""
    from attnplug.request import profile_folder  # noqa: PLC0415 - help does without
    from attnplug_kit.tune.grid import layers_of_json, layers_of_model  # noqa: PLC0415 - likewise
    from attnplug_kit.tune.running import Order, run_comparison, run_order  # noqa: PLC0415 - likewise

    if arguments.compare is not None:
        return run_comparison(arguments.compare, as_json=arguments.json)
    folder = Path(arguments.out) if arguments.out else profile_folder()
    given = {"dtype": arguments.dtype, "kv_cache_dtype": arguments.kv_cache_dtype, "decode_query_len": arguments.draft}
    fields = {name: value for name, value in given.items() if value is not None}
    if arguments.config is not None and arguments.requirements is not None:
        raise RequestError("CONFIG and --requirements were given", "one of them names the layers", "leave one out")
    if arguments.requirements is not None and (fields or arguments.tp is not None):
        raise RequestError(
            "--requirements was given with options of a model's configuration",
            "requirements are those of one rank, with every field",
            "write the fields into the requirements",
        )
    layers: tuple[Requirements, ...] = ()
    cells: tuple[Cell, ...] = ()
    if arguments.steps is not None:
        cells = _cells(arguments, fields)
    elif arguments.config is not None:
        layers = layers_of_model(arguments.config, 1 if arguments.tp is None else arguments.tp, **fields)
    elif arguments.requirements is not None:
        layers = layers_of_json(arguments.requirements)
    elif not (arguments.merge or arguments.export):
        raise RequestError(
            "no layers were given",
            "they are those of a model's configuration, of --requirements, or of --steps",
            "write, for example, attnplug tune path/to/config.json",
        )
    names = ("batch", "backend", "device", "seconds", "jobs", "again", "dry_run", "json", "merge")
    order = Order(layers, folder, cells, export=arguments.export, **{name: getattr(arguments, name) for name in names})
    return run_order(order)


def _cells(arguments: argparse.Namespace, fields: dict[str, object]) -> tuple[Cell, ...]:
    """
    Return what was recorded.

    Raises:
        RequestError: Layers or batches are named besides, or the file cannot be read.
    """
    from attnplug.contract import read_steps  # noqa: PLC0415 - imports torch
    from attnplug_kit.tune.grid import cells_of  # noqa: PLC0415 - likewise

    if fields or any(getattr(arguments, name) is not None for name in ("config", "requirements", "tp", "batch")):
        raise RequestError(
            "--steps was given with other layers or batches",
            "the file has the layers, with every field, and the batches",
            "leave the others out",
        )
    return cells_of(read_steps(arguments.steps))
