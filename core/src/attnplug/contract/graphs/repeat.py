"""Recognizes a batch for a graph that differs from the one before only in its sequence lengths, as most steps do."""

from __future__ import annotations

from operator import attrgetter
from types import NoneType
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import frozen

from attnplug.contract.inputs.batch import Batch
from attnplug.contract.inputs.exact import extremes

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract.inputs.exact import Lengths
    from attnplug.contract.inputs.phase import BatchSplit

_numbers_of: Final = attrgetter(
    "num_reqs", "num_actual_tokens", "max_query_len", "causal", "common_prefix_len", "dummy", "num_padded_reqs"
)
_tensors_of: Final = attrgetter("query_start_loc", "seq_lens", "block_table", "slot_mapping")
_absent_of: Final = attrgetter(
    *("num_computed_tokens_cpu", "block_table_cpu", "slot_mapping_cpu", "encoder_seq_lens", "encoder_seq_lens_cpu"),
    *("max_encoder_seq_len", "dcp_local_seq_lens", "dcp_local_seq_lens_cpu", "key_start_loc", "key_start_loc_cpu"),
    *("custom_mask", "attn_bias", "mm_prefix_range", "mm_prefix_range_cpu"),
)
_NONE: Final = {NoneType}


@frozen(eq=False)
class Repeat:
    """
    A checked batch whose tensors the graph reads in place.

    Attributes:
        numbers: Its numbers, but for the longest sequence.
        forms: The address and form of each tensor on the device; None for one that is absent.
        starts: ``(num_reqs + 1,)`` its query starts on the CPU; never written again.
        query_lens: ``(num_reqs,)`` its query lengths on the CPU, likewise.
        most_keys: The longest sequence that the graph, the limits and the block table take.
        split: Its split, as the graph sees it.
    """

    numbers: tuple[Any, ...]
    forms: tuple[Any, ...]
    starts: Tensor
    query_lens: Tensor
    most_keys: int
    split: BatchSplit

    def takes(self, batch: Batch) -> bool:
        """Whether all checks that this batch passed hold for another one too. False says nothing: each is repeated."""
        starts, lens, longest = batch.query_start_loc_cpu, batch.seq_lens_cpu, batch.max_seq_len
        if (
            _numbers_of(batch) != self.numbers
            or not _is_simple(batch)
            or type(longest) is not int
            or longest > self.most_keys
            or lens is None
            or starts is None
            or not (lens.is_cpu and starts.is_cpu and lens.dtype is starts.dtype is torch.int32)
            or lens.shape != self.query_lens.shape
            or tuple([_form(tensor) for tensor in _tensors_of(batch)]) != self.forms
            or not torch.equal(starts, self.starts)
        ):
            return False
        low, high = extremes(lens)
        if low < 0 or high > longest:
            return False
        return low >= batch.max_query_len or int((lens - self.query_lens).amin()) >= 0


def repeat_of(batch: Batch, lengths: Lengths, split: BatchSplit, most_keys: int, block_size: int) -> Repeat | None:
    """
    Return what later batches are compared with; None where a check depends on more than `Repeat.takes` compares.

    Args:
        batch: A checked batch, as the host gave it. Its agreement requests nothing beyond pages and lengths.
        lengths: Its lengths.
        split: Its split, as the graph sees it.
        most_keys: The longest sequence that the graph and the limits take.
        block_size: Slots per block.
    """
    table, starts, lens = batch.block_table, batch.query_start_loc_cpu, lengths.query_lens
    if table is None or starts is None or lens is None or batch.dummy or batch.num_padded_reqs:
        return None
    if batch.seq_lens.is_cpu or not _is_simple(batch):  # tensors on the CPU are compared with their copies
        return None
    forms = tuple([_form(tensor) for tensor in _tensors_of(batch)])
    most = min(most_keys, table.shape[1] * block_size)
    return Repeat(_numbers_of(batch), forms, starts.clone(), lens, most, split)


def _is_simple(batch: Batch) -> bool:
    return type(batch) is Batch and not batch.extra and {*map(type, _absent_of(batch))} == _NONE


def _form(tensor: Tensor | None) -> Any:
    return tensor if tensor is None else (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_cpu)
