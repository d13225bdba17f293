"""One layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final

import torch

from attnplug.contract import AttentionImpl
from attnplug.ops import quantize_queries, write_kv, write_latents
from attnplug_flashmla.builder import MOST_ROWS
from attnplug_flashmla.kernels import TILE

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract import KVCache, Layer
    from attnplug_flashmla.backend import FlashMLABackend
    from attnplug_flashmla.builder import FlashMLAMetadata

_MULTIPROCESSORS: Final = 132
"""Multiprocessors of an H100 or H200, for devices that do not report theirs."""


class FlashMLAImpl(AttentionImpl):
    """Runs the calls that its builder has planned."""

    cache_write = "either"
    static_scales: ClassVar[frozenset[str]] = frozenset("qkv")
    graphs_read_scales = True  # kernels and cache writes take views of the scale tensors

    def __init__(self, layer: Layer, backend: FlashMLABackend) -> None:
        super().__init__(layer, backend)
        self._kernels = backend.kernels
        self._writes = bool(self.forward_writes)
        self.parameters_changed()

    def parameters_changed(self) -> None:
        """Make views of the scales, ``(1,)``; None unless the KV cache is quantized."""
        of_queries, of_keys = self.layer.q_scale_tensor, self.layer.k_scale_tensor
        self._scales = (
            None if of_queries is None else of_queries.view(-1),
            None if of_keys is None else of_keys.view(-1),
        )

    def run(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: KVCache,
        metadata: FlashMLAMetadata,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Write the latents into the cache unless the host does, then run the calls."""
        del value
        if self._writes and key is not None:
            slots: Any = metadata.batch.slot_mapping  # with keys to write there are slots
            self.update_kv_cache(key, key[..., : self.head_size_v], kv_cache, slots)
        if self._scales[0] is not None:
            query = quantize_queries(query, self._scales[0])
        for call in metadata.calls:
            rows = slice(call.first, call.last)
            out, sums = self._kernels.attend(query[rows], kv_cache.k, call, self.scale, self._scales)
            if call.padding is not None:
                out, sums = out.masked_fill_(call.padding, 0), sums.masked_fill_(call.padding, torch.inf)
            output[rows] = out
            if lse is not None:  # the library's LSE of a row without a key is +inf
                torch.nan_to_num(sums, nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf, out=lse[rows])

    def run_sparse(
        self,
        query: Tensor,
        key: Tensor | None,
        kv_cache: KVCache,
        metadata: FlashMLAMetadata,
        indices: Tensor,
        index_lens: Tensor | None,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Write the latents into the cache unless the host does, then attend to the selected ones."""
        if self._writes and key is not None:
            slots: Any = metadata.batch.slot_mapping
            self.update_kv_cache(key, key[..., : self.head_size_v], kv_cache, slots)
        for call in metadata.sparse:
            rows = slice(call.first, call.last)
            lens = None if index_lens is None else index_lens[rows]
            out, sums = self._kernels.attend_selected(query[rows], kv_cache.k, indices[rows], lens, call, self.scale)
            output[rows].view(out.shape).copy_(out)
            if lse is not None:
                torch.nan_to_num(sums, nan=torch.nan, posinf=-torch.inf, neginf=-torch.inf, out=lse[rows])

    def update_kv_cache(self, key: Tensor, value: Tensor, kv_cache: KVCache, slot_mapping: Tensor) -> None:
        """Write latents into their slots. Values are a part of them: one launch writes both, and the same bits."""
        if self._kernels.has_records:
            write_latents(key, kv_cache.k, slot_mapping)
            return
        write_kv(key, value, kv_cache.k, kv_cache.v, slot_mapping, self._scales[1], self._scales[1])

    def run_profile(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, output: Tensor, lse: Tensor | None
    ) -> None:
        """Allocate and free the output and the partial outputs of the largest call. The output is not written."""
        del key, value, output, lse
        is_sparse, records = self.agreement.requirements.topk is not None, self._kernels.has_records
        rows = query.shape[0] * (self._kernels.sparse_heads if is_sparse else self.num_q_heads)
        if records or not is_sparse:  # the sparse prefill kernel has one call, and no partial outputs
            rows = min(rows, MOST_ROWS)
        parts = self.backend.device_properties.num_multiprocessors or _MULTIPROCESSORS
        whole = rows * (self.head_size_v * query.itemsize + torch.float32.itemsize)
        partial = (rows + parts * TILE) * (self.head_size_v + 1) * torch.float32.itemsize
        if is_sparse:
            partial = (partial if records else 0) + rows * self.head_size * query.itemsize  # queries of all heads
        whole += query.numel() if self._kernels.is_fp8 else 0
        query.new_empty(whole + partial, dtype=torch.uint8)
