"""Causal attention over a paged or dense cache, one request after another, whatever else was agreed on."""

from __future__ import annotations

from torch import ones
from torch.nn.functional import scaled_dot_product_attention

from attnplug.contract import AttentionImpl, Backend


class DroppingImpl(AttentionImpl):
    cache_write = "either"

    def run(self, query, key, value, kv_cache, metadata, output, lse):
        batch = metadata.batch
        if kv_cache is not None and self.forward_writes:
            self.update_kv_cache(key, value, kv_cache, batch.slot_mapping)
        starts = batch.query_start_loc.tolist()
        for i, length in enumerate(batch.seq_lens.tolist()):
            rows = slice(starts[i], starts[i + 1])
            k, v = self._keys(i, length, key, value, kv_cache, batch)
            seen = ones(rows.stop - rows.start, length, dtype=bool).tril(length - (rows.stop - rows.start))
            heads = (x.transpose(0, 1)[None] for x in (query[rows], k, v))
            mask = seen if self.causal else None
            found = scaled_dot_product_attention(*heads, attn_mask=mask, scale=self.scale, enable_gqa=True)
            output[rows] = found[0].transpose(0, 1).flatten(1)

    def _keys(self, i, length, key, value, kv_cache, batch):
        if kv_cache is None:
            start = int(batch.key_start_loc[i])
            return key[start : start + length], value[start : start + length]
        used = batch.block_table[i, : -(-length // kv_cache.k.shape[1])]
        return [pages[used].flatten(0, 1)[:length] for pages in (kv_cache.k, kv_cache.v)]

    def update_kv_cache(self, key, value, kv_cache, slot_mapping):
        written, size = slot_mapping >= 0, kv_cache.k.shape[1]
        slots = slot_mapping[written]
        for pages, new in ((kv_cache.k, key), (kv_cache.v, value)):
            pages[slots // size, slots % size] = new[: len(slot_mapping)][written]


class DroppingBackend(Backend):
    impl_class = DroppingImpl
