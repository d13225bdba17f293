"""The library sgl-flash-mla. Only this module calls it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import frozen

from attnplug.errors import PluginLoadError
from attnplug.ops import quantize_latents
from attnplug_flashmla.plugin import LIBRARY
from attnplug_flashmla.selection import mask_indices, places_of, rows_of

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug import Agreement

TILE: Final = 64
"""Rows of a tile: one query token of one head each. Fewer rows take the time of a tile."""


@frozen(eq=False)
class Call:
    """
    One call of the kernels: requests of one query length, or equal pieces of a long query, which are requests too.

    Attributes:
        first: The first query row.
        last: The row behind the last one.
        query_len: Rows of each request.
        lens: ``(requests,)`` int32, the keys of each request, up to its last row.
        table: ``(requests, max_blocks)`` int32; the rows of pieces are one row of memory.
        causal: Whether rows of a request attend to no later key.
        schedule: ``(parts, 8)`` int32, the requests and pages of each part of the GPU.
        splits: ``(requests + 1,)`` int32, the first partial result of each request.
        padding: ``(rows, 1)`` bool, rows of requests without a key, which `lens` and `table` give one of the null
            block; None if no request lacks a key, or the kernels take such requests.
    """

    first: int
    last: int
    query_len: int
    lens: Tensor
    table: Tensor
    causal: bool
    schedule: Tensor
    splits: Tensor
    padding: Tensor | None = None


@frozen(eq=False)
class SparseCall:
    """
    One call of the sparse kernels: query tokens, whose keys come with the call.

    Attributes:
        first: The first query row.
        last: The row behind the last one.
        schedule: The library's object with the schedule of its decode kernel, which follows from the shapes alone. The
            first layer of a step fills it in; in a call of a graph it is made ahead.
    """

    first: int
    last: int
    schedule: Any


class Kernels:
    """
    The kernels of the library for Hopper, which it calls legacy.

    Args:
        agreement: The agreement.
        device: The device.

    Attributes:
        is_fp8: Whether queries and the KV cache are in float8_e4m3fn. These kernels compute both products in FP8, and
            read out of bounds for a request without a key.
        has_records: Whether the KV cache is fp8_ds_mla. The sparse decode kernel reads it, dequantized to bfloat16.
        sparse_heads: The query heads that the sparse kernels compute: 64 or 128.

    Raises:
        PluginLoadError: The library does not load.
    """

    def __init__(self, agreement: Agreement, device: torch.device) -> None:
        from flash_mla import flash_mla_interface  # noqa: PLC0415 - loads two libraries of kernels

        try:
            flash_mla_interface.get_ops(True)  # noqa: FBT003 - the library's signature; it reports what did not load
        except RuntimeError as error:
            raise PluginLoadError(
                f"the kernels of {LIBRARY} do not load: {error}",
                "its library _C_legacy needs CUDA 13 and torch 2.10 or newer",
                "install a torch for CUDA 13, or let attnplug choose another backend",
            ) from error
        self._library: Any = flash_mla_interface
        self.is_fp8 = agreement.kv_cache_dtype == "fp8_e4m3"
        self.has_records = agreement.kv_cache_dtype == "fp8_ds_mla"
        required = agreement.requirements
        self._device = device
        self._heads = required.num_q_heads
        self._size = required.head_size
        self._block_size = agreement.block_size or 1  # with pages there is one
        self._topk = required.topk or 0
        self.sparse_heads = TILE if self._heads <= TILE else 2 * TILE
        self._value_size = required.head_size_v or required.head_size

    def schedule(self, lens: Tensor, query_len: int) -> tuple[Tensor, Tensor]:
        """
        Return the schedule and the splits of a call, computed on the device.

        Args:
            lens: ``(requests,)`` int32, contiguous.
            query_len: Rows of each request.
        """
        schedule, splits = self._library.get_mla_decoding_metadata(
            lens, query_len * self._heads, 1, self._heads, is_fp8_kvcache=self.is_fp8, use_legacy=True
        )
        return schedule, splits

    def attend(
        self, query: Tensor, pages: Tensor, call: Call, scale: float, descales: tuple[Tensor | None, Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """
        Return the output ``(rows, heads * head_size_v)`` and the natural LSE ``(rows, heads)``, +inf without a key.

        Args:
            query: ``(rows, heads, head_size)``, the rows of the call.
            pages: ``(num_blocks, 64, 1, head_size)``, blocks apart by any multiple of 16 bytes.
            call: The call.
            scale: The factor of scores.
            descales: ``(1,)`` float32 of queries and of keys, for FP8.
        """
        requests = call.lens.shape[0]
        out, lse = self._library.flash_mla_with_kvcache(
            query.contiguous().view(requests, call.query_len, self._heads, -1),
            pages,
            call.table,
            call.lens,
            self._value_size,
            self._library.FlashMLASchedMeta(tile_scheduler_metadata=call.schedule, num_splits=call.splits),
            softmax_scale=scale,
            causal=call.causal,
            is_fp8_kvcache=self.is_fp8,
            use_legacy=True,
            descale_q=descales[0],
            descale_k=descales[1],
        )
        return out.view(query.shape[0], -1), lse.transpose(1, 2).reshape(query.shape[0], -1)

    def sparse_call(self, first: int, last: int) -> SparseCall:
        """Return a call for query rows, without a schedule yet."""
        return SparseCall(first, last, self._library.FlashMLASchedMeta())

    def graph_call(self, first: int, last: int) -> SparseCall:
        """
        Return a call that a graph records, with its schedule, which a run without a token makes.

        A graph knows addresses alone. Memory of its own would hold nothing before its first replay, and memory that is
        replaced later would be freed under it.
        """
        call, tokens = self.sparse_call(first, last), last - first
        if self.has_records:
            query = torch.zeros(tokens, self._heads, self._size, dtype=torch.bfloat16, device=self._device)
            pages = quantize_latents(query.new_zeros(self._block_size, 1, self._size)).unsqueeze(0)
            indices = torch.full((tokens, self._topk), -1, dtype=torch.int32, device=self._device)
            self.attend_selected(query, pages, indices, None, call, 1.0)
        return call

    def attend_selected(
        self, query: Tensor, pages: Tensor, indices: Tensor, index_lens: Tensor | None, call: SparseCall, scale: float
    ) -> tuple[Tensor, Tensor]:
        """
        Return the output ``(rows, heads, head_size_v)`` and the natural LSE ``(rows, heads)``, +inf without a key.

        Args:
            query: ``(rows, heads, head_size)`` bfloat16, the rows of the call.
            pages: ``(num_blocks, block_size, 1, size)``: records, or bfloat16 latents.
            indices: ``(rows, topk)`` int32 slots of any values, of which none beyond the pages is read.
            index_lens: ``(rows,)`` int32, or None.
            call: The call.
            scale: The factor of scores.
        """
        query = self._with_all_heads(query)
        if self.has_records:
            chosen = mask_indices(indices, index_lens, places_of(pages), TILE)
            out, lse = self._library.flash_mla_with_kvcache(
                query.unsqueeze(1),
                pages,
                None,
                None,
                self._value_size,
                call.schedule,
                softmax_scale=scale,
                is_fp8_kvcache=True,
                indices=chosen.unsqueeze(1),
                use_legacy=True,
            )
            return out.squeeze(1)[:, : self._heads], lse.squeeze(2)[:, : self._heads]
        rows, places = rows_of(pages)
        # This kernel reads no row beyond the last: what it is given needs no mask where it is rows already.
        if index_lens is not None or indices.shape[1] % (2 * TILE) or not places.are_slots:
            indices = mask_indices(indices, index_lens, places, 2 * TILE)
        lens = None if index_lens is None else index_lens.clamp(0, indices.shape[1])  # it skips tiles beyond
        out, _, lse = self._library.flash_mla_sparse_fwd(
            query, rows, indices.unsqueeze(1), scale, self._value_size, topk_length=lens, use_legacy=True
        )
        return out[:, : self._heads], lse[:, : self._heads]

    def _with_all_heads(self, query: Tensor) -> Tensor:
        """Return queries of as many heads as the kernels compute. Those of no head are any numbers, or NaN."""
        if self._heads == self.sparse_heads:
            return query.contiguous()
        whole = query.new_empty(query.shape[0], self.sparse_heads, self._size)  # heads are rows of their own
        whole[:, : self._heads] = query
        return whole
