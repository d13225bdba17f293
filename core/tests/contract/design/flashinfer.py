"""A backend on FlashInfer's wrappers, and a recording fake of those."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import attrs
import torch
from attrs import frozen

from attnplug.batching import pages_of
from attnplug.contract import AttentionImpl, Backend, MetadataBuilder, torch_dtype
from attnplug.ops import write_pages

# --- the fake -------------------------------------------------------------------------------------------------------


class Wrapper:
    """Plans and runs as the library does: copies into a graph's buffers, and refuses what the library refuses."""

    made: list[Wrapper] = []  # noqa: RUF012 - a log

    def __init__(self, workspace, *buffers, kv_layout="NHD", sinks=False):
        assert workspace.dtype == torch.uint8
        assert not workspace.any()  # zero at first use
        self.workspace, self.buffers, self.kv_layout, self.sinks = workspace, buffers, kv_layout, sinks
        self.plans: list[dict[str, Any]] = []
        self.runs: list[dict[str, Any]] = []
        Wrapper.made.append(self)

    def plan(self, *arrays, **values):
        indptr, indices, last_page_len = arrays[-3:]
        for array in arrays:
            assert array.dtype == torch.int32
        assert indptr.is_cpu
        assert last_page_len.is_cpu
        assert indices.shape[0] >= indptr[-1]
        if self.buffers:
            assert last_page_len.shape[0] == self.buffers[2].shape[0], "the batch size of a graph is fixed"
            assert indices.shape[0] <= self.buffers[1].shape[0], "the buffer of indices is too small"
            if self.plans:
                assert values["q_len_per_req"] == self.plans[0]["q_len_per_req"], "part of the frozen shape"
            for buffer, array in zip(self.buffers, (indptr, indices, last_page_len), strict=True):
                buffer[: array.shape[0]].copy_(array, non_blocking=True)
        pages = (indptr.diff() - 1).clamp(min=0)
        if values.get("q_len_per_req", 1) > 1:
            assert int((pages * values["page_size"] + last_page_len).min()) >= values["q_len_per_req"]
        self.plans.append({"arrays": arrays, **values})

    def run(self, q, paged_kv_cache, *extra, out, lse=None, return_lse=False, **scales):
        assert self.plans, "run before plan"
        assert bool(extra) == self.sinks
        assert out.shape == q.shape
        self.runs.append({"q": q, "cache": paged_kv_cache, "extra": extra, **scales})
        out.fill_(len(self.runs))
        if return_lse:
            lse.fill_(1.0)  # base 2: one bit


class Cascade(Wrapper):
    """Takes a list of arrays for each level, and returns neither LSE nor takes scales."""

    def plan(self, *levels, **values):
        self.plans.append({"levels": levels, **values})

    def run(self, q, paged_kv_cache):
        self.runs.append({"q": q, "cache": paged_kv_cache})
        return torch.ones_like(q)


flashinfer = SimpleNamespace(
    Decode=Wrapper,
    GraphDecode=Wrapper,
    Prefill=Wrapper,
    Sink=lambda *given, **how: Wrapper(*given, sinks=True, **how),
    Cascade=Cascade,
    WORKSPACE=1 << 16,
)

# --- the sketch -----------------------------------------------------------------------------------------------------

LN2 = math.log(2.0)


@frozen(eq=False)
class Plan:
    """The planned wrappers of one plan key; None where the step has no such rows."""

    decode: Any = None
    prefill: Any = None
    cascade: Any = None


class FlashInferImpl(AttentionImpl):
    cache_write = "either"
    lse_includes_sink = True
    static_scales = frozenset({"k", "v"})

    def run(self, query, key, value, kv_cache, metadata, output, lse):
        if self.forward_writes and key is not None:
            self.update_kv_cache(key, value, kv_cache, metadata.batch.slot_mapping)
        plan, rows = self.plan_of(metadata), output.unflatten(1, (self.num_q_heads, self.head_size))
        extra = () if self.layer.sinks is None else (self.layer.sinks, self.scale)
        if plan.cascade is not None:
            tokens = metadata.batch.num_actual_tokens
            rows[:tokens] = plan.cascade.run(query[:tokens], kv_cache)
        for wrapper, phase in ((plan.decode, metadata.decodes), (plan.prefill, metadata.prefills)):
            if wrapper is not None:
                part = None if lse is None else lse[phase.rows]
                wrapper.run(
                    query[phase.rows], kv_cache, *extra, out=rows[phase.rows], lse=part, return_lse=lse is not None,
                    k_scale=self.layer.k_scale, v_scale=self.layer.v_scale,
                )  # fmt: skip
                if part is not None:
                    part.mul_(LN2)  # the library's LSE has base 2

    def update_kv_cache(self, key, value, kv_cache, slot_mapping):
        write_pages(key, kv_cache.k, slot_mapping, self.layer.k_scale_tensor)
        write_pages(value, kv_cache.v, slot_mapping, self.layer.v_scale_tensor)


