"""
Runs calls on a paged KV cache of two tensors that the caller owns: each kind of call decides once.

A call writes nothing before all of it is decided and planned.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import frozen

from attnplug.contract.guards._format import describe, dtype_name
from attnplug.contract.inputs.batch import Batch
from attnplug.contract.inputs.kv_cache import outside_inference_mode
from attnplug.dense.backends import planner_of, use_device
from attnplug.dense.params import CallParams, refuse_capture
from attnplug.errors import CacheError, TensorError
from attnplug.ops.write import write_kv
from attnplug.request.requirements import Requirements

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.dense.backends import BatchPlanner

NAME: Final = "attnplug.flash_attn"
"""The layer's name in messages."""


@frozen(eq=False, kw_only=True)
class NewKeys:
    """
    Keys and values that a call writes before it attends.

    Attributes:
        key: ``(tokens, num_kv_heads, head_size)``.
        value: ``(tokens, num_kv_heads, head_size_v)``.
        slots: ``(tokens,)`` int64, ``block * block_size + offset``; -1 for a key that has no room, and is not written.
        count: How many each sequence has.
    """

    key: Tensor
    value: Tensor
    slots: Tensor
    count: int


@frozen(eq=False, kw_only=True)
class PagedCall:
    """
    A call on pages.

    Attributes:
        query: ``(tokens, num_q_heads, head_size)``.
        key_pages: ``(num_blocks, block_size, num_kv_heads, head_size)``.
        value_pages: ``(num_blocks, block_size, num_kv_heads, head_size_v)``.
        query_start_loc: ``(sequences + 1,)`` int32.
        seq_lens: ``(sequences,)`` int32, keys of each sequence, new ones included.
        block_table: ``(sequences, blocks)`` int32.
        max_query_len: An upper bound of the query lengths.
        max_seq_len: An upper bound of the keys.
        params: The call's numbers.
        sinks: ``(num_q_heads,)``, or None.
        alibi_slopes: ``(num_q_heads,)`` float32, or None.
        max_num_splits: Most parts of one sequence's keys; None for the backend's own choice.
        new: What it writes first, or None.
    """

    query: Tensor
    key_pages: Tensor
    value_pages: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    max_query_len: int
    max_seq_len: int
    params: CallParams
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    max_num_splits: int | None = None
    new: NewKeys | None = None


def run_pages(call: PagedCall) -> tuple[Tensor, Tensor | None]:
    """
    Write the new keys and values of a call, and attend.

    Returns:
        ``(tokens, num_q_heads, head_size_v)``; and the LSE ``(tokens, num_q_heads)`` float32, or None.

    Raises:
        NoBackendError: Nothing can serve the call.
        CacheError: A block is outside of the cache; where the block table is on the CPU.
        TensorError: Tensors do not fit each other.
        NotNegotiatedError: A CUDA graph is captured.
    """
    check_pages(call)
    query = call.query
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        refuse_capture()
    tokens, heads, size = query.shape[0], query.shape[1], call.value_pages.shape[-1]
    output = query.new_zeros(tokens, heads * size)
    lse = query.new_zeros(tokens, heads, dtype=torch.float32) if call.params.return_lse else None
    with use_device(query.device):
        # Tensors that are made in inference mode could not be written outside of it.
        with outside_inference_mode():
            planner = _planner(call)
            impl = planner.impl
            cache = impl.backend.bind_cache({"k": call.key_pages, "v": call.value_pages}, null_block=False)
            metadata = planner.build(_batch(call)) if tokens else None
        if call.new is not None:
            # On the CPU a key without room is refused; on a device its slot is -1.
            padded = not call.new.slots.is_cpu
            write_kv(call.new.key, call.new.value, call.key_pages, call.value_pages, call.new.slots, padded=padded)
        if metadata is not None:
            plain = query if query.stride(-1) == 1 else query.contiguous()
            impl.forward(plain, None, None, cache, metadata, output, lse=lse)
            if lse is not None and call.sinks is not None and impl.lse_includes_sink is False:
                torch.logaddexp(lse, call.sinks.detach().float(), out=lse)
    return output.view(tokens, heads, size), lse


