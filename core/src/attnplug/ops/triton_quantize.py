"""Rounds queries to FP8 in one launch, and latents to records of fp8_ds_mla. Imported only where Triton works."""

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


def quantize(query: Tensor, scale: Tensor, out: Tensor) -> bool:
    """
    Write queries into `out` and return True; return False if the kernel does not support them.

    Args:
        query: ``(tokens, heads, size)``.
        scale: float32, contiguous, one element or one per group of consecutive heads.
        out: float8_e4m3fn, contiguous, of the same shape.
    """
    tokens, heads, size = query.shape
    if not (query.stride(2) == 1 and (query.stride(1) == size or heads == 1) and scale.is_contiguous()):
        return False
    device, width = query.get_device(), heads * size
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return quantize(query, scale, out)
    unit = 1 if query.stride(0) % _UNIT else _UNIT
    addresses = (query.data_ptr(), scale.data_ptr(), out.data_ptr())
    form = (device, query.dtype, width, scale.numel(), unit, tuple(address % 16 for address in addresses))
    launch = _launches.get(form)
    if launch is None:
        tile = min(_TILE, triton.next_power_of_2(width))
        constants = (width, width // scale.numel(), scale.numel() > 1, unit, tile)
        launch = _launches[form] = Launch(_kernel, constants, num_warps=max(1, tile // 256))
    if not tokens:
        return True
    grid = (tokens, -(-width // min(_TILE, triton.next_power_of_2(width))), 1)
    if launch.is_compiled:
        launch.again(grid, *addresses, query.stride(0) // unit)
    else:
        launch.first(grid, query, scale, out.view(torch.uint8), query.stride(0) // unit)
    return True


def write_latents(rows: Tensor, pages: Tensor, slots: Tensor) -> bool:
    """
    Write latents as records and return True; return False if the kernel does not support them. Arguments as for
    `attnplug.ops.write_latents`.
    """
    count, width = slots.shape[0], pages.shape[-1]
    fits = (
        rows.ndim == 3
        and rows.shape[0] >= count
        and (rows.dtype, rows.shape[1:], rows.stride(2)) == (torch.bfloat16, (1, 576), 1)
        and (pages.dtype, pages.shape[2:]) == (torch.uint8, (1, 656))
        and (pages.stride(1) == width or pages.shape[1] == 1)
        and pages.stride(3) == 1
        and slots.is_contiguous()
        and slots.dtype in (torch.int64, torch.int32)
        and rows.get_device() == pages.get_device() == slots.get_device()
    )
    if not fits:
        return False
    device = rows.get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return write_latents(rows, pages, slots)
    unit = 1 if rows.stride(0) % _UNIT else _UNIT
    addresses = (rows.data_ptr(), pages.data_ptr(), slots.data_ptr())
    constants = (pages.shape[1], pages.stride(0), unit)
    form = ("latents", device, slots.dtype, constants, tuple(address % 16 for address in addresses))
    launch = _launches.get(form)
    if launch is None:
        launch = _launches[form] = Launch(_latents, constants, num_warps=1)
    if not count:
        return True
    if launch.is_compiled:
        launch.again((count, 1, 1), *addresses, rows.stride(0) // unit)
    else:
        launch.first((count, 1, 1), rows, pages, slots, rows.stride(0) // unit)
    return True


@triton.jit
def _e4m3(x: tl.tensor) -> tl.tensor:
    """
    Return the codes of float32 numbers up to 448, rounded to nearest, ties to even; NaN stays NaN.

    Computed in integers: Triton's conversion requires hardware support, and its interpreter loses bits.
    """
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    code = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) - 0x3C000000) >> 20
    # Below 2**-6 numbers are 2**-9 apart, as float32 numbers are near 2**14.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(magnitude < 0x3C800000, small, code)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return tl.where(bits < 0, code | 0x80, code).to(tl.uint8)


@triton.jit(do_not_specialize=["of_token"])
def _kernel(
    query: tl.tensor,
    scale: tl.tensor,
    out: tl.tensor,
    of_token: tl.int64,
    width: tl.constexpr,
    group: tl.constexpr,
    per_group: tl.constexpr,
    unit: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Round one tile of one token per program."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = place < width
    data = tl.load(query + token * (of_token * unit) + place, mask=inside, other=0.0).to(tl.float32)
    if per_group:
        data = tl.div_rn(data, tl.load(scale + place // group, mask=inside, other=1.0))
    else:
        data = tl.div_rn(data, tl.load(scale) + tl.zeros_like(data))
    data = tl.where(data > 448.0, 448.0, data)  # saturates; NaN stays NaN
    data = tl.where(data < -448.0, -448.0, data)
    tl.store(out + token * width + place, _e4m3(data), mask=inside)


@triton.jit(do_not_specialize=["of_token"])
def _latents(
    rows: tl.tensor,
    pages: tl.tensor,
    slots: tl.tensor,
    of_token: tl.int64,
    block_size: tl.constexpr,
    of_block: tl.constexpr,
    unit: tl.constexpr,
) -> None:
    """Write one record per program: 512 codes, 4 scales, 64 rotary elements."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    row = rows + token * (of_token * unit)
    page = pages + (slot // block_size) * of_block + (slot % block_size) * 656
    tile, column = tl.arange(0, 4)[:, None], tl.arange(0, 128)[None, :]
    place = tile * 128 + column
    data = tl.load(row + place).to(tl.float32)
    largest = tl.max(tl.abs(data), axis=1)
    scale = tl.div_rn(largest, 448.0 + tl.zeros_like(largest))
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)  # NaN stays NaN
    data = tl.div_rn(data, scale[:, None] + tl.zeros_like(data))
    data = tl.where(data > 448.0, 448.0, data)
    data = tl.where(data < -448.0, -448.0, data)
    tl.store(page + place, _e4m3(data), mask=slot >= tl.zeros_like(place))
    # A record is at any multiple of 16 bytes, its scales too; bytes need no cast of the pointer.
    byte = tl.arange(0, 4)[None, :]
    bits = scale.to(tl.int32, bitcast=True)[:, None] >> (byte * 8)
    where = 512 + tile * 4 + byte
    tl.store(page + where, (bits & 0xFF).to(tl.uint8), mask=slot >= tl.zeros_like(where))
    element, half = tl.arange(0, 64)[:, None], tl.arange(0, 2)[None, :]
    rotary = tl.load(row + 512 + element + tl.zeros_like(half)).to(tl.int16, bitcast=True).to(tl.int32) >> (half * 8)
    where = 528 + element * 2 + half
    tl.store(page + where, (rotary & 0xFF).to(tl.uint8), mask=slot >= tl.zeros_like(where))
