"""Packs paged K/V into the workspace for libraries without paged kernels, as many at a time as fit."""

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


MAX_BYTES: Final = 2**30
"""Maximum bytes of K/V that are packed for one call, unless one request has more. It is enough to fill a GPU."""


def workspace_bytes(agreement: Agreement, limits: Limits) -> int:
    """Return the bytes of the K/V of one call in one layer. All layers and calls share this memory."""
    each = sum(_bytes_per_key(agreement))
    keys = min(MAX_BYTES // each, limits.max_num_reqs * limits.max_seq_len)
    return max(keys, limits.max_seq_len) * each


def packed(rows: Rows, call: VarlenCall, workspace: Tensor, agreement: Agreement) -> KernelPass:
    """
    Return the pass of some requests, or the first of several passes if the workspace cannot hold all their keys.

    It does not synchronize. Without CPU lengths, each request takes as much memory as the longest one.

    Args:
        rows: The requests.
        call: Their call, with pages.
        workspace: uint8, at least `workspace_bytes`.
        agreement: The agreement.
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
    Return the requests of a batch with this rank's cached tokens.

    Args:
        batch: A checked batch. Its local CPU lengths include the new tokens.
        context: `DcpPlan.context`, with pages.
    """
    starts_cpu, lens, table = batch.query_start_loc_cpu, context.seqused_k, context.block_table
    assert starts_cpu is not None and lens is not None and table is not None  # noqa: PT018, S101 - DCP requires pages
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
    """Pack the K/V of a pass, and return them, ``(keys, kv_heads, size)`` each."""
    assert part.buffers is not None and part.slots is not None  # noqa: PT018, S101 - a pass by `packed`
    key, value = part.buffers
    return gather_slots(keys, part.slots, out=key), gather_slots(values, part.slots, out=value)


def _ends(lens: Sequence[int], most: int) -> list[int]:
    """Return the ends of the calls: each has as many consecutive requests as fit into `most` keys."""
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
    """Return the pass of the requests in `part`."""
    first, last = (int(rows.starts_cpu[request]) for request in (part.start, part.stop))
    starts, key_starts = rows.starts[part.start : part.stop + 1], cumulative(rows.lens[part])
    of_part = evolve(
        call,
        cu_seqlens_q=starts - first if first else starts,
        cu_seqlens_k=key_starts,
        seqused_k=None,
        block_table=None,
    )
    slots = slots_of_keys(rows.table[part], key_starts, buffers[0].shape[0], block_size)
    return KernelPass(of_part, rows.first + first, rows.first + last, slots=slots, buffers=buffers, rest=rest)


def _buffers(num_keys: int, workspace: Tensor, agreement: Agreement) -> tuple[Tensor, Tensor]:
    """Return the buffers of keys and values, ``(num_keys, num_kv_heads, size)`` each."""
    required, dtype = agreement.requirements, torch_dtype(agreement.kv_cache_dtype)
    of_keys, of_values = (num_keys * each for each in _bytes_per_key(agreement))
    parts = (workspace[:of_keys], workspace[of_keys : of_keys + of_values])
    sizes = (required.head_size, required.head_size_v or required.head_size)
    key, value = (
        part.view(dtype).view(num_keys, required.num_kv_heads, size) for part, size in zip(parts, sizes, strict=True)
    )
    return key, value


def _bytes_per_key(agreement: Agreement) -> tuple[int, int]:
    """Return the bytes of one key and of one value, in all heads."""
    required, width = agreement.requirements, torch_dtype(agreement.kv_cache_dtype).itemsize
    heads = required.num_kv_heads * width
    return heads * required.head_size, heads * (required.head_size_v or required.head_size)


def slots_of_keys(table: Tensor, starts: Tensor, num_keys: int, block_size: int) -> Tensor:
    """
    Return the KV-cache slot of each key, one request after another, without synchronization.

    Args:
        table: ``(requests, blocks)`` int32; entries after a request's keys are undefined.
        starts: ``(requests + 1,)`` int32, from `cumulative`.
        num_keys: The number of keys, or an upper bound.
        block_size: Slots per block.

    Returns:
        ``(num_keys,)`` int64; slot 0 of the null block beyond the last key.
    """
    rows = torch.arange(num_keys, dtype=torch.int32, device=table.device)
    requests = torch.searchsorted(starts[1:], rows, right=True).clamp_(max=table.shape[0] - 1)
    positions = rows - starts[requests]
    columns = torch.div(positions, block_size, rounding_mode="floor").clamp_(max=table.shape[1] - 1)
    slots = table[requests, columns].long() * block_size + positions % block_size
    return slots.masked_fill_(rows >= starts[-1], 0)
