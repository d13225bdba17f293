"""Writes K and V into a paged KV cache in one launch. Imported only where Triton works."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import triton
import triton.language as tl

from attnplug.ops.triton import Launch

if TYPE_CHECKING:
    from torch import Tensor

_TILE: Final = 1024
"""Most elements of a program: 16 bytes of bfloat16 for each of 128 threads."""

_UNIT: Final = 8
"""Row strides that are multiples of this are passed in this unit, so that the compiler knows their divisibility."""

_COPIED: Final = -1
_WIDE: Final = frozenset((torch.float32, torch.bfloat16, torch.float16))
_MANTISSAS: Final = {
    torch.float8_e5m2: 2,
    torch.float8_e4m3fn: 3,
    torch.bfloat16: 7,
    torch.float16: 10,
    torch.float32: 23,
}
_INTEGERS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

_launches: dict[tuple[object, ...], _Write | None] = {}
_UNKNOWN: Final = "unknown"  # None: the kernel does not support this form


def write(
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> bool:
    """
    Write K and V and return True; return False if the kernel does not support them. Arguments as for `write_kv`.

    A launch is kept per form: what decides whether the kernel supports it, and what is compiled in. Only addresses, and
    row strides that may follow from the number of tokens, change from step to step.
    """
    count = slots.shape[0]
    if key.ndim != 3 or value.ndim != 3 or key.shape[0] < count or value.shape[0] < count:
        return False
    key, value, slots = _dense(key), _dense(value), slots.contiguous()
    (key_token, key_head, _), (value_token, value_head, _) = key.stride(), value.stride()
    unit = 1 if (key_token | key_head | value_token | value_head) % _UNIT else _UNIT
    addresses = (key.data_ptr(), value.data_ptr(), key_pages.data_ptr(), value_pages.data_ptr())
    is_aligned = (addresses[0] | addresses[1] | addresses[2] | addresses[3]) % 16 == 0
    aligned = None if is_aligned else tuple(address % 16 for address in addresses)
    device = slots.get_device()
    forms = (*_form(key, key_head, key_pages, k_scale), *_form(value, value_head, value_pages, v_scale))
    form = (device, slots.dtype, unit, aligned, *forms)
    launch = _launches.get(form, _UNKNOWN)
    if isinstance(launch, str):
        launch = _launches[form] = _launch(key, value, key_pages, value_pages, slots, k_scale, v_scale, unit)
    if launch is None:
        return False
    if not count:
        return True
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return write(key, value, key_pages, value_pages, slots, k_scale, v_scale)
    grid = (count, launch.programs, 1)
    strides = (key_token // unit, key_head // unit, value_token // unit, value_head // unit)
    scales = (slots if k_scale is None else k_scale, slots if v_scale is None else v_scale)
    if launch.is_compiled:
        launch.again(grid, *addresses, slots.data_ptr(), scales[0].data_ptr(), scales[1].data_ptr(), *strides)
    else:
        parts = (*_operands(key, key_pages), *_operands(value, value_pages))
        launch.first(grid, parts[0], parts[2], parts[1], parts[3], slots, *scales, *strides)
    return True


def _dense(rows: Tensor) -> Tensor:
    """Return rows with contiguous elements: nearly always the rows themselves."""
    return rows if rows.stride()[2] == 1 else rows.contiguous()


def _form(rows: Tensor, of_head: int, pages: Tensor, scale: Tensor | None) -> tuple[object, ...]:
    """Return what the code for K or V is compiled for."""
    scales = None if scale is None else (scale.dtype, scale.shape, scale.stride(), scale.get_device())
    _, heads, size = rows.shape
    here = (rows.dtype, rows.get_device(), heads, size, of_head == size)
    return (*here, pages.dtype, pages.get_device(), pages.shape[1:], pages.stride(), scales)


def _launch(
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    unit: int,
) -> _Write | None:
    halves = (_constants(key, key_pages, k_scale, slots), _constants(value, value_pages, v_scale, slots))
    if halves[0] is None or halves[1] is None or slots.dtype not in (torch.int64, torch.int32):
        return None
    longest = max(key[:1].numel(), value[:1].numel())
    tile = min(_TILE, triton.next_power_of_2(longest))
    return _Write(-(-longest // tile), (*halves[0], *halves[1], unit, tile), num_warps=min(4, max(1, tile // 256)))


class _Write(Launch):
    """
    A launch.

    Attributes:
        programs: Programs per token.
    """

    __slots__ = ("programs",)

    def __init__(self, programs: int, constants: tuple[Any, ...], **options: Any) -> None:
        super().__init__(_kernel, constants, **options)
        self.programs = programs


def _constants(rows: Tensor, pages: Tensor, scale: Tensor | None, slots: Tensor) -> tuple[int | bool, ...] | None:
    """Return the constants for K or V, or None if the kernel does not support it."""
    if pages.ndim != 4 or rows.shape[1:] != pages.shape[2:] or not pages.numel() or slots.ndim != 1:
        return None
    if not rows.get_device() == pages.get_device() == slots.get_device():
        return None
    mantissa, scales = _COPIED, 0
    if rows.dtype == pages.dtype:
        if rows.itemsize not in _INTEGERS:
            return None
    elif rows.dtype in _WIDE and pages.dtype in _MANTISSAS:
        mantissa = _MANTISSAS[pages.dtype]
        if scale is not None and pages.itemsize == 1:
            if not _is_scale(scale, pages):
                return None
            scales = scale.numel()
    else:
        return None
    heads, size = rows.shape[1:]
    return (heads, size, heads == 1 or rows.stride(1) == size, pages.shape[1], *pages.stride(), mantissa, scales)


def _is_scale(scale: Tensor, pages: Tensor) -> bool:
    fits = scale.numel() == 1 or scale.shape == pages.shape[2:3]
    return fits and scale.dtype == torch.float32 and scale.is_contiguous() and scale.get_device() == pages.get_device()


def _operands(rows: Tensor, pages: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows and pages as the kernel takes them: copied bits, and FP8 that not every device has, as integers."""
    integer = _INTEGERS[pages.itemsize]
    if rows.dtype == pages.dtype:
        return rows.view(integer), pages.view(integer)
    return rows, pages.view(integer) if _MANTISSAS[pages.dtype] <= 7 else pages


