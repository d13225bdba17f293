"""Writes K and V into the pages of a KV cache."""

from __future__ import annotations

import torch
from torch import Tensor

from attnplug.contract.inputs.kv_cache import is_narrow_float
from attnplug.errors import CacheError, TensorError
from attnplug.ops.gather import slots_view
from attnplug.ops.quantize import quantize, quantize_latents
from attnplug.ops.triton import triton_function
from attnplug.request.domains import FP8_DS_MLA_BYTES


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
    Write each row of K and of V into its slot: the same bits as two calls of `write_pages`.

    Where Triton works, it is one launch on a GPU: nothing is allocated for rows with contiguous elements, the device is
    never waited for, and a captured graph replays it. The first call of each combination of dtypes, row shapes and
    cache strides compiles: call it in a warm-up.

    Args:
        key: ``(tokens, num_kv_heads, head_size)``, of any strides; rows beyond the slot mapping are not read.
        value: ``(tokens, num_kv_heads, head_size_v)``, likewise.
        key_pages: ``(num_blocks, block_size, num_kv_heads, head_size)``, of any strides; written in place.
        value_pages: ``(num_blocks, block_size, num_kv_heads, head_size_v)``, likewise.
        slot_mapping: ``(n,)`` int64, see `write_pages`.
        k_scale: The scale of keys, see `write_pages`.
        v_scale: The scale of values, likewise.
        padded: Whether a slot may be negative, see `write_pages`.

    Raises:
        TensorError: The shapes do not fit together, or slots and pages are on different devices; nothing is written.
        CacheError: A slot on the CPU is beyond the pages; nothing is written.
    """
    write = triton_function("attnplug.ops.triton_write", "write") if slot_mapping.is_cuda else None
    if write is not None and write(key, value, key_pages, value_pages, slot_mapping, k_scale, v_scale):
        return
    for rows, pages in ((key, key_pages), (value, value_pages)):  # of both, before anything is written
        _check_shapes(rows, pages, slot_mapping.shape[0])
        _check_slots(pages, slot_mapping)
    _write(key, key_pages, slot_mapping, k_scale, padded=padded)
    _write(value, value_pages, slot_mapping, v_scale, padded=padded)


def write_pages(
    rows: Tensor, pages: Tensor, slot_mapping: Tensor, scale: Tensor | None = None, *, padded: bool = True
) -> None:
    """
    Write each row of K, of V or of any other role into its slot; rows whose slot is negative (PAD_SLOT_ID) are skipped.

    Only the given slots change, block 0 included, and the device is never waited for. The order in memory is that of
    the pages: an HND cache is passed as its NHD view. Rows are converted to the dtype of the pages; for FP8 they are
    divided by the scale, and saturate.

    Args:
        rows: ``(tokens, num_kv_heads, head_size)``; rows beyond the slot mapping are not read. FP8 rows are already
            quantized.
        pages: ``(num_blocks, block_size, num_kv_heads, head_size)``, of any strides; written in place.
        slot_mapping: ``(n,)`` int64 with ``n <= tokens``, no slot twice. Where some are negative, no other may be
            slot 0, which is in the null block.
        scale: The scale of FP8 pages: float32, one element or ``(num_kv_heads,)``; None is 1.
        padded: Whether a slot may be negative. False saves a check.

    Raises:
        TensorError: The shapes do not fit together, or slots and pages are on different devices; nothing is written.
        CacheError: A slot on the CPU is beyond the pages; nothing is written.
    """
    _check_shapes(rows, pages, slot_mapping.shape[0])
    _check_slots(pages, slot_mapping)
    _write(rows, pages, slot_mapping, scale, padded=padded)


def write_latents(rows: Tensor, pages: Tensor, slot_mapping: Tensor, *, padded: bool = True) -> None:
    """
    Write latents into their slots as records of fp8_ds_mla, see `quantize_latents`. One launch where Triton works.

    Args:
        rows: ``(tokens, 1, 576)`` bfloat16; rows beyond the slot mapping are not read.
        pages: ``(num_blocks, block_size, 1, 656)`` uint8, each block contiguous; written in place.
        slot_mapping: ``(n,)`` int64, see `write_pages`.
        padded: Whether a slot may be negative, see `write_pages`.

    Raises:
        TensorError: As of `write_pages`, or rows or pages are of another dtype: their bytes would be read as others.
        CacheError: As of `write_pages`.
    """
    write = triton_function("attnplug.ops.triton_quantize", "write_latents") if slot_mapping.is_cuda else None
    if write is None or not write(rows, pages, slot_mapping):
        _check_latents(rows, pages)
        write_pages(quantize_latents(rows[: slot_mapping.shape[0]]), pages, slot_mapping, padded=padded)


def _write(rows: Tensor, pages: Tensor, slot_mapping: Tensor, scale: Tensor | None, *, padded: bool) -> None:
    num_slots = slot_mapping.shape[0]
    if rows.shape[0] > num_slots:
        rows = rows[:num_slots]
    if is_narrow_float(pages.dtype):
        rows = rows if rows.dtype == pages.dtype else quantize(rows, pages.dtype, scale)
        rows, pages = rows.view(torch.uint8), pages.view(torch.uint8)
    elif rows.dtype != pages.dtype:
        rows = rows.to(pages.dtype)
    if not padded:
        _write_rows(rows, pages, slot_mapping)
    elif pages.is_cpu:
        _write_unpadded(rows, pages, slot_mapping)
    else:
        _write_padded(rows, pages, slot_mapping)


def _check_shapes(rows: Tensor, pages: Tensor, num_slots: int) -> None:
    if rows.shape[0] < num_slots or rows.shape[1:] != pages.shape[2:]:
        raise TensorError(
            f"rows of shape {tuple(rows.shape)} and {num_slots} slots were given for pages {tuple(pages.shape)}",
            "rows are (tokens, num_kv_heads, head_size), at least as many as slots, with the heads of the pages",
            "pass this step's K or V and its slot mapping",
        )


def _check_latents(rows: Tensor, pages: Tensor) -> None:
    is_latent = rows.dtype == torch.bfloat16 and rows.shape[1:] == (1, 576)
    if not is_latent or pages.dtype != torch.uint8 or pages.shape[2:] != (1, FP8_DS_MLA_BYTES):
        raise TensorError(
            f"rows {tuple(rows.shape)} {rows.dtype} were given for pages {tuple(pages.shape)} {pages.dtype}",
            f"rows are (tokens, 1, 576) bfloat16, and pages (num_blocks, block_size, 1, {FP8_DS_MLA_BYTES}) uint8",
            "write other latents by write_kv or write_pages",
        )


def _check_slots(pages: Tensor, slots: Tensor) -> None:
    if slots.device != pages.device:
        raise TensorError(
            f"slots on {slots.device} were given for pages on {pages.device}",
            "both are on one device",
            f"pass slot_mapping.to({str(pages.device)!r})",
        )
    if slots.is_cpu and slots.numel() and not slots.untyped_storage().nbytes():  # torch would read it all the same
        raise TensorError(
            "slots whose memory was freed were given",
            "the slots of a batch stay as they are from its build to its forward",
            "keep the memory of a step's slot mapping until its forward",
        )
    if slots.is_cpu and slots.numel() and int(slots.max()) >= pages.shape[0] * pages.shape[1]:
        raise CacheError(
            f"slot {int(slots.max())} was given",
            f"the pages have {pages.shape[0]} blocks of {pages.shape[1]} tokens, slots 0 to"
            f" {pages.shape[0] * pages.shape[1] - 1}",
            "pass the slots of this KV cache: block * block_size + offset",
        )


def _write_unpadded(rows: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Remove padded rows, then write. Only on the CPU their number is known without waiting."""
    if slots.numel() and int(slots.min()) < 0:
        kept = (slots >= 0).nonzero().squeeze(1)
        rows, slots = rows.index_select(0, kept), slots.index_select(0, kept)
    _write_rows(rows, pages, slots)


def _write_padded(rows: Tensor, pages: Tensor, slots: Tensor) -> None:
    """Write all rows, and for padded ones the content of slot 0 into slot 0."""
    # The number of rows does not depend on the device, so that a captured graph replays it. The null block keeps its
    # bits, since all writers of slot 0 write the same.
    padded = (slots < 0).view(-1, 1, 1)
    _write_rows(torch.where(padded, pages[0, :1], rows), pages, slots.clamp(min=0))


def _write_rows(rows: Tensor, pages: Tensor, slots: Tensor) -> None:
    flat = slots_view(pages)
    if flat is not None:
        flat.index_copy_(0, slots, rows)
        return
    block_size = pages.shape[1]
    pages[torch.div(slots, block_size, rounding_mode="floor"), slots % block_size] = rows
