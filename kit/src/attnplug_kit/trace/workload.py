"""Layers and steps as files of FlashInfer Trace: definitions, workloads, and index tensors in safetensors files."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import NAMESPACE_URL, uuid5

from attrs import evolve

from attnplug.commands import OK, say, say_json
from attnplug.errors import RequestError
from attnplug_kit.trace.definition import definitions_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from attnplug.request import Requirements
    from attnplug_kit.trace.definition import Definition

    Step: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]  # new tokens and keys of each request


def export(
    layers: Iterable[tuple[Requirements, Sequence[Step]]], folder: Path, scale: float | None, *, as_json: bool
) -> int:
    """
    Write the definitions of layers and the workloads of their steps, after all of them were made.

    Raises:
        RequestError: The format cannot express a layer, or a step is invalid; then nothing is written.
    """
    definitions: dict[str, Definition] = {}
    workloads: dict[str, dict[str, Any]] = {}  # lines by uuid, of each path
    blobs: dict[str, Mapping[str, Sequence[int]]] = {}
    times: Counter[str] = Counter()
    for layer, steps in layers:
        for definition in definitions_of(layer):
            # Layers with one definition differ in tags alone.
            tags = definitions.get(definition.path, definition).tags + definition.tags
            definitions[definition.path] = evolve(definition, tags=tuple(dict.fromkeys(tags)))
            for step in steps:
                if definition.is_decode == all(length == 1 for length in step[0]):
                    line, place, indices = workload_of(definition, *step, _scalars(layer, scale))
                    path = definition.path.replace("definitions/", "workloads/", 1) + "l"
                    uuid = line["workload"]["uuid"]
                    workloads.setdefault(path, {})[uuid] = line
                    blobs[place] = indices
                    times[uuid] += 1
    texts = {path: json.dumps(each.to_dict(), indent=2) for path, each in definitions.items()}
    texts |= {path: "\n".join(map(json.dumps, lines.values())) for path, lines in workloads.items()}
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text + "\n", encoding="utf-8")
    for path, tensors in blobs.items():
        _write_blob(folder / path, tensors)
    if as_json:
        counts = dict.fromkeys(definitions, 1) | {path: len(lines) for path, lines in workloads.items()}
        say_json({"files": counts, "times": dict(times)})
        return OK
    for path in texts:
        lines = workloads.get(path, {})
        say(f"{folder / path}" + (f": {len(lines)} different of {sum(times[n] for n in lines)} steps" if lines else ""))
    return OK


def _scalars(layer: Requirements, scale: float | None) -> dict[str, float]:
    if layer.latent and scale is None:
        raise RequestError(
            "a layer of latents was given without a scale",
            "it is (qk_nope_head_dim + qk_rope_head_dim) ** -0.5, and no requirement",
            "pass --scale, 0.07217 for DeepSeek-V3 without YaRN",
        )
    return {"sm_scale": scale or layer.head_size**-0.5, "logits_soft_cap": layer.logits_soft_cap or 0.0}


def workload_of(
    definition: Definition, query_lens: Sequence[int], seq_lens: Sequence[int], scalars: Mapping[str, float]
) -> tuple[dict[str, Any], str, dict[str, Sequence[int]]]:
    """
    Return a step as a line of a workload file, the path of its blob, and the blob's int32 vectors.

    The uuid follows from the definition, lengths and scalars, and so does the random order of the pages.

    Args:
        definition: The definition of the step's layer.
        query_lens: New tokens of each request.
        seq_lens: Keys of each request, those of the step included.
        scalars: The values of the definition's scalar inputs; others are ignored.

    Raises:
        RequestError: The lengths are of no step.
    """
    if len(query_lens) != len(seq_lens) or any(not 0 <= q <= k for q, k in zip(query_lens, seq_lens, strict=False)):
        raise RequestError(
            f"a step has query_lens={tuple(query_lens)} and seq_lens={tuple(seq_lens)}",
            "each request has a number of queries, and at least as many keys",
            "correct the recording",
        )
    identity = json.dumps([definition.name, *map(list, (query_lens, seq_lens)), sorted(scalars.items())])
    indices: dict[str, Sequence[int]] = {} if definition.is_decode else {"qo_indptr": (0, *accumulate(query_lens))}
    counts, size = list(seq_lens), definition.axes.get("page_size")
    if size is not None:
        counts = [-(-length // size) for length in seq_lens]
        pages = list(range(sum(counts)))
        random.Random(identity).shuffle(pages)
        last = [length - max(0, count - 1) * size for length, count in zip(seq_lens, counts, strict=True)]
        indices |= {"kv_indices": pages, "kv_last_page_len": last}
    indices["kv_indptr"] = (0, *accumulate(counts))
    values = {"total_q": sum(query_lens), "batch_size": len(query_lens), "len_indptr": len(query_lens) + 1}
    values |= dict.fromkeys(("total_kv", "num_kv_indices", "num_pages"), sum(counts))
    uuid = str(uuid5(NAMESPACE_URL, identity))
    place = f"blob/workloads/{definition.op_type}/{definition.name}/{uuid}.safetensors"
    inputs: dict[str, Any] = {name: {"type": "random"} for name in definition.inputs}
    inputs |= {n: {"type": "scalar", "value": value} for n, value in scalars.items() if n in inputs}
    inputs |= {name: {"type": "safetensors", "path": place, "tensor_key": name} for name in indices}
    axes = {name: values[name] for name, value in definition.axes.items() if value is None}
    workload = {"uuid": uuid, "axes": axes, "inputs": inputs}
    line = {"definition": definition.name, "workload": workload, "solution": None, "evaluation": None}
    return line, place, indices


def _write_blob(path: Path, tensors: Mapping[str, Sequence[int]]) -> None:
    import torch  # noqa: PLC0415 - torch takes a second to import
    from safetensors.torch import save_file  # noqa: PLC0415 - imports torch

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.tensor(values, dtype=torch.int32) for name, values in tensors.items()}, path)
