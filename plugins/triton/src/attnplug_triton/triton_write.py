"""The kernel that writes keys and values with the scale of each token and head. Imports Triton."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _to_e4m3(x: tl.tensor) -> tl.tensor:
    """Return the codes of float32 numbers up to 448, rounded to nearest, ties to even. Not every GPU converts them."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    code = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) - (120 << 23)) >> 20
    # Subnormal numbers are multiples of 2^-9, which is the spacing of float32 from 2^14 on: the addition rounds.
    small = magnitude.to(tl.float32, bitcast=True) + 16384.0
    code = tl.where(magnitude < (121 << 23), small.to(tl.int32, bitcast=True) - (141 << 23), code)
    return tl.where(bits < 0, code | 0x80, code).to(tl.uint8)


@triton.jit
def _to_int8(x: tl.tensor) -> tl.tensor:
    """Return float32 numbers up to 127 as int8, rounded to nearest, ties to even."""
    x = tl.minimum(tl.maximum(x, -127.0), 127.0)
    # From 1.5 * 2^23 on the spacing of float32 is 1: the addition rounds, and the low bits are the integer.
    return (x + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def _write_row(row: tl.tensor, page: tl.tensor, scale: tl.tensor, size: tl.constexpr, width: tl.constexpr) -> None:
    """Write a row and its scale: the largest magnitude is 127 steps of int8, or 448 of e4m3. NaN makes the row NaN."""
    columns = tl.arange(0, width)
    inside = columns < size
    is_int8: tl.constexpr = page.dtype.element_ty == tl.int8
    x = tl.load(row + columns, mask=inside, other=0.0).to(tl.float32)
    magnitude = tl.abs(x)
    largest = tl.max(tl.where(magnitude < float("inf"), magnitude, float("inf")), 0)  # a maximum may drop NaN
    step = tl.div_rn(tl.where(largest > 0, largest, 1.0), 127.0 if is_int8 else 448.0)
    x = tl.div_rn(x, tl.zeros_like(x) + step)
    tl.store(page + columns, _to_int8(x) if is_int8 else _to_e4m3(x), mask=inside)
    tl.store(scale, step)


@triton.jit
def _write(
    key: tl.tensor,
    value: tl.tensor,
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    slots: tl.tensor,
    key_token: tl.int64,
    key_head: tl.int64,
    value_token: tl.int64,
    value_head: tl.int64,
    k_scale_page: tl.int64,
    k_scale_head: tl.int64,
    v_scale_page: tl.int64,
    v_scale_head: tl.int64,
    k_page: tl.int64,
    k_token: tl.int64,
    k_head: tl.int64,
    v_page: tl.int64,
    v_token: tl.int64,
    v_head: tl.int64,
    heads: tl.constexpr,
    size: tl.constexpr,
    size_v: tl.constexpr,
    width: tl.constexpr,
    width_v: tl.constexpr,
    page_size: tl.constexpr,
) -> None:
    """One program writes the key and the value of a token and head. Those with a negative slot are not written."""
    token, head = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    slot = tl.load(slots + token).to(tl.int64)
    if slot < 0:
        return
    page, slot = slot // page_size, slot % page_size
    k_at, v_at = page * k_page + slot * k_token + head * k_head, page * v_page + slot * v_token + head * v_head
    k_scale_at = k_scale + page * k_scale_page + head * k_scale_head + slot
    v_scale_at = v_scale + page * v_scale_page + head * v_scale_head + slot
    _write_row(key + token * key_token + head * key_head, key_pages + k_at, k_scale_at, size, width)
    _write_row(value + token * value_token + head * value_head, value_pages + v_at, v_scale_at, size_v, width_v)
