"""The command ``attnplug trace``: layers and steps as definitions and workloads of FlashInfer Trace."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from attnplug.commands import OK, complain, say, say_json
from attnplug.errors import RequestError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from attnplug.request import Requirements

    Step: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # new tokens and keys of each request

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
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="a model's config.json, its folder, or a model id in the Hugging Face cache",
    )
    parser.add_argument("--requirements", metavar="JSON", help="layers instead: a JSON object, a list, or @FILE")
    parser.add_argument("--steps", metavar="FILE", help="layers and steps of a recording instead, see ATTNPLUG_RECORD")
    parser.add_argument("--tp", type=int, metavar="N", help="devices of the tensor-parallel group; default 1")
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
    from attnplug_kit.tune.grid import layers_of_json, layers_of_model, parse_batch  # noqa: PLC0415 - help does without

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
        texts = arguments.config, arguments.requirements
        layers = (
            layers_of_json(texts[1])
            if texts[0] is None
            else layers_of_model(texts[0], 1 if arguments.tp is None else arguments.tp)
        )
        parsed = [parse_batch(text) for text in arguments.batch]
        steps = [(new, tuple(map(sum, zip(new, old, strict=True)))) for _, new, old, _ in parsed]
        found = dict.fromkeys(layers, steps)
    pages = [(_with_pages(layer, arguments.block_size), steps) for layer, steps in found.items()]
    return _write(pages, Path(arguments.out), arguments.scale, as_json=arguments.json)


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


def _write(
    layers: Sequence[tuple[Requirements, Sequence[Step]]], folder: Path, scale: float | None, *, as_json: bool
) -> int:
    """Write everything, after all of it was made: a refused layer leaves nothing behind."""
    files: dict[str, list[dict[str, Any]]] = {}
    blobs: dict[str, Any] = {}
    times: Counter[str] = Counter()
    for layer, steps in layers:
        for path, content, tensors in _files_of(layer, steps, scale):
            each = files.setdefault(path, [])
            if content not in each:
                each.append(content)
            if tensors is not None:
                times[content["workload"]["uuid"]] += 1
                blobs[tensors[0]] = tensors[1]
    from attnplug_kit.trace.workload import write_blob  # noqa: PLC0415 - help does without

    for path, contents in files.items():
        place = folder / path
        place.parent.mkdir(parents=True, exist_ok=True)
        lines = [json.dumps(content, indent=2 if path.endswith(".json") else None) for content in contents]
        place.write_text("\n".join(lines) + "\n", encoding="utf-8")
    for path, tensors in blobs.items():
        write_blob(folder / path, tensors)
    if as_json:
        say_json({"files": {path: len(contents) for path, contents in files.items()}, "times": dict(times)})
    for path, contents in () if as_json else files.items():
        count = sum(times[each["workload"]["uuid"]] for each in contents if "workload" in each)
        say(f"{folder / path}" + (f": {len(contents)} different of {count} steps" if count else ""))
    return OK


def _files_of(
    layer: Requirements, steps: Sequence[Step], scale: float | None
) -> Iterator[tuple[str, dict[str, Any], Any]]:
    """Yield the path and content of each definition and workload, and the path and tensors of a workload's blob."""
    from attnplug_kit.trace.definition import definitions_of  # noqa: PLC0415 - help does without
    from attnplug_kit.trace.workload import blob_path, serves, workload_of  # noqa: PLC0415 - likewise

    for definition in definitions_of(layer):
        yield definition.path, definition.to_dict(), None
        own = [step for step in steps if serves(definition, step[0])]
        if own and layer.latent and scale is None:
            raise RequestError(
                "a layer of latents was given without a scale",
                "it is (qk_nope_head_dim + qk_rope_head_dim) ** -0.5, and no requirement",
                "pass --scale, 0.07217 for DeepSeek-V3 without YaRN",
            )
        scalars = {"sm_scale": scale or layer.head_size**-0.5, "logits_soft_cap": layer.logits_soft_cap or 0.0}
        for query_lens, seq_lens in own:
            workload = workload_of(definition, query_lens, seq_lens, scalars)
            path = definition.path.replace("definitions/", "workloads/", 1) + "l"
            yield path, workload.to_dict(definition), (blob_path(definition, workload), workload.indices)
