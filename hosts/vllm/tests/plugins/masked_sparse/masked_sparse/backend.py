"""Dense attention, with a mask for each head of the model."""

from __future__ import annotations

import torch

from attnplug.contract import AttentionImpl, Backend
from attnplug.ops import write_pages


class MaskedImpl(AttentionImpl):
    """One layer."""

    cache_write = "either"

    def run(self, query, key, value, kv_cache, metadata, output, lse):
        """Attend request by request."""
        del lse
        batch, first_head = metadata.batch, metadata.state.parallel.tp_rank * self.num_q_heads
        heads = metadata.state.parallel.tp_size * self.num_q_heads
        if self.forward_writes and key is not None:
            self.update_kv_cache(key, value, kv_cache, batch.slot_mapping)
        starts = batch.query_start_loc_cpu.tolist()
        for request, length in enumerate(batch.seq_lens_cpu.tolist()):
            blocks = batch.block_table[request, : -(-length // kv_cache.k.shape[1])]
            keys, values = (pages[blocks].flatten(0, 1)[:length] for pages in (kv_cache.k, kv_cache.v))
            rows = slice(starts[request], starts[request + 1])
            asked = query[rows]
            for head in range(self.num_q_heads):
                group = head // self.num_queries_per_kv
                seen = self._seen(first_head + head, heads, length)[length - len(asked) :]
                scores = (asked[:, head] @ keys[:, group].T * self.scale).masked_fill(~seen, -torch.inf)
                output[rows].unflatten(1, (self.num_q_heads, -1))[:, head] = scores.softmax(-1) @ values[:, group]

    def _seen(self, head, heads, length):
        """Return which keys the queries of one head of the model attend to, ``(length, length)``."""
        pattern = dict(self.layer.block_sparse)
        step = 0 if pattern.get("homo_head") else max(1, pattern["vert_stride"] // heads)
        token = torch.arange(length)
        block = token // pattern["block_size"]
        near = block[:, None] - block < pattern["local_blocks"]
        vertical = (block + head * step + 1) % pattern["vert_stride"] == 0
        return (near | vertical) & (token <= token[:, None])

    def update_kv_cache(self, key, value, kv_cache, slot_mapping):
        """Write new rows."""
        for rows, pages in ((key, kv_cache.k), (value, kv_cache.v)):
            write_pages(rows, pages, slot_mapping)


class MaskedBackend(Backend):
    """Makes its parts by the defaults of the contract."""

    impl_class = MaskedImpl
