"""A backend that serves block-sparse patterns only. The modules beside it make one mistake each."""

from __future__ import annotations

import torch

from attnplug.contract import AttentionImpl, Backend, hookimpl


class PatternedImpl(AttentionImpl):
    cache_write = "forward"

    def run(self, query, key, value, kv_cache, metadata, output, lse):
        batch, size = metadata.batch, 16
        starts = batch.query_start_loc.tolist()
        if kv_cache is not None:
            slots = batch.slot_mapping
            for pages, rows in ((kv_cache.k, key), (kv_cache.v, value)):
                kept = slots >= 0
                pages[slots[kept] // size, slots[kept] % size] = rows[: len(slots)][kept]
        for request, length in enumerate(batch.seq_lens.tolist()):
            rows = slice(starts[request], starts[request + 1])
            if kv_cache is None:
                first = int(batch.key_start_loc[request])
                pair = key[first : first + length], value[first : first + length]
            else:
                blocks = batch.block_table[request, : -(-length // size)]
                pair = (pages[blocks].flatten(0, 1)[:length] for pages in (kv_cache.k, kv_cache.v))
            keys, values = (part.double().repeat_interleave(self.num_queries_per_kv, 1) for part in pair)
            scores = torch.einsum("qhd,khd->hqk", query[rows].double(), keys) * self.scale
            seen = self.seen(torch.arange(length)[length - scores.shape[1] :], torch.arange(length))
            sums = scores.masked_fill(~seen, -torch.inf).logsumexp(-1, keepdim=True)
            weights = torch.where(seen, (scores - sums).exp(), 0.0)
            output[rows] = torch.einsum("hqk,khd->qhd", weights, values).flatten(1).to(output.dtype)
            if lse is not None:
                lse[rows] = sums[..., 0].T.float()

    def seen(self, queries, keys):
        """``(heads, queries, keys)``."""
        own, head = dict(self.layer.block_sparse), torch.arange(self.num_q_heads)[:, None, None]
        i, j = queries[None, :, None] // own["block_size"], keys[None, None, :] // own["block_size"]
        near = i - j < own["local_blocks"]
        vertical = (j + self.slide(own, head) + 1) % own["vert_stride"] == 0
        return (keys <= queries[None, :, None]) & (near | vertical)

    def slide(self, own, head):
        if own.get("homo_head"):
            return 0 * head
        if own.get("homo_head_group"):
            return head // self.num_queries_per_kv * max(1, own["vert_stride"] // self.num_kv_heads)
        return head * max(1, own["vert_stride"] // self.num_q_heads)


class PatternedBackend(Backend):
    impl_class = PatternedImpl


@hookimpl
def attnplug_backend():
    return PatternedBackend
