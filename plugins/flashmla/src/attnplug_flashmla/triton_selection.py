"""Masks the slots of selected tokens. Imported only where Triton is installed."""

from __future__ import annotations

import triton
import triton.language as tl

from attnplug.ops import Kernel


@triton.jit(do_not_specialize=["slots", "of_block"])
def _mask(
    indices: tl.tensor,
    lens: tl.tensor,
    out: tl.tensor,
    of_token: tl.int64,
    slots: tl.int64,
    of_block: tl.int64,
    topk: tl.constexpr,
    width: tl.constexpr,
    block_size: tl.constexpr,
    of_slot: tl.constexpr,
    are_slots: tl.constexpr,
    has_lens: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write one tile of the entries of one token per program."""
    tiles: tl.constexpr = (width + tile - 1) // tile
    token = (tl.program_id(0) // tiles).to(tl.int64)
    column = tl.program_id(0) % tiles * tile + tl.arange(0, tile)
    slot = tl.load(indices + token * of_token + column, mask=column < topk, other=-1)
    if has_lens:
        slot = tl.where(column < tl.load(lens + token), slot, -1)
    is_token = (slot >= 0) & (slot < slots)
    if not are_slots:
        slot = ((slot // block_size) * of_block + (slot % block_size) * of_slot).to(tl.int32)
    tl.store(out + token * width + column, tl.where(is_token, slot, -1), mask=column < width)


mask_kernel = Kernel(_mask)
