"""A fake plugin that supports every dense attention, one sequence after another, in float64."""

from __future__ import annotations

import torch

from attnplug.contract import AttentionImpl, Backend
from attnplug.contract.hooks import hookimpl

MANIFEST = """\
api = "1.0"
backend = { name = "mirror", summary = "computes what was negotiated, in float64" }
[supports]
device_type = "cpu"
dtype = ["float32", "bfloat16", "float16"]
head_size = { min = 1 }
attn_type = ["decoder", "encoder", "encoder_only", "encoder_decoder"]
features = ["sliding_window", "attention_chunk", "logits_soft_cap", "sinks", "head_size_v", "causal"]
[variants.plain]
"""


class MirrorImpl(AttentionImpl):
    cache_write = "forward"
    fault = ""  # what a faulty backend ignores: window, logits_soft_cap or sinks

    def run(self, query, key, value, kv_cache, metadata, output, lse):
        starts, key_starts = metadata.batch.query_start_loc.tolist(), metadata.batch.key_start_loc.tolist()
        for i in range(metadata.batch.num_reqs):
            rows, keys = slice(starts[i], starts[i + 1]), slice(key_starts[i], key_starts[i + 1])
            output[rows] = self._attend(query[rows], key[keys], value[keys]).to(output.dtype)

    def _attend(self, query, key, value):
        k, v = (x.double().repeat_interleave(self.num_queries_per_kv, 1) for x in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query.double(), k) * self.scale
        if self.logits_soft_cap is not None and self.fault != "logits_soft_cap":
            scores = self.logits_soft_cap * torch.tanh(scores / self.logits_soft_cap)
        scores = scores.masked_fill(~self._attended(*scores.shape[1:]), -torch.inf)
        if self.layer.sinks is not None and self.fault != "sinks":
            sinks = self.layer.sinks.double()[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sinks], -1)
        weights = scores.softmax(-1)[..., : k.shape[0]]
        return torch.einsum("hqk,khd->qhd", weights, v).flatten(1)

    def _attended(self, queries, keys):
        distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
        chunk = self.agreement.requirements.attention_chunk
        left, right = self.window
        attended = distance >= 0 if self.causal else torch.ones_like(distance, dtype=torch.bool)
        if left >= 0 and self.fault != "window":
            attended &= (distance <= left) & (self.causal | (distance >= -right))
        if chunk is not None:
            attended &= (torch.arange(keys - queries, keys)[:, None] // chunk) == (torch.arange(keys) // chunk)
        return attended


class MirrorBackend(Backend):
    impl_class = MirrorImpl


@hookimpl
def attnplug_backend(variant, agreement):
    return MirrorBackend
