"""A correct backend that declares as little as possible."""

from __future__ import annotations

import torch

from attnplug.contract import AttentionImpl, Backend, hookimpl
from attnplug.request.domains import PER_TOKEN_HEAD

SCALES = ("k_scale", "v_scale")
_LARGEST = dict(zip(PER_TOKEN_HEAD, (127, 448), strict=True))
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


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
            if self.scaled:
                scales = (kv_cache[role][blocks].transpose(1, 2).flatten(0, 1)[:length, :, None] for role in SCALES)
                pair = (codes.float() * own for codes, own in zip(pair, scales, strict=True))
        return (rows.float().repeat_interleave(self.num_queries_per_kv, 1) for rows in pair)

    def _put(self, key, value, kv_cache, slot_mapping):
        kept, size = slot_mapping >= 0, kv_cache.k.shape[1]
        slots = slot_mapping[kept]
        places = slots // size, slots % size
        for pages, new, role in zip((kv_cache.k, kv_cache.v), (key, value), SCALES, strict=True):
            rows = codes = new[: len(slot_mapping)][kept]
            if self.scaled:
                scales = self._scales(rows.float())
                kv_cache[role].transpose(1, 2)[places] = scales
                codes = self._codes(rows.float() / scales[..., None], pages.dtype)
            pages.view(_BITS[pages.itemsize])[places] = codes.to(pages.dtype).view(_BITS[pages.itemsize])

    @property
    def scaled(self):
        return self.agreement.kv_cache_dtype in PER_TOKEN_HEAD

    def _scales(self, rows):
        return rows.abs().amax(-1).clamp(min=1e-30) / _LARGEST[self.agreement.kv_cache_dtype]

    def _codes(self, rows, dtype):
        return rows.round() if dtype == torch.int8 else rows


class LeastBackend(Backend):
    impl_class = LeastImpl


@hookimpl
def attnplug_backend():
    return LeastBackend