@triton.jit
def _rounded(
    x: tl.tensor, mantissa: tl.constexpr, bias: tl.constexpr, nan: tl.constexpr, sign: tl.constexpr
) -> tl.tensor:
    """
    Return the codes of float32 numbers in a narrower float, rounded to nearest, ties to even. NaN stays NaN.

    Computed in integers: FP8 conversions exist on some devices only, and differ.
    """
    shift: tl.constexpr = 23 - mantissa
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    half: tl.constexpr = (1 << (shift - 1)) - 1
    code = (magnitude + half + ((magnitude >> shift) & 1) - ((127 - bias) << 23)) >> shift
    if bias < 127:
        # Subnormal numbers are equally spaced. Adding a float32 with that spacing rounds to them.
        anchor: tl.constexpr = 151 - bias - mantissa
        small = magnitude.to(tl.float32, bitcast=True) + 2.0 ** (anchor - 127)
        code = tl.where(magnitude < ((128 - bias) << 23), small.to(tl.int32, bitcast=True) - (anchor << 23), code)
    code = tl.where(magnitude > 0x7F800000, nan, code)
    return tl.where(bits < 0, code | sign, code)


@triton.jit
def _converted(
    data: tl.tensor, scale: tl.tensor, head: tl.tensor, inside: tl.tensor, mantissa: tl.constexpr, scales: tl.constexpr
) -> tl.tensor:
    """Return data in the dtype of the pages: numbers where Triton has the dtype, else codes that are rounded here."""
    x = data.to(tl.float32)
    if mantissa == 23:
        return x
    elif mantissa == 10:
        return x.to(tl.float16)
    elif mantissa == 7:
        return _rounded(x, 7, 127, 0x7FC0, 0x8000).to(tl.int16)
    else:
        largest: tl.constexpr = 448.0 if mantissa == 3 else 57344.0
        if scales == 1:
            x = tl.div_rn(x, tl.load(scale) + tl.zeros_like(x))
        elif scales > 1:
            x = tl.div_rn(x, tl.load(scale + head, mask=inside, other=1.0))
        x = tl.where(x > largest, largest, x)
        x = tl.where(x < -largest, -largest, x)
        return _rounded(x, mantissa, 7 if mantissa == 3 else 15, 0x7F, 0x80).to(tl.uint8)


