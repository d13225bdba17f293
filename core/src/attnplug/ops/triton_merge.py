"""Merges partial outputs by LSE in one launch. Imported only where Triton works."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
import triton
import triton.language as tl

from attnplug.ops.triton import Launch

if TYPE_CHECKING:
    from torch import Tensor

_TILE: Final = 1024
"""Elements of a program."""

_UNIT: Final = 8
"""A token stride that is a multiple of this is passed in this unit, so that the compiler knows its divisibility."""

_launches: dict[tuple[object, ...], Launch] = {}


def merge(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> bool:
    """
    Merge the second result into the first and return True; return False if the kernel does not support them.

    Arguments as for `attnplug.ops.merge_into`.
    """
    tokens, heads, size = out.shape
    if not (_is_dense(out, size) and other.is_contiguous() and other_lse.is_contiguous()):
        return False
    device, rows = out.get_device(), tokens * heads
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return merge(out, lse, other, other_lse)
    unit = 1 if out.stride(0) % _UNIT else _UNIT
    addresses = (out.data_ptr(), lse.data_ptr(), other.data_ptr(), other_lse.data_ptr())
    form = (device, out.dtype, heads, size, unit, tuple(address % 16 for address in addresses))
    launch = _launches.get(form)
    if launch is None:
        width = triton.next_power_of_2(size)
        constants = (heads, size, unit, max(1, _TILE // width), width)
        launch = _launches[form] = Launch(_kernel, constants, num_warps=4)
    grid = (-(-rows // max(1, _TILE // triton.next_power_of_2(size))), 1, 1)
    numbers = (out.stride(0) // unit, *lse.stride(), rows)
    if not rows:
        return True
    if launch.is_compiled:
        launch.again(grid, *addresses, *numbers)
    else:
        launch.first(grid, out, lse, other, other_lse, *numbers)
    return True


def _is_dense(out: Tensor, size: int) -> bool:
    return out.stride(2) == 1 and (out.stride(1) == size or out.shape[1] == 1)


@triton.jit(do_not_specialize=["of_token", "of_sum", "of_sum_head", "rows"])
def _kernel(
    out: tl.tensor,
    lse: tl.tensor,
    other: tl.tensor,
    other_lse: tl.tensor,
    of_token: tl.int64,
    of_sum: tl.int64,
    of_sum_head: tl.int64,
    rows: tl.int64,
    heads: tl.constexpr,
    size: tl.constexpr,
    unit: tl.constexpr,
    tile: tl.constexpr,
    width: tl.constexpr,
) -> None:
    """Merge one tile of rows per program, each one head of one token."""
    row = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    column = tl.arange(0, width)
    there = row < rows
    inside = there[:, None] & (column < size)[None, :]
    token, head = row // heads, row % heads
    sums = lse + token * of_sum + head * of_sum_head
    one = tl.load(sums, mask=there, other=0.0)
    two = tl.load(other_lse + row, mask=there, other=0.0)
    highest = tl.maximum(one, two)
    shift = tl.where(highest == float("-inf"), 0.0, highest)
    weight, other_weight = tl.exp(one - shift), tl.exp(two - shift)
    total = weight + other_weight
    mine = out + (token * (of_token * unit) + head * size)[:, None] + column[None, :]
    data = tl.load(mine, mask=inside, other=0.0).to(tl.float32)
    others = tl.load(other + (row * size)[:, None] + column[None, :], mask=inside, other=0.0).to(tl.float32)
    # The output of a side without keys may hold NaN: it is replaced, not scaled.
    data = tl.where((weight > 0)[:, None], data * (weight / total)[:, None], 0.0)
    others = tl.where((other_weight > 0)[:, None], others * (other_weight / total)[:, None], 0.0)
    tl.store(mine, (data + others).to(out.dtype.element_ty), mask=inside)
    tl.store(sums, shift + tl.log(total), mask=there)
