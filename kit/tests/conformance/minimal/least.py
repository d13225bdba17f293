"""A correct backend that declares as little as possible."""

from __future__ import annotations

import torch

from attnplug.contract import AttentionImpl, Backend, hookimpl


class LeastImpl(AttentionImpl):
    cache_write = "forward"

    def run(self, query, key, value, kv_cache, metadata, output, lse):
        batch = metadata.batch
        starts = batch.query_start_loc.tolist()
        if kv_cache is not None:
            self._put(key, value, kv_cache, batch.slot_mapping)
        for request, length in enumerate(batch.seq_lens.tolist()):
            rows = slice(starts[request], starts[request + 1])
            keys, values = self._keys(request, length, key, value, kv_cache, batch)
            scores = torch.einsum("qhd,khd->hqk", query[rows].float(), keys) * self.scale
            later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(length - scores.shape[1] + 1)
            weights = scores.masked_fill(later, -torch.inf).softmax(-1)
            output[rows] = torch.einsum("hqk,khd->qhd", weights, values).flatten(1).to(output.dtype)

    def _keys(self, request, length, key, value, kv_cache, batch):
        if kv_cache is None:
            first = int(batch.key_start_loc[request])
            pair = key[first : first + length], value[first : first + length]
        else:
            size = kv_cache.k.shape[1]
            blocks = batch.block_table[request, : -(-length // size)]
            pair = (pages[blocks].flatten(0, 1)[:length] for pages in (kv_cache.k, kv_cache.v))
        return (rows.float().repeat_interleave(self.num_queries_per_kv, 1) for rows in pair)

    def _put(self, key, value, kv_cache, slot_mapping):
        kept, size = slot_mapping >= 0, kv_cache.k.shape[1]
        slots = slot_mapping[kept]
        for pages, rows in ((kv_cache.k, key), (kv_cache.v, value)):
            pages[slots // size, slots % size] = rows[: len(slot_mapping)][kept]


class LeastBackend(Backend):
    impl_class = LeastImpl


@hookimpl
def attnplug_backend():
    return LeastBackend
