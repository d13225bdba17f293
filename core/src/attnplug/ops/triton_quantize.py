"""Rounds queries to FP8 in one launch. Imported only where Triton works."""

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
