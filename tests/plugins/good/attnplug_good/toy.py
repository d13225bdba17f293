"""Attention over a paged or dense cache in plain torch, one request after another."""

from __future__ import annotations

import torch

from attnplug.contract import AttentionImpl, Backend


class ToyImpl(AttentionImpl):
    cache_write = "either"

    def run(self, query, key, value, kv_cache, metadata, output, lse):
        batch = metadata.batch
        if kv_cache is not None and self.forward_writes:
            self.update_kv_cache(key, value, kv_cache, batch.slot_mapping)
        starts = batch.query_start_loc.tolist()
        for i, length in enumerate(batch.seq_lens.tolist()):
            rows = slice(starts[i], starts[i + 1])
            k, v = self._keys(i, length, key, value, kv_cache, batch)
            scores = torch.einsum("qhd,khd->hqk", query[rows].float(), k.float()) * self.scale
            if self.causal:
                later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(length - scores.shape[1] + 1)
                scores = scores.masked_fill(later, -torch.inf)
            output[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.float()).flatten(1).to(output.dtype)

    def _keys(self, i, length, key, value, kv_cache, batch):
        if kv_cache is None:
            start = int(batch.key_start_loc[i])
            k, v = key[start : start + length], value[start : start + length]
        else:
            used = batch.block_table[i, : -(-length // kv_cache.k.shape[1])]
            k, v = (pages[used].flatten(0, 1)[:length] for pages in (kv_cache.k, kv_cache.v))
        return (x.repeat_interleave(self.num_queries_per_kv, 1) for x in (k, v))

    def update_kv_cache(self, key, value, kv_cache, slot_mapping):
        written, size = slot_mapping >= 0, kv_cache.k.shape[1]
        slots = slot_mapping[written]
        for pages, new in ((kv_cache.k, key), (kv_cache.v, value)):
            pages[slots // size, slots % size] = new[: len(slot_mapping)][written]


class ToyBackend(Backend):
    impl_class = ToyImpl
