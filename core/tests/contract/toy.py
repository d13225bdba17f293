"""A complete toy backend, in plain torch math: what a vendor has to write at least."""

from __future__ import annotations

import torch

from attnplug.contract import AttentionImpl, Backend


class ToyImpl(AttentionImpl):
    """Dense and paged decoder attention with a grouped-query head map, one request after another."""

    cache_write = "either"

    def run(self, query, key, value, kv_cache, metadata, output, lse):
        batch = metadata.batch
        if kv_cache is not None and self.forward_writes:
            self.update_kv_cache(key, value, kv_cache, batch.slot_mapping)
        starts = batch.query_start_loc.tolist()
        for i, length in enumerate(batch.seq_lens.tolist()):
            rows = slice(starts[i], starts[i + 1])
            k, v = self._keys(i, length, key, value, kv_cache, batch)
            scores = torch.einsum("qhd,khd->hqk", query[rows].double(), k.double()) * self.scale
            if self.causal:
                ahead = torch.ones(scores.shape[1:], dtype=torch.bool).triu(length - scores.shape[1] + 1)
                scores = scores.masked_fill(ahead, -torch.inf)
            output[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v.double()).flatten(1).to(output.dtype)
            if lse is not None:
                lse[rows] = scores.logsumexp(-1).T.float()

    def _keys(self, i, length, key, value, kv_cache, batch):
        if kv_cache is None:
            start = int(batch.key_start_loc[i])
            k, v = key[start : start + length], value[start : start + length]
        else:
            blocks = batch.block_table[i]
            k, v = (pages[blocks].flatten(0, 1)[:length] for pages in (kv_cache.k, kv_cache.v))
        return (x.repeat_interleave(self.num_queries_per_kv, 1) for x in (k, v))

    def update_kv_cache(self, key, value, kv_cache, slot_mapping):
        slots, size = slot_mapping[slot_mapping >= 0], kv_cache.k.shape[1]
        for pages, new in zip((kv_cache.k, kv_cache.v), (key, value), strict=True):
            pages[slots // size, slots % size] = new[: len(slot_mapping)][slot_mapping >= 0]


class ToyBackend(Backend):
    impl_class = ToyImpl
