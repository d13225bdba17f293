"""Launches the kernel for prompts: on the rows that come with the call, or on pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
from attrs import frozen

from attnplug.ops import Kernel
from attnplug_blocksparse import hopper, prompt
from attnplug_blocksparse.triton_prefill import _prefill
from attnplug_blocksparse.triton_softmax import INTERPRETED

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug_blocksparse.pattern import Pattern
    from attnplug_blocksparse.scales import Scales
    from attnplug_blocksparse.tiles import HopperTiles, PrefillTiles

_FAR = 2**31
"""Elements that 32 bits do not count."""

_prefill_kernel = Kernel(_prefill)


@frozen(eq=False, kw_only=True)
class Prompts:
    """
    The requests of one launch.

    Attributes:
        pattern: Which blocks a head attends.
        tiles: How it is computed.
        query_starts: ``(num_reqs + 1,)`` int32, from 0.
        seq_lens: ``(num_reqs,)`` int32 keys per request.
        key_starts: As `query_starts` for the rows of keys; None where they are in pages.
        table: ``(num_reqs, max_blocks)`` int32 pages; None where keys are rows.
        longest_query: Rows of the longest request.
        lengths: Rows of each request, where each is worth a launch of its own; otherwise none.
        key_lengths: Keys of each such request, where they are in pages.
        hopper: How such a launch is computed by warps with roles, where the device has what that needs. Keys in pages
            have no launches of their own elsewhere.
    """

    pattern: Pattern
    tiles: PrefillTiles
    query_starts: Tensor
    seq_lens: Tensor
    key_starts: Tensor | None = None
    table: Tensor | None = None
    longest_query: int = 0
    lengths: tuple[int, ...] = ()
    key_lengths: tuple[int, ...] = ()
    hopper: HopperTiles | None = None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    prompts: Prompts,
    scales: Scales,
) -> None:
    """
    Attend, and write output and LSE.

    Args:
        query: ``(tokens, num_q_heads, head_size)``.
        key: ``(tokens, num_kv_heads, head_size)`` of all keys, one request after another, or the pages
            ``(num_blocks, page_size, num_kv_heads, head_size)``, of any strides but the last.
        value: As `key`.
        out: ``(tokens, num_q_heads, head_size)``, heads side by side.
        lse: ``(tokens, num_q_heads)`` float32, natural log, or None.
        prompts: The requests.
        scales: Of the layer.
    """
    if prompts.lengths:
        by_roles = prompts.hopper is not None and hopper.is_for(query, key, value, out, prompts.pattern)
        by_rows = prompts.table is None and prompt.is_for(key, value, prompts.pattern, prompts.tiles)
        if by_roles or by_rows:
            _attend_each(query, key, value, out, lse, prompts, scales, by_roles=by_roles)
            return
    requests, (heads, size) = prompts.seq_lens.shape[0], query.shape[1:]
    tiles, page_size = prompts.tiles, 0 if prompts.table is None else key.shape[1]
    # A tile more than rows need: tiles begin at multiples of their size in the sequence, wherever a chunk begins.
    num_tiles = -(-prompts.longest_query // tiles.rows) + 1
    sums = query if lse is None else lse
    table = prompts.seq_lens if prompts.table is None else prompts.table
    tensors = (
        query, key, value, out, sums, prompts.query_starts,
        prompts.query_starts if prompts.key_starts is None else prompts.key_starts,
        prompts.seq_lens, table,
        sums if scales.keys is None else scales.keys, sums if scales.values is None else scales.values,
    )  # fmt: skip
    of_page = (key.stride(0), value.stride(0)) if page_size else (0, 0)
    strides = (
        query.stride(0), query.stride(1), of_page[0], *key.stride()[-3:-1], of_page[1], *value.stride()[-3:-1],
        out.stride(0), *((0, 0) if lse is None else lse.stride()),
    )  # fmt: skip
    of_request = 0 if prompts.table is None else prompts.table.stride(0)
    numbers = (of_request, requests, num_tiles, scales.scores, *prompts.pattern.numbers)
    constants = (
        heads, heads // key.shape[-2], size, triton.next_power_of_2(size), page_size, *prompts.pattern.constants,
        scales.keys is not None, lse is not None, _is_wide(key, value, prompts), tiles.rows, tiles.keys, tiles.stages,
        INTERPRETED,
    )  # fmt: skip
    programs = num_tiles * requests * heads
    _prefill_kernel.run(programs, tensors, strides, numbers, constants, **tiles.options)


def _is_wide(key: Tensor, value: Tensor, prompts: Prompts) -> bool:
    """Whether rows of one tile of keys, which may be of vertical blocks, are too far apart for 32 bits."""
    block, _, stride, _ = prompts.pattern.constants
    apart = prompts.tiles.keys * (stride if block <= prompts.tiles.keys else 1)
    return prompts.table is None and apart * max(key.stride(0), value.stride(0)) >= _FAR


def _attend_each(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor | None,
    prompts: Prompts,
    scales: Scales,
    *,
    by_roles: bool,
) -> None:
    first = 0
    for request, length in enumerate(prompts.lengths):
        rows = slice(first, first + length)
        first += length
        if not length:
            continue
        keys, values = (key, value) if prompts.table is not None else (key[rows], value[rows])
        own = (query[rows], keys, values, out[rows], None if lse is None else lse[rows], prompts.pattern, scales)
        if prompts.hopper is None or not by_roles:
            prompt.attend(*own, prompts.tiles)
        elif prompts.table is None:
            hopper.attend(*own, prompts.hopper)
        else:
            hopper.attend(*own, prompts.hopper, table=prompts.table[request], length=prompts.key_lengths[request])
