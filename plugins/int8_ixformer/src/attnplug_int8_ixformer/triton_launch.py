"""Launches the kernels of prompts and chunks: what they need is gathered first, and then attended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import field, frozen
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from attnplug.ops import Kernel
from attnplug_int8_ixformer.forms import INTERPRETED, forms_of, page_strides, width_of
from attnplug_int8_ixformer.tiles import PrefillTiles
from attnplug_int8_ixformer.triton_prefill import _gather, _prefill
from attnplug_int8_ixformer.triton_prompt import _prompt

if TYPE_CHECKING:
    from attnplug_int8_ixformer.pages import Pages
    from attnplug_int8_ixformer.terms import Terms

UNIT: Final = 128
"""Columns that a sequence takes a multiple of."""

_SCALE_BYTES: Final = 4

_gather_kernel, _prefill_kernel, _prompt_kernel = Kernel(_gather), Kernel(_prefill), Kernel(_prompt)


@frozen(eq=False, kw_only=True)
class Prompts:
    """
    Prompts and chunks of a step: one launch.

    Attributes:
        query_starts: ``(all requests + 1,)`` int32.
        seq_lens: ``(all requests,)`` int32 keys.
        table: ``(all requests, max_blocks)`` int32 pages.
        key_starts: ``(all requests,)`` int32: the first column of what is gathered of each, a multiple of `UNIT`.
        first: The first request.
        count: Requests.
        longest_query: Rows of the longest of all.
        longest_seq: Keys of the longest of all.
        scratch: ``(columns * column_bytes,)`` uint8; what it holds before and after means nothing.
        tiles: How it is computed.
        by_descriptors: Whether keys are gathered too, and descriptors load both. Level 1 alone.
    """

    query_starts: Tensor
    seq_lens: Tensor
    table: Tensor
    key_starts: Tensor
    first: int
    count: int
    longest_query: int
    longest_seq: int
    scratch: Tensor
    tiles: PrefillTiles = field(factory=PrefillTiles)
    by_descriptors: bool = False


@frozen(eq=False)
class Gathered:
    """
    What lies in the scratch memory of prompts at level 1, of all KV heads.

    Attributes:
        columns: Tokens that there is room for.
        turned: ``(kv_heads * size, columns)`` int8 values.
        lined: ``(kv_heads * columns, size)`` int8 keys, if they are gathered.
        lined_scales: ``(kv_heads * columns,)`` float32 scales of keys, likewise.
    """

    columns: int
    turned: Tensor
    lined: Tensor
    lined_scales: Tensor

    @classmethod
    def of(cls, scratch: Tensor, kv_heads: int, size: int, *, with_keys: bool) -> Gathered:
        """Divide scratch memory."""
        columns = scratch.shape[0] // column_bytes(kv_heads, size, with_keys=with_keys) // UNIT * UNIT
        rows, count = columns * kv_heads, 2 if with_keys else 1
        both = scratch[: count * rows * size].view(torch.int8)
        turned, lined = both[: rows * size], both[(count - 1) * rows * size :]
        begin = count * rows * size
        scales = scratch[begin : begin + _SCALE_BYTES * rows].view(torch.float32) if with_keys else scratch
        return cls(columns, turned.view(kv_heads * size, columns), lined.view(rows, size), scales)


def column_bytes(kv_heads: int, size: int, *, with_keys: bool) -> int:
    """Return the bytes of scratch memory that a gathered token takes: values, and keys with their scales."""
    return kv_heads * (2 * size + _SCALE_BYTES if with_keys else size)


def in_units(tokens: int) -> int:
    """Return how many columns a sequence takes."""
    return -(-tokens // UNIT) * UNIT


def in_groups(lengths: list[int], columns: int) -> list[tuple[int, int]]:
    """Cut requests into runs, first and count each, whose keys fit so many columns."""
    groups, used = [(0, 0)], 0
    for request, length in enumerate(lengths):
        needed = in_units(length)
        if used + needed > columns and groups[-1][1]:
            groups, used = [*groups, (request, 0)], 0
        groups[-1], used = (groups[-1][0], groups[-1][1] + 1), used + needed
    return groups


def attend_prompts(query: Tensor, pages: Pages, out: Tensor, prompts: Prompts, terms: Terms) -> None:
    """Attend prompts and chunks whose keys are all in pages. Arguments as of `Provider.prefill`."""
    if pages.value_scales is None:
        _attend_pages(query, pages, out, prompts, terms, None)
        return
    kv_heads, size = pages.keys.shape[2:]
    gathered = Gathered.of(prompts.scratch, kv_heads, size, with_keys=prompts.by_descriptors)
    _gather_all(pages, prompts, terms, gathered)
    if prompts.by_descriptors:
        _attend_described(query, pages, out, prompts, terms, gathered)
    else:
        _attend_pages(query, pages, out, prompts, terms, gathered)


def _gather_all(pages: Pages, prompts: Prompts, terms: Terms, gathered: Gathered) -> None:
    kv_heads, size = pages.keys.shape[2:]
    units = -(-prompts.longest_seq // UNIT)
    tensors = (
        pages.keys, pages.values, pages.key_scales, gathered.turned, gathered.lined, gathered.lined_scales,
        prompts.key_starts, prompts.seq_lens, prompts.table, prompts.query_starts,
    )  # fmt: skip
    numbers = (prompts.table.stride(0), units, prompts.first, terms.left)
    constants = (
        *page_strides(pages), kv_heads, size, width_of(size), pages.keys.shape[1], terms.left >= 0,
        prompts.by_descriptors, UNIT,
    )  # fmt: skip
    programs = prompts.count * units * kv_heads
    _gather_kernel.run(programs, tensors, (gathered.columns,), numbers, constants, num_warps=4)


def _attend_described(
    query: Tensor, pages: Pages, out: Tensor, prompts: Prompts, terms: Terms, gathered: Gathered
) -> None:
    """Attend gathered keys and values, which descriptors load."""
    (_, heads, size), kv_heads, tiles = query.shape, pages.keys.shape[2], prompts.tiles
    scales: Any = pages.value_scales
    width, num_tiles = width_of(size), -(-prompts.longest_query // tiles.rows)
    programs = prompts.count * num_tiles * heads
    if not programs:
        return  # no descriptor describes nothing
    rows = (_described(gathered.lined, tiles.keys, width), _described(gathered.turned, width, tiles.keys))
    tensors = (
        query, out, gathered.lined_scales, scales, scales if terms.slopes is None else terms.slopes,
        prompts.query_starts, prompts.key_starts, prompts.seq_lens,
    )  # fmt: skip
    strides = (*query.stride()[:2], out.stride(0), gathered.columns)
    numbers = (prompts.count, num_tiles, prompts.first, terms.left, terms.scale, terms.soft_cap)
    constants = (
        kv_heads, heads // kv_heads, size, width, *forms_of(terms), tiles.rows, tiles.keys, tiles.stages,
    )  # fmt: skip
    _prompt_kernel.run(programs, tensors, strides, numbers, constants, descriptors=rows, num_warps=tiles.warps)


def _described(rows: Tensor, *box: int) -> Any:
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), list(box))


def _attend_pages(
    query: Tensor, pages: Pages, out: Tensor, prompts: Prompts, terms: Terms, gathered: Gathered | None
) -> None:
    """Attend keys in their pages, and values there or gathered."""
    (_, heads, size), kv_heads, page_size = query.shape, pages.keys.shape[2], pages.keys.shape[1]
    scales, tiles = pages.value_scales, prompts.tiles
    num_tiles = -(-prompts.longest_query // tiles.rows)
    tensors = (
        query, out, pages.keys, pages.values, pages.key_scales, pages.key_scales if scales is None else scales,
        pages.values if gathered is None else gathered.turned,
        pages.key_scales if terms.slopes is None else terms.slopes, prompts.query_starts, prompts.key_starts,
        prompts.seq_lens, prompts.table,
    )  # fmt: skip
    strides = (*query.stride()[:2], out.stride(0), 0 if gathered is None else gathered.columns)
    numbers = (
        prompts.table.stride(0), prompts.count, num_tiles, prompts.first, terms.left, terms.scale, terms.soft_cap,
    )  # fmt: skip
    constants = (
        kv_heads, heads // kv_heads, size, width_of(size), page_size, *page_strides(pages), *forms_of(terms),
        scales is not None, tiles.rows, tiles.keys, tiles.stages, INTERPRETED,
    )  # fmt: skip
    programs = prompts.count * num_tiles * heads
    _prefill_kernel.run(programs, tensors, strides, numbers, constants, num_warps=tiles.warps)