def check_pages(call: PagedCall) -> None:
    """
    Check the shapes, dtypes and devices of a call.

    Raises:
        TensorError: They do not fit each other.
    """
    query, keys, values = call.query, call.key_pages, call.value_pages
    found = f"q of {describe(query)}, keys of {describe(keys)} and values of {describe(values)} were given"
    if query.ndim != 3 or keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
        _refuse(found, "q has heads and sizes last, pages are (num_blocks, block_size, heads, head_size)", "pass such")
    if query.shape[-1] != keys.shape[-1] or not keys.shape[2] or query.shape[1] % keys.shape[2]:
        _refuse(
            found, "q and keys have one head size, and the heads of q are a multiple of those of the keys", "pass such"
        )
    if len({query.dtype, keys.dtype, values.dtype}) > 1 or len({query.device, keys.device, values.device}) > 1:
        _refuse(found, "all have one dtype and are on one device", "convert them")
    if call.new is not None:
        for name, rows, pages in (("k", call.new.key, keys), ("v", call.new.value, values)):
            if rows.shape[1:] != pages.shape[2:] or (rows.dtype, rows.device) != (pages.dtype, pages.device):
                _refuse(
                    f"{name} of {describe(rows)} was given for pages of {describe(pages)}",
                    "new keys and values have the heads, the sizes, the dtype and the device of the pages",
                    "pass such",
                )
    table, sequences = call.block_table, call.query_start_loc.shape[0] - 1
    if table.ndim != 2 or table.shape[0] != sequences or tuple(call.seq_lens.shape) != (sequences,):
        _refuse(
            f"a block_table of {describe(table)} and lengths of {describe(call.seq_lens)} were given",
            f"they are ({sequences}, blocks) and ({sequences},) int32: one row and one length for each sequence",
            "pass such",
        )
    if call.max_seq_len > table.shape[1] * keys.shape[1]:
        _refuse(
            f"a block_table of {table.shape[1]} blocks was given for sequences of up to {call.max_seq_len} tokens",
            f"a block has {keys.shape[1]} tokens",
            "pass a wider block_table, or the exact length of the longest sequence",
        )
    _check_blocks(call)
    if call.new is not None and table.is_cpu and call.seq_lens.is_cpu:
        _check_written(call, call.new)


def _check_written(call: PagedCall, new: NewKeys) -> None:
    """Check that a new key has a slot for itself: sequences that share blocks share the keys before them alone."""
    slots, size = new.slots, call.key_pages.shape[1]
    positions = torch.arange(call.block_table.shape[1] * size)
    all_slots = call.block_table.long().repeat_interleave(size, 1) * size + positions % size
    held = all_slots[positions < (call.seq_lens[:, None] - new.count)]
    if len(set(slots.tolist())) < slots.numel() or bool(torch.isin(slots, held).any()):
        raise CacheError(
            "new keys were given for a slot that another sequence of the call has, too",
            "a block that is written belongs to one sequence; keys before the new ones may be shared",
            "copy the block that both are in, so that each sequence has another one in its row",
        )


def _check_blocks(call: PagedCall) -> None:
    """Check the blocks in use, where they are on the CPU: before anything is written, and block 0 may have keys."""
    table, (count, size) = call.block_table, call.key_pages.shape[:2]
    if not (table.is_cpu and call.seq_lens.is_cpu):
        return
    is_used = torch.arange(table.shape[1]) * size < call.seq_lens[:, None]
    wrong = table[is_used & ((table < 0) | (table >= count))]
    if wrong.numel():
        raise CacheError(
            f"block {int(wrong[0])} was given for a KV cache of {count} blocks",
            f"the blocks of a sequence's keys are from 0 to {count - 1}",
            "pass the block_table of this KV cache, or the lengths that it has blocks for",
        )


def _planner(call: PagedCall) -> BatchPlanner:
    strides_differ = call.key_pages.shape == call.value_pages.shape and (
        call.key_pages.stride() != call.value_pages.stride()
    )
    requirements = _requirements(call, "independent" if strides_differ else "split")
    learned = (call.sinks, call.alibi_slopes)
    return planner_of(requirements, call.query.device, call.params, learned, NAME, call.max_num_splits)


def _requirements(call: PagedCall, form: str) -> Requirements:
    params = call.params
    more: dict[str, Any] = {} if params.causal else {"causal": False}
    return Requirements(
        head_size=call.query.shape[2],
        num_q_heads=call.query.shape[1],
        num_kv_heads=call.key_pages.shape[2],
        dtype=dtype_name(call.query.dtype),
        head_size_v=call.value_pages.shape[3],
        sliding_window=params.sliding_window,
        logits_soft_cap=params.logits_soft_cap,
        alibi=None if call.alibi_slopes is None else "linear",
        sinks=call.sinks is not None,
        return_lse=params.return_lse,
        block_size=call.key_pages.shape[1],
        kv_layout="NHD",
        kv_cache_form=form,
        kv_in_cache=True,  # written here: a caller of FlashAttention has keys in block 0, too
        seq_lens_cpu_kind="absent",  # each build reads them
        query_lens_cpu_kind="absent",
        **more,
    )


def _batch(call: PagedCall) -> Batch:
    return Batch(
        query_start_loc=call.query_start_loc,
        query_start_loc_cpu=None,
        seq_lens=call.seq_lens,
        seq_lens_cpu=None,
        num_reqs=call.query_start_loc.shape[0] - 1,
        num_actual_tokens=call.query.shape[0],
        max_query_len=call.max_query_len,
        max_seq_len=call.max_seq_len,
        block_table=call.block_table,
        causal=call.params.causal,
    )


def _refuse(problem: str, expected: str, fix: str) -> None:
    raise TensorError(problem, expected, fix)
