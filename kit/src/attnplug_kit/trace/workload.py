"""Steps of an engine as workloads of FlashInfer Trace: axis values, offsets and pages in a safetensors file."""

from __future__ import annotations

import json
import random
from itertools import accumulate
from typing import TYPE_CHECKING, Any
from uuid import NAMESPACE_URL, uuid5

from attrs import frozen

from attnplug.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from attnplug_kit.trace.definition import Definition


@frozen
class Workload:
    """
    One step of a definition.

    Attributes:
        uuid: Follows from the definition, the lengths and the scalars: two exports of a step are equal.
        axes: The value of each variable axis.
        indices: The index tensors, int32, by the name of the input.
        scalars: The scalar inputs.
    """

    uuid: str
    axes: Mapping[str, int]
    indices: Mapping[str, Sequence[int]]
    scalars: Mapping[str, float]

    def to_dict(self, definition: Definition) -> dict[str, Any]:
        """Return a line of a workload file; tensors of tokens are random."""
        place = blob_path(definition, self)
        inputs: dict[str, Any] = {name: {"type": "random"} for name in definition.inputs}
        inputs |= {name: {"type": "scalar", "value": value} for name, value in self.scalars.items()}
        inputs |= {name: {"type": "safetensors", "path": place, "tensor_key": name} for name in self.indices}
        one = {"uuid": self.uuid, "axes": dict(self.axes), "inputs": inputs}
        return {"definition": definition.name, "workload": one, "solution": None, "evaluation": None}


def blob_path(definition: Definition, workload: Workload) -> str:
    """Return the place of the index tensors in a dataset."""
    return f"blob/workloads/{definition.op_type}/{definition.name}/{workload.uuid}.safetensors"


def serves(definition: Definition, query_lens: Sequence[int]) -> bool:
    """Whether a step belongs to a definition: steps with one query of each request to that of decodes."""
    return definition.is_decode == all(length == 1 for length in query_lens)


def workload_of(
    definition: Definition, query_lens: Sequence[int], seq_lens: Sequence[int], scalars: Mapping[str, float]
) -> Workload:
    """
    Return a step as a workload. Pages are in a random order, which the lengths determine.

    Args:
        definition: That of the step's layer.
        query_lens: New tokens of each request.
        seq_lens: Keys of each request, those of the step included.
        scalars: The values of the definition's scalar inputs.

    Raises:
        RequestError: The lengths are of no step, or the definition computes no K/V of other steps and one is cached.
    """
    if len(query_lens) != len(seq_lens) or any(not 0 <= q <= k for q, k in zip(query_lens, seq_lens, strict=False)):
        raise RequestError(
            f"a step has query_lens={tuple(query_lens)} and seq_lens={tuple(seq_lens)}",
            "each request has a number of queries, and at least as many keys",
            "correct the recording",
        )
    wanted = {name for name, (axes, _) in definition.inputs.items() if axes is None}
    identity = json.dumps([definition.name, *map(list, (query_lens, seq_lens)), sorted(scalars.items())])
    counts = list(seq_lens)
    found: dict[str, Sequence[int]] = {}
    if not definition.is_decode:
        found["qo_indptr"] = (0, *accumulate(query_lens))
    size = definition.axes.get("page_size")
    if size is not None:
        counts = [-(-length // size) for length in seq_lens]
        pages = list(range(sum(counts)))
        random.Random(identity).shuffle(pages)
        found["kv_indices"] = pages
        last = [length - (count - 1) * size if count else 0 for length, count in zip(seq_lens, counts, strict=True)]
        found["kv_last_page_len"] = last
    found["kv_indptr"] = (0, *accumulate(counts))
    total = sum(counts)
    values = {"total_q": sum(query_lens), "batch_size": len(query_lens), "len_indptr": len(query_lens) + 1}
    values |= {"total_kv": total, "num_kv_indices": total, "num_pages": total}
    axes = {name: values[name] for name, value in definition.axes.items() if value is None}
    return Workload(str(uuid5(NAMESPACE_URL, identity)), axes, found, {n: scalars[n] for n in sorted(wanted)})


def write_blob(path: Path, tensors: Mapping[str, Sequence[int]]) -> None:
    """Write int32 vectors as a safetensors file."""
    import torch  # noqa: PLC0415 - torch takes a second to import
    from safetensors.torch import save_file  # noqa: PLC0415 - imports torch

    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: torch.tensor(values, dtype=torch.int32) for name, values in tensors.items()}, path)