class FlashInferBuilder(MetadataBuilder):
    supports_graphs = True
    requires_uniform_decodes = True

    def __init__(self, backend, impls, state):
        super().__init__(backend, impls, state)
        self._wrappers = {}

    def plan_batch(self, batch, split, *, fast, graph):
        return {"plans": {key: self._plan(key, group[0], split, graph) for key, group in self.plan_groups.items()}}

    def can_capture(self, batch):
        return batch.max_query_len <= self.agreement.requirements.decode_query_len

    def _plan(self, key, impl, split, graph):
        batch = split.batch
        if batch.common_prefix_len:
            return Plan(cascade=self._plan_cascade(key, impl, batch))
        pages, decodes, prefills = pages_of(batch, self.agreement.block_size), split.decodes, split.prefills
        found = {}
        if decodes is not None:
            length, count = decodes.max_query_len, decodes.num_reqs
            indptr, last = pages.indptr_cpu[: count + 1], pages.last_page_len_cpu[:count]
            found["decode"] = self._wrapper(key, "decode", impl, graph)
            found["decode"].plan(
                indptr, pages.indices[: int(indptr[-1])], last.masked_fill(last == 0, length),
                q_len_per_req=length, **self._values(impl),
            )  # fmt: skip
        if prefills is not None:
            found["prefill"] = self._wrapper(key, "prefill", impl, None)
            found["prefill"].plan(
                prefills.query_start_loc_cpu, pages.indptr_cpu[prefills.first_req :], pages.indices,
                pages.last_page_len_cpu[prefills.first_req :], causal=impl.causal, **self._values(impl),
            )  # fmt: skip
        return Plan(**found)

    def _plan_cascade(self, key, impl, batch):
        size, length, tokens = self.agreement.block_size, batch.common_prefix_len, batch.num_actual_tokens
        shared = length // size
        lens = {name: (getattr(batch, name) - length).clamp(min=0) for name in ("seq_lens", "seq_lens_cpu")}
        own = pages_of(
            attrs.evolve(batch, block_table=batch.block_table[:, shared:], block_table_cpu=None, **lens), size
        )
        wrapper = self._wrapper(key, "cascade", impl, None)
        wrapper.plan(
            [torch.tensor([0, tokens], dtype=torch.int32), batch.query_start_loc_cpu],
            [torch.tensor([0, shared], dtype=torch.int32), own.indptr_cpu],
            [batch.block_table[0, :shared], own.indices],
            [torch.tensor([size], dtype=torch.int32), own.last_page_len_cpu],
            causal=impl.causal, **self._values(impl),
        )  # fmt: skip
        return wrapper

    def _wrapper(self, key, phase, impl, graph):
        if graph is not None:
            return self.per_graph(graph, key, lambda: self._graph_wrapper(graph))
        if (key, phase) not in self._wrappers:
            kinds = {"decode": flashinfer.Decode, "prefill": flashinfer.Prefill, "cascade": flashinfer.Cascade}
            make = kinds[phase] if impl.layer.sinks is None else flashinfer.Sink
            self._wrappers[key, phase] = make(self.state.workspace, kv_layout=self.agreement.kv_layout)
        return self._wrappers[key, phase]

    def _graph_wrapper(self, graph):
        reqs, columns = graph.key.num_reqs, -(-graph.max_seq_len // self.agreement.block_size)
        buffers = (
            torch.zeros(size, dtype=torch.int32, device=self.state.device) for size in (reqs + 1, reqs * columns, reqs)
        )
        return flashinfer.GraphDecode(self.state.workspace, *buffers, kv_layout=self.agreement.kv_layout)

    def _values(self, impl):
        requested = self.agreement.requirements
        return {
            "num_qo_heads": impl.num_q_heads, "num_kv_heads": impl.num_kv_heads, "head_dim": impl.head_size,
            "page_size": self.agreement.block_size, "window_left": impl.window[0],
            "logits_soft_cap": impl.logits_soft_cap, "sm_scale": impl.scale,
            "q_data_type": torch_dtype(requested.dtype), "kv_data_type": torch_dtype(self.agreement.kv_cache_dtype),
        }  # fmt: skip


class FlashInferBackend(Backend):
    impl_class = FlashInferImpl
    builder_class = FlashInferBuilder

    def workspace_bytes(self, limits):
        return flashinfer.WORKSPACE
