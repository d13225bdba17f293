"""Keys in pages, for libraries that read none: packed into the workspace, as many at a time as it holds."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import torch
from attrs import evolve
from torch import Tensor

from attnplug.contract import torch_dtype
from attnplug.ops import gather_slots
from attnplug_flash_attn.passes import KernelPass, Rows, cumulative

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug import Agreement
    from attnplug.contract import Batch, Limits
    from attnplug_flash_attn.kernels.interface import VarlenCall


AT_ONCE: Final = 2**30
"""Most bytes of keys and values that are packed for one call, unless one request has more: enough to fill a GPU."""


def workspace_bytes(agreement: Agreement, limits: Limits) -> int:
    """Return what the keys and values of one call take, in one layer: all layers and calls use the same memory."""
    each = sum(_bytes_per_key(agreement))
    keys = min(AT_ONCE // each, limits.max_num_reqs * limits.max_seq_len)
    return max(keys, limits.max_seq_len) * each


def packed(rows: Rows, call: VarlenCall, workspace: Tensor, agreement: Agreement) -> KernelPass:
    """
    Return the call of requests, or the first of several where the workspace does not hold all of their keys.

    The device is not waited for: where the host knows no lengths, each request takes as much room as the longest.

    Args:
        rows: The requests.
        call: Theirs, on pages.
        workspace: Of at least `workspace_bytes`.
        agreement: What was agreed on.
    """
    count = rows.lens.shape[0]
    lens = [rows.longest] * count if rows.lens_cpu is None else rows.lens_cpu.tolist()
    ends = _ends(lens, workspace.shape[0] // sum(_bytes_per_key(agreement)))
    made: tuple[KernelPass, ...] = ()
    for first, end in reversed([*pairwise((0, *ends))]):
        buffers = _buffers(sum(lens[first:end]), workspace, agreement)
        made = (_pass(rows, slice(first, end), call, buffers, agreement.block_size or 1, made), *made)
    return made[0]


def rows_of_shard(batch: Batch, context: VarlenCall) -> Rows:
    """
    Return the requests of a batch with the cached tokens that this rank holds.

    Args:
        batch: A checked batch. The host's lengths of this rank's share count the new tokens, too.
        context: As of `dcp.Sharded`, on pages.
    """
    starts_cpu, lens, table = batch.query_start_loc_cpu, context.seqused_k, context.block_table
    assert starts_cpu is not None and lens is not None and table is not None  # noqa: PT018, S101 - sequences are paged
    return Rows(
        first=0,
        last=batch.num_actual_tokens,
        starts=context.cu_seqlens_q,
        starts_cpu=starts_cpu,
        longest_query=context.max_seqlen_q,
        lens=lens,
        lens_cpu=batch.dcp_local_seq_lens_cpu,
        longest=context.max_seqlen_k,
        table=table,
        causal=context.causal,
    )


def packed_rows(part: KernelPass, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Pack the keys and values of a call, and return them: ``(keys, kv_heads, size)`` each."""
    assert part.buffers is not None and part.slots is not None  # noqa: PT018, S101 - it is one that `packed` has made
    key, value = part.buffers
    return gather_slots(keys, part.slots, out=key), gather_slots(values, part.slots, out=value)


def _ends(lens: Sequence[int], most: int) -> list[int]:
    """Return behind which requests a call ends: each has as many as follow each other and have `most` keys."""
    ends, held = [], 0
    for request, length in enumerate(lens):
        if held and held + length > most:
            ends.append(request)
            held = 0
        held += length
    return [*ends, len(lens)]


def _pass(
    rows: Rows,
    part: slice,
    call: VarlenCall,
    buffers: tuple[Tensor, Tensor],
    block_size: int,
    rest: tuple[KernelPass, ...],
) -> KernelPass:
    """Return the call of the requests in `part`."""
    above, below = (int(rows.starts_cpu[request]) for request in (part.start, part.stop))
    starts, key_starts = rows.starts[part.start : part.stop + 1], cumulative(rows.lens[part])
    of_part = evolve(
        call,
        cu_seqlens_q=starts - above if above else starts,
        cu_seqlens_k=key_starts,
        seqused_k=None,
        block_table=None,
    )
    slots = slots_of_keys(rows.table[part], key_starts, buffers[0].shape[0], block_size)
    return KernelPass(of_part, rows.first + above, rows.first + below, slots=slots, buffers=buffers, rest=rest)


def _buffers(num_keys: int, workspace: Tensor, agreement: Agreement) -> tuple[Tensor, Tensor]:
    """Return the memory of so many keys and of their values, ``(num_keys, num_kv_heads, size)`` each."""
    required, dtype = agreement.requirements, torch_dtype(agreement.kv_cache_dtype)
    of_keys, of_values = (num_keys * each for each in _bytes_per_key(agreement))
    parts = (workspace[:of_keys], workspace[of_keys : of_keys + of_values])
    sizes = (required.head_size, required.head_size_v or required.head_size)
    key, value = (
        part.view(dtype).view(num_keys, required.num_kv_heads, size) for part, size in zip(parts, sizes, strict=True)
    )
    return key, value


def _bytes_per_key(agreement: Agreement) -> tuple[int, int]:
    """Return what a key takes in all heads, and its value."""
    required, width = agreement.requirements, torch_dtype(agreement.kv_cache_dtype).itemsize
    heads = required.num_kv_heads * width
    return heads * required.head_size, heads * (required.head_size_v or required.head_size)


def slots_of_keys(table: Tensor, starts: Tensor, num_keys: int, block_size: int) -> Tensor:
    """
    Return the cache slot of each key, one request after another. The device is not waited for.

    Args:
        table: ``(requests, blocks)`` int32; entries beyond a request's keys may hold anything.
        starts: ``(requests + 1,)`` int32, as `cumulative` returns it.
        num_keys: How many keys there are, or more where the host does not know.
        block_size: Slots per block.

    Returns:
        ``(num_keys,)`` int64; slot 0 of the null block for what is more than there are.
    """
    rows = torch.arange(num_keys, dtype=torch.int32, device=table.device)
    requests = torch.searchsorted(starts[1:], rows, right=True).clamp_(max=table.shape[0] - 1)
    places = rows - starts[requests]
    columns = torch.div(places, block_size, rounding_mode="floor").clamp_(max=table.shape[1] - 1)
    slots = table[requests, columns].long() * block_size + places % block_size
    return slots.masked_fill_(rows >= starts[-1], 0)
