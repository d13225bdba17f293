"""The two halves of a layer's cache."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attnplug.contract.inputs.kv_cache import is_narrow_float
from attnplug.errors import CacheError, TensorError
from attnplug.ops.gather import as_slots
from attnplug.ops.quantize import quantize
from attnplug.ops.triton import triton_works

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnplug.contract.inputs.kv_cache import Cache


def key_and_value_pages(cache: Cache) -> tuple[Tensor, Tensor]:
    """
    Return the pages of keys and of values of one layer, as views: what is written into them is in the cache.

    Args:
        cache: What `Backend.make_cache` returned: a tensor ``(2, num_blocks, block_size, num_kv_heads, head_size)``,
            keys first, alone or as the role ``"kv"`` of a mapping; or a mapping with the roles ``"k"`` and ``"v"``,
            each without the leading axis. The order in memory is any.

    Returns:
        Two tensors ``(num_blocks, block_size, num_kv_heads, size)``, of the cache's strides.

    Raises:
        CacheError: It has neither form.
    """
    both = cache.get("kv") if isinstance(cache, Mapping) else cache
    if both is not None and both.ndim == 5 and both.shape[0] == 2:
        return both[0], both[1]
    if isinstance(cache, Mapping) and "k" in cache and "v" in cache:
        return cache["k"], cache["v"]
    raise CacheError(
        f"keys and values were looked for in a cache {_form(cache)}",
        "it is one tensor (2, num_blocks, block_size, num_kv_heads, head_size), or has the roles 'k' and 'v'",
        "return one of these forms from Backend.cache_tensors; stride_order says how kernels want it in memory",
    )


def _form(cache: Cache) -> str:
    if isinstance(cache, Mapping):
        return f"with the roles {', '.join(map(repr, cache)) or 'none'}"
    return f"of shape {tuple(cache.shape)}"


def write_kv(
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    padded: bool = True,
) -> None:
    """
    Write each row of K and of V into its slot, as two calls of `write_cache` do and to the bit.

    On a GPU that Triton knows it is one launch: nothing is allocated for rows whose elements lie side by side, the
    device is never waited for, and a captured graph replays it. The first call of each combination of dtypes, row
    shapes and cache strides compiles, which a warm-up should see to.

    Args:
        key: ``(tokens, num_kv_heads, head_size)``, of any strides; rows beyond the slot mapping are not read.
        value: ``(tokens, num_kv_heads, head_size_v)``, likewise.
        key_pages: ``(num_blocks, block_size, num_kv_heads, head_size)``, of any strides; written in place.
        value_pages: ``(num_blocks, block_size, num_kv_heads, head_size_v)``, likewise.
        slot_mapping: ``(n,)`` int64, as of `write_cache`.
        k_scale: As the scale of `write_cache`.
        v_scale: Likewise.
        padded: As of `write_cache`.

    Raises:
        TensorError: The shapes do not fit together; nothing is written.
    """
    write = _in_one_launch() if slot_mapping.is_cuda else None
    if write is not None and write(key, value, key_pages, value_pages, slot_mapping, k_scale, v_scale):
        return
    for rows, pages in ((key, key_pages), (value, value_pages)):
        _check_shapes(rows, pages, slot_mapping.shape[0])
    write_cache(key, key_pages, slot_mapping, k_scale, padded=padded)
    write_cache(value, value_pages, slot_mapping, v_scale, padded=padded)


def write_cache(
    rows: Tensor, pages: Tensor, slot_mapping: Tensor, scale: Tensor | None = None, *, padded: bool = True
) -> None:
    """
    Write each row into its slot; rows whose slot is PAD_SLOT_ID (any negative one) are skipped.

    Nothing but the given slots changes, block 0 included, and a device is never waited for. The order in memory is the
    cache's own affair: an HND cache is given as its NHD view. Rows are converted to the cache's dtype; for 8-bit floats
    they are divided by the scale, and what is too large becomes the largest number.

    Args:
        rows: ``(tokens, num_kv_heads, head_size)``; rows beyond the slot mapping are not read. Rows that are in the
            dtype of an 8-bit cache are quantized already.
        pages: ``(num_blocks, block_size, num_kv_heads, head_size)``, of any strides; written in place.
        slot_mapping: ``(n,)`` int64 with ``n <= tokens``, no slot twice. Where some are padded, no other may be
            slot 0: the null block is never given to a request.
        scale: Of an 8-bit float cache: float32, one element or ``(num_kv_heads,)``; None is 1.
        padded: Whether a slot may be negative; False, where the host knows better, saves looking.

    Raises:
        TensorError: The shapes do not fit together.
    """
    num_slots = slot_mapping.shape[0]
    _check_shapes(rows, pages, num_slots)
    if rows.shape[0] > num_slots:
        rows = rows[:num_slots]
    if is_narrow_float(pages.dtype):
        rows = rows if rows.dtype == pages.dtype else quantize(rows, pages.dtype, scale)
        rows, pages = rows.view(torch.uint8), pages.view(torch.uint8)
    elif rows.dtype != pages.dtype:
        rows = rows.to(pages.dtype)
    if not padded:
        _put(rows, pages, slot_mapping)
    elif pages.is_cpu:
        _write_selected(rows, pages, slot_mapping)
    else:
        _write_all(rows, pages, slot_mapping)


@cache
def _in_one_launch() -> Callable[..., bool] | None:
    if not triton_works():
        return None
    from attnplug.ops.triton_write import write  # noqa: PLC0415 - Triton is imported where it works, and there alone

    return write


def _check_shapes(rows: Tensor, pages: Tensor, num_slots: int) -> None:
    if rows.shape[0] < num_slots or rows.shape[1:] != pages.shape[2:]:
        raise TensorError(
            f"rows of shape {tuple(rows.shape)} and {num_slots} slots were given for pages {tuple(pages.shape)}",
            "rows are (tokens, num_kv_heads, head_size), at least as many as slots, with the heads of the pages",
            "pass this step's K or V and its slot mapping",
        )


def _write_selected(rows: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Drop the padded rows, then write. How many remain has to be known, which is free on the CPU alone."""
    if slots.numel() and int(slots.min()) < 0:
        kept = (slots >= 0).nonzero().squeeze(1)
        rows, slots = rows.index_select(0, kept), slots.index_select(0, kept)
    _put(rows, pages, slots)


def _write_all(rows: Tensor, pages: Tensor, slots: Tensor) -> None:
    """
    Let every padded row write what slot 0 holds into slot 0.

    The number of written rows is then known without asking the device, a captured graph replays it, and the null block
    still keeps its bits: the many writers of slot 0 agree.
    """
    padded = (slots < 0).view(-1, 1, 1)
    _put(torch.where(padded, pages[0, :1], rows), pages, slots.clamp(min=0))


def _put(rows: Tensor, pages: Tensor, slots: Tensor) -> None:
    flat = as_slots(pages)
    if flat is not None:
        flat.index_copy_(0, slots, rows)
        return
    block_size = pages.shape[1]
    pages[torch.div(slots, block_size, rounding_mode="floor"), slots % block_size] = rows