@triton.jit
def _half(
    rows: tl.tensor,
    pages: tl.tensor,
    scale: tl.tensor,
    slot: tl.tensor,
    of_token: tl.tensor,
    of_row_head: tl.tensor,
    heads: tl.constexpr,
    size: tl.constexpr,
    packed: tl.constexpr,
    block_size: tl.constexpr,
    of_block: tl.constexpr,
    of_slot: tl.constexpr,
    of_head: tl.constexpr,
    of_element: tl.constexpr,
    mantissa: tl.constexpr,
    scales: tl.constexpr,
    unit: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write one tile of K or V of one token."""
    place = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = place < heads * size
    head, column = place // size, place % size
    row = rows + tl.program_id(0).to(tl.int64) * (of_token * unit)
    if packed:
        data = tl.load(row + place, mask=inside)
    else:
        data = tl.load(row + (head * (of_row_head * unit) + column), mask=inside)
    if mantissa >= 0:
        data = _converted(data, scale, head, inside, mantissa, scales)
    page = pages + (slot // block_size) * of_block + (slot % block_size) * of_slot
    if heads * of_head + size * of_element < 2147483648:
        offset = head * of_head + column * of_element
    else:
        offset = head.to(tl.int64) * of_head + column.to(tl.int64) * of_element
    # A negative slot gives an address that is never written. The interpreter of Triton 3.9 takes no mask that is one
    # condition broadcast to all places.
    tl.store(page + offset, data, mask=inside & (slot >= tl.zeros_like(place)))


@triton.jit(
    do_not_specialize=["key_token", "key_head", "value_token", "value_head"],
    do_not_specialize_on_alignment=["slots", "k_scale", "v_scale"],
)
def _kernel(
    key: tl.tensor,
    value: tl.tensor,
    key_pages: tl.tensor,
    value_pages: tl.tensor,
    slots: tl.tensor,
    k_scale: tl.tensor,
    v_scale: tl.tensor,
    key_token: tl.int64,
    key_head: tl.int64,
    value_token: tl.int64,
    value_head: tl.int64,
    k_heads: tl.constexpr,
    k_size: tl.constexpr,
    k_packed: tl.constexpr,
    k_block_size: tl.constexpr,
    k_of_block: tl.constexpr,
    k_of_slot: tl.constexpr,
    k_of_head: tl.constexpr,
    k_of_element: tl.constexpr,
    k_mantissa: tl.constexpr,
    k_scales: tl.constexpr,
    v_heads: tl.constexpr,
    v_size: tl.constexpr,
    v_packed: tl.constexpr,
    v_block_size: tl.constexpr,
    v_of_block: tl.constexpr,
    v_of_slot: tl.constexpr,
    v_of_head: tl.constexpr,
    v_of_element: tl.constexpr,
    v_mantissa: tl.constexpr,
    v_scales: tl.constexpr,
    unit: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    """Write one tile of K and of V of one token per program."""
    slot = tl.load(slots + tl.program_id(0)).to(tl.int64)
    _half(
        key, key_pages, k_scale, slot, key_token, key_head, k_heads, k_size, k_packed, k_block_size, k_of_block,
        k_of_slot, k_of_head, k_of_element, k_mantissa, k_scales, unit, tile,
    )  # fmt: skip
    _half(
        value, value_pages, v_scale, slot, value_token, value_head, v_heads, v_size, v_packed, v_block_size, v_of_block,
        v_of_slot, v_of_head, v_of_element, v_mantissa, v_scales, unit, tile,
    )  # fmt: skip
