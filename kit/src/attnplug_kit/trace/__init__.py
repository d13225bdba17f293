"""The command ``attnplug trace``: layers and steps as definitions and workloads of FlashInfer Trace."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnplug.commands import complain
from attnplug.errors import RequestError
from attnplug_kit.tune import declare_layers

if TYPE_CHECKING:
    import argparse

    from attnplug.request import Requirements
    from attnplug_kit.trace.workload import Step

SUMMARY: Final = "layers and steps of a model, as definitions and workloads of FlashInfer Trace"

_EPILOG: Final = """\
A layer has a definition for decodes, and one for batches with longer queries. Its reference is PyTorch code that
computes what the conformance kit's oracle does, in float64; the LSE is to base 2, as the format has it. Fields that
change no result are tags. A field that the format cannot express is refused by name.

A step is one workload: its offsets and pages are in a safetensors file, its tokens are random. Batches are written as
for `attnplug tune`. Equal steps are one workload, and --json says how often each occurs. The folder has the layout of
the FlashInfer Trace data set.

examples:
  attnplug trace Qwen/Qwen3-8B --tp 2 --block-size 64 --batch decode:64x4096 --out dataset
  attnplug trace --requirements @layers.json --out dataset
  attnplug trace --steps steps.jsonl --out dataset

exit codes: 0 written, 2 the request is invalid, or the format cannot express it
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "attnplug trace [CONFIG] [options]"
    parser.description = "Write the layers of a model, and steps, as definitions and workloads of FlashInfer Trace."
    parser.epilog = _EPILOG
    declare_layers(parser)
    parser.add_argument(
        "--block-size", type=int, metavar="N", help="tokens per page where a layer names none; default 16"
    )
    parser.add_argument(
        "--batch", action="append", metavar="BATCH", default=[], help="a step, repeatable; default: none"
    )
    parser.add_argument(
        "--scale", type=float, metavar="X", help="factor of the scores; default: head_size ** -0.5; latents need one"
    )
    parser.add_argument("--out", metavar="DIR", required=True, help="folder of the data set")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Write definitions and workloads."""
    from attnplug_kit.trace.workload import export  # noqa: PLC0415 - help does without
    from attnplug_kit.tune.grid import layers_of_json, layers_of_model, parse_batch  # noqa: PLC0415 - likewise

    given = (arguments.config, arguments.requirements, arguments.steps)
    if sum(each is not None for each in given) != 1:
        raise RequestError(
            "several of CONFIG, --requirements and --steps were given" if any(given) else "no layers were given",
            "one of CONFIG, --requirements and --steps names the layers",
            "write, for example, attnplug trace path/to/config.json --out DIR",
        )
    if arguments.steps is not None:
        if arguments.batch or arguments.tp is not None:
            raise RequestError("--steps was given with --batch or --tp", "a recording has its steps", "leave them out")
        found = _recorded(arguments.steps)
    else:
        if arguments.config is None:
            layers = layers_of_json(arguments.requirements)
        else:
            layers = layers_of_model(arguments.config, 1 if arguments.tp is None else arguments.tp)
        parsed = [parse_batch(text) for text in arguments.batch]
        steps = [(new, tuple(map(sum, zip(new, old, strict=True)))) for _, new, old, _ in parsed]
        found = dict.fromkeys(layers, steps)
    pages = [(_with_pages(layer, arguments.block_size), steps) for layer, steps in found.items()]
    return export(pages, Path(arguments.out), arguments.scale, as_json=arguments.json)


def _recorded(path: str) -> dict[Requirements, list[Step]]:
    """Return the steps of each layer of a recording, with the block size that was agreed on."""
    from attnplug.contract import read_steps  # noqa: PLC0415 - imports torch

    found: dict[Requirements, list[Step]] = {}
    unknown = 0
    for step in read_steps(path).steps:
        agreed = step.layer.agreement
        steps = found.setdefault(_with_pages(agreed.requirements, agreed.block_size), [])
        if step.query_lens is None or step.seq_lens is None:
            unknown += 1
        else:
            steps.append((step.query_lens, step.seq_lens))
    if unknown:
        complain(f"attnplug: {unknown} steps of {path!r} have lengths on the device alone, and are not written")
    return found


def _with_pages(layer: Requirements, block_size: int | None) -> Requirements:
    if block_size is None or not layer.paged or layer.block_size is not None:
        return layer
    return layer.evolve(block_size=block_size)
