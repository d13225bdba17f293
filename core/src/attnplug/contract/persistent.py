"""The input tensors that captured graphs read: written before each replay, never moved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve

from attnplug.contract.batch import PAD_SLOT_ID
from attnplug.contract.staging import upload
from attnplug.errors import BatchError

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract.batch import Batch
    from attnplug.contract.graph_key import GraphKey
    from attnplug.contract.limits import Limits
    from attnplug.negotiation.agreement import Agreement

_OPTIONAL = ("encoder_seq_lens", "dcp_local_seq_lens")


class PersistentInputs:
    """
    The index tensors of one builder's graphs. All its slots read the same memory, each as much as its shape takes.

    A padded request has no query, no keys and the null block; a padded token has no slot. Writing is ordered with the
    stream, after whatever replay still reads.

    Args:
        agreement: What was negotiated.
        limits: How large batches become.
        max_num_reqs: Most requests of a captured batch.
        device: Where the tensors live.
    """

    def __init__(self, agreement: Agreement, limits: Limits, max_num_reqs: int, device: torch.device) -> None:
        columns = -(-limits.max_seq_len // (agreement.block_size or 1))

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._device = device
        self._query_start_loc = zeros(max_num_reqs + 1)
        self._lens = {name: zeros(max_num_reqs) for name in ("seq_lens", *_OPTIONAL)}
        self._block_table = zeros(max_num_reqs, columns)
        self._slot_mapping = torch.full((limits.max_num_tokens,), PAD_SLOT_ID, dtype=torch.int64, device=device)

    def write(self, batch: Batch, key: GraphKey, max_seq_len: int) -> Batch:
        """
        Take a batch over, and return it as the graph sees it: tensors that stay where they are, and frozen numbers.

        Args:
            batch: A checked batch that fits the key.
            key: The captured shape.
            max_seq_len: The longest sequence of a replay.
        """
        reqs, tokens = key.num_reqs, key.num_tokens
        starts = _extended(batch.query_start_loc_cpu, reqs + 1, batch.num_actual_tokens)
        fields: dict[str, Any] = {
            "query_start_loc": upload(starts, self._device, out=self._query_start_loc[: reqs + 1]),
            "query_start_loc_cpu": starts,
            "num_computed_tokens_cpu": _extended_or_none(batch.num_computed_tokens_cpu, reqs),
        }
        for name, memory in self._lens.items():
            if getattr(batch, name) is not None:
                fields[name] = self._put(memory[:reqs], getattr(batch, name), 0)
                fields[f"{name}_cpu"] = _extended_or_none(getattr(batch, f"{name}_cpu"), reqs)
        if batch.block_table is not None and batch.slot_mapping is not None:
            fields["block_table"] = self._put_table(self._block_table[:reqs], batch.block_table)
            fields["block_table_cpu"] = fields["block_table"] if self._device.type == "cpu" else None
            # A graph writes no K/V of an encoder: those come at the first step of a request.
            rows, used = (tokens, batch.num_actual_tokens) if batch.encoder_seq_lens is None else (0, 0)
            fields["slot_mapping"] = self._put(self._slot_mapping[:rows], batch.slot_mapping[:used], PAD_SLOT_ID)
            fields["slot_mapping_cpu"] = fields["slot_mapping"] if self._device.type == "cpu" else None
        return as_captured(evolve(batch, **fields), key, max_seq_len)

    def _put(self, memory: Tensor, values: Tensor, fill: int) -> Tensor:
        count = values.shape[0]
        memory[:count].copy_(values, non_blocking=True)
        if count < memory.shape[0]:
            memory[count:].fill_(fill)
        return memory

    def _put_table(self, memory: Tensor, table: Tensor) -> Tensor:
        """Columns beyond those that the limits allow for hold no key. What older batches left is never read."""
        reqs, columns = table.shape[0], min(table.shape[1], memory.shape[1])
        memory[:reqs, :columns].copy_(table[:, :columns], non_blocking=True)
        if reqs < memory.shape[0]:
            memory[reqs:].zero_()
        return memory


def as_captured(batch: Batch, key: GraphKey, max_seq_len: int) -> Batch:
    """Return the batch with the numbers that a graph of this shape is captured with."""
    return evolve(
        batch,
        num_reqs=key.num_reqs,
        num_actual_tokens=key.num_tokens,
        max_query_len=key.query_len or key.num_tokens,
        max_seq_len=max_seq_len,
        max_encoder_seq_len=None if batch.encoder_seq_lens is None else max_seq_len,
    )


def addresses(batch: Batch) -> dict[str, int]:
    """Return where the tensors lie that a graph would read."""
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping", *_OPTIONAL)
    tensors = {name: getattr(batch, name) for name in names}
    return {name: tensor.data_ptr() for name, tensor in tensors.items() if tensor is not None}


def check_unmoved(before: dict[str, int], batch: Batch) -> None:
    """
    Check that a host which owns the graph's inputs passes them again.

    Raises:
        BatchError: A tensor lies elsewhere than at capture.
    """
    moved = [name for name, place in addresses(batch).items() if before.get(name) != place]
    if moved:
        raise BatchError(
            f"a batch whose {', '.join(moved)} moved was given for a slot with host_owned_inputs=True",
            "the graph reads the tensors that the slot was captured with",
            "write this step's values into those, or make the slot with host_owned_inputs=False",
        )


def _extended(host: Tensor | None, size: int, fill: int) -> Tensor:
    assert host is not None  # noqa: S101 - the guard has seen it
    longer = torch.full((size,), fill, dtype=host.dtype)
    longer[: host.shape[0]] = host
    return longer


def _extended_or_none(host: Tensor | None, size: int) -> Tensor | None:
    return None if host is None else _extended(host, size, 0)
