"""A backend as for a vendor's library: plans on the CPU, page lists for block tables, an LSE to base 2."""

from __future__ import annotations

from math import e, log, log2

import attrs
import torch

from attnplug.batching.pages import pad_pages, pages_of
from attnplug.contract import AttentionImpl, Backend, MetadataBuilder, hookimpl
from attnplug.contract.inputs.kv_cache import is_narrow_float
from attnplug.ops import merge_attention_states, write_pages


@attrs.frozen(eq=False)
class Plan:
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor
    prefix: int


class PlannedBuilder(MetadataBuilder):
    supports_graphs = True
    requires_uniform_decodes = True

    def plan_batch(self, batch, split, *, fast, graph):
        size = self.agreement.block_size
        pages = pages_of(batch, size)
        if graph is not None:
            pages = pad_pages(pages, graph.key.num_reqs, graph.key.num_reqs * -(-graph.max_seq_len // size))
        plans = {}
        for key in self.plan_groups:
            kept = {
                name: self.persist(graph, (key, name), getattr(pages, name))
                for name in ("indptr", "indices", "last_page_len")
            }
            plans[key] = Plan(**kept, prefix=batch.common_prefix_len)
        return {"plans": plans}


class PlannedImpl(AttentionImpl):
    cache_write = "forward"
    lse_includes_sink = False
    static_scales = frozenset("kv")

    def run(self, query, key, value, kv_cache, metadata, output, lse):
        plan, halves = self.plan_of(metadata), (kv_cache.k, kv_cache.v)
        narrow = is_narrow_float(halves[0].dtype)
        scales = (self.layer.k_scale_tensor, self.layer.v_scale_tensor) if narrow else (None, None)
        for rows, pages, scale in zip((key, value), halves, scales, strict=True):
            write_pages(rows, pages, metadata.batch.slot_mapping, scale)
        indptr, last_page_len = plan.indptr.tolist(), plan.last_page_len.tolist()
        for request, rows in enumerate(self._rows_of(metadata)):
            blocks = plan.indices[indptr[request] : indptr[request + 1]].long()
            length = (len(blocks) - 1) * self.agreement.block_size + last_page_len[request] if len(blocks) else 0
            keys, values = (pages[blocks].flatten(0, 1)[:length].float() for pages in halves)
            out, lse2 = self._attend(query[rows].float(), keys, values, plan.prefix)
            output[rows] = out.flatten(1).to(output.dtype)
            if lse is not None:
                lse[rows] = lse2 * log(2)  # the contract's is natural

    def _rows_of(self, metadata):
        """Decodes have one query length, prefills have start offsets."""
        decodes, starts = metadata.num_decodes, metadata.batch.query_start_loc.tolist()
        each = metadata.num_decode_tokens // max(decodes, 1)
        yield from (slice(request * each, (request + 1) * each) for request in range(decodes))
        yield from (slice(starts[request], starts[request + 1]) for request in range(decodes, metadata.batch.num_reqs))

    def _attend(self, query, keys, values, prefix):
        places = torch.arange(keys.shape[0])
        if not prefix:
            return self._part(query, keys, values, places)
        first, rest = (
            self._part(query, keys[part], values[part], places[part], length=keys.shape[0])
            for part in (slice(prefix), slice(prefix, None))
        )
        out, lse = merge_attention_states(first[0], first[1] * log(2), rest[0], rest[1] * log(2))
        return out, lse * log2(e)

    def _part(self, query, keys, values, places, length=None):
        length = keys.shape[0] if length is None else length
        keys, values = (each.repeat_interleave(self.num_queries_per_kv, 1) for each in (keys, values))
        scores = torch.einsum("qhd,khd->qhk", query, keys) * (self.scale * self.layer.k_scale)
        if self.logits_soft_cap is not None:
            scores = self.logits_soft_cap * torch.tanh(scores / self.logits_soft_cap)
        own = torch.arange(query.shape[0]).unsqueeze(1) + length - query.shape[0]
        seen = (places <= own) & ((places >= own - self.window[0]) | (self.window[0] < 0))
        values = values.masked_fill(~seen.any(0)[:, None, None], 0.0)  # freed blocks may hold NaN
        scores = (scores * log2(e)).masked_fill(~seen.unsqueeze(1), -torch.inf)
        lse = (scores * log(2)).logsumexp(-1) * log2(e)
        total = lse
        if self.layer.sinks is not None:
            total = torch.logaddexp2(lse, self.layer.sinks.float() * log2(e))
        weights = torch.exp2(scores - total.unsqueeze(-1)).nan_to_num(0.0)
        return torch.einsum("qhk,khd->qhd", weights, values) * self.layer.v_scale, lse


class PlannedBackend(Backend):
    impl_class = PlannedImpl
    builder_class = PlannedBuilder


@hookimpl
def attnplug_backend():
    return PlannedBackend
