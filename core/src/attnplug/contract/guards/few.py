"""Lets the ordinary decode step of a few requests pass, by Python numbers alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attnplug.contract.inputs.batch import Batch
    from attnplug.contract.inputs.limits import Limits
    from attnplug.negotiation.agreement import Agreement

# The whole guard takes dozens of operations on tensors, which cost microseconds whatever their size. Up to here numbers
# are looked at faster one by one.
_MOST_REQUESTS: Final = 16
_MOST_ENTRIES: Final = 512


class FewDecodes:
    """
    Recognises batches that the whole guard is known to accept: a few requests of one query token each, every block in
    place, nothing out of the ordinary. It refuses nothing: what it does not recognise goes to the whole guard, which
    has the words.

    Args:
        agreement: Of a decoder over pages whose decodes the host knows exactly.
        limits: With a number of blocks.
        device_type: Where the batch's tensors have to be.
    """

    def __init__(self, agreement: Agreement, limits: Limits, device_type: str) -> None:
        self._limits = limits
        self._causal = agreement.requirements.causal
        self._size = agreement.block_size or 1
        self._num_blocks = limits.num_blocks or 0
        self._device_type = device_type

    @staticmethod
    def suits(agreement: Agreement, limits: Limits) -> bool:
        """Whether an agreement has batches to recognise."""
        asked = agreement.requirements
        return (
            bool(asked.paged)
            and asked.attn_type == "decoder"
            and asked.dcp_size == 1
            and asked.seq_lens_cpu_kind == "exact"
            and not asked.custom_mask
            and "decode" in asked.phases
            and limits.num_blocks is not None
        )

    def highest_block(self, batch: Batch) -> int | None:
        """Return the highest block in use, or None for a batch that the whole guard has to look at."""
        if not (self._is_plain(batch) and self._has_form(batch)):
            return None
        starts, lens, slots, table = (_numbers(host) for _, host in _pairs(batch))
        count = batch.num_reqs
        if starts != list(range(count + 1)) or max(lens) != batch.max_seq_len or min(lens) < 1:
            return None
        if not _follows(batch.num_computed_tokens_cpu, lens) or len(set(slots)) < count:
            return None
        return self._highest(lens, slots, table)

    def _is_plain(self, batch: Batch) -> bool:
        """Whether the batch has only what every decode step has, in numbers that fit the limits."""
        count, longest, limits = batch.num_reqs, batch.max_seq_len, self._limits
        return (
            type(count) is type(longest) is type(batch.num_actual_tokens) is type(batch.max_query_len) is int
            and 1 <= count <= min(_MOST_REQUESTS, limits.max_num_reqs, limits.max_num_tokens)
            and batch.num_actual_tokens == count
            and batch.max_query_len == 1
            and longest <= limits.max_seq_len
            and batch.causal is self._causal
            and type(batch.common_prefix_len) is int
            and not batch.common_prefix_len
            and not batch.dummy
            and not batch.extra
            and batch.key_start_loc is None
            and batch.custom_mask is None
            and batch.encoder_seq_lens is None
            and batch.max_encoder_seq_len is None
            and batch.dcp_local_seq_lens is None
        )

    def _has_form(self, batch: Batch) -> bool:
        """Whether its tensors have the right shapes, dtypes and devices, and so have their host copies."""
        table = batch.block_table
        if table is None or table.ndim != 2 or table.numel() > _MOST_ENTRIES or table.stride(1) != 1:
            return False
        count, columns = batch.num_reqs, table.shape[1]
        if columns * self._size < batch.max_seq_len:
            return False
        forms = (
            ((count + 1,), torch.int32),
            ((count,), torch.int32),
            ((count,), torch.int64),
            ((count, columns), torch.int32),
        )
        return all(
            tensor is not None
            and host is not None
            and tensor.device.type == self._device_type
            and _is(tensor, shape, dtype)
            and (host is tensor or (not tensor.is_cpu and host.is_cpu and _is(host, shape, dtype)))
            for (tensor, host), (shape, dtype) in zip(_pairs(batch), forms, strict=True)
        )

    def _highest(self, lens: list[int], slots: list[int], table: list[list[int]]) -> int | None:
        """Return the highest block, if each is one of the cache's and each token's slot where the table says."""
        size, highest = self._size, 0
        for length, slot, row in zip(lens, slots, table, strict=True):
            last = (length - 1) // size
            used = row[: last + 1]
            if min(used) < 1 or slot != row[last] * size + (length - 1) % size:
                return None
            highest = max(highest, *used)
        return highest if highest < self._num_blocks else None


def _pairs(batch: Batch) -> Sequence[tuple[Tensor | None, Tensor | None]]:
    """The tensors of a decode step with their host copies."""
    return (
        (batch.query_start_loc, batch.query_start_loc_cpu),
        (batch.seq_lens, batch.seq_lens_cpu),
        (batch.slot_mapping, batch.slot_mapping_cpu),
        (batch.block_table, batch.block_table_cpu),
    )


def _is(tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
    return tensor.shape == shape and tensor.dtype == dtype


def _numbers(tensor: Tensor | None) -> list[Any]:
    return [] if tensor is None else tensor.tolist()


def _follows(computed: Tensor | None, lens: list[int]) -> bool:
    """Whether the cached tokens, where they are given, are all but the query's."""
    if computed is None:
        return True
    if not (computed.is_cpu and _is(computed, (len(lens),), torch.int32)):
        return False
    return computed.tolist() == [length - 1 for length in lens]
