"""A backend on ixformer's int8 attention, and a recording fake of that."""

from __future__ import annotations

from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from attnplug.contract import AttentionImpl, Backend, CacheTensor, Metadata, MetadataBuilder, torch_dtype
from attnplug.ops import write_pages

# --- the fake -------------------------------------------------------------------------------------------------------


class Library:
    """Records each attention call; quantizes and writes as the library does."""

    def __init__(self):
        self.prefills: list[dict[str, Any]] = []
        self.decodes: list[dict[str, Any]] = []
        self.written: list[Tensor] = []

    def scaled_int8_quant_for_attn(self, x, mode, *, transpose_scale=False, scale=None):
        if mode == 0:  # per channel, with the scales of the file
            return (x.float() / scale).round().clamp(-127, 127).to(torch.int8), scale
        scale = x.float().abs().amax(-1) / 127
        rounded = (x.float() / scale.clamp(min=1e-9).unsqueeze(-1)).round().to(torch.int8)
        return rounded, scale.T.contiguous() if transpose_scale else scale

    def reshape_and_cache_flash(self, key, value, k_scale, key_cache, value_cache, key_scale_cache, slot_mapping):
        self.written.append(slot_mapping)
        scales = (k_scale.unsqueeze(-1), key_scale_cache.unsqueeze(-1))
        for rows, pages in ((key, key_cache), (value, value_cache), scales):
            write_pages(rows, pages.transpose(1, 2), slot_mapping)

    def flash_attn_varlen_int8_func(self, q, k, v, **given):
        assert given["q_scale"].shape == (q.shape[1], q.shape[0])
        assert given["cu_seqlens_q"][-1] == q.shape[0]
        self.prefills.append({"q": q, "k": k, "v": v, **given})
        given["out"].fill_(1)

    def vllm_paged_attention(self, output, query, key_cache, value_cache, query_scale, key_scale_cache, **given):
        assert query_scale.shape == query.shape[:2]
        assert int(given["context_lens"].min()) >= 1
        self.decodes.append({"query": query, "value_cache": value_cache, **given})
        output.fill_(2)
        if "save_key" in given:
            self._save(key_cache, value_cache, key_scale_cache, **given)

    def _save(
        self,
        keys,
        values,
        scales,
        *,
        save_key,
        save_value,
        save_key_scale,
        block_tables,
        context_lens,
        cu_query_lens,
        **_,
    ):
        """Places follow from lengths and block table: the library knows no slot mapping."""
        size = keys.shape[2]
        for row, (start, end) in enumerate(zip(cu_query_lens[:-1].tolist(), cu_query_lens[1:].tolist(), strict=True)):
            for token in range(start, end):
                place = int(context_lens[row]) - end + token
                block = int(block_tables[row, place // size])
                keys[block, :, place % size] = save_key[token]
                values[block, :, place % size] = save_value[token]
                scales[block, :, place % size] = save_key_scale[token]


ixformer = Library()

# --- the sketch -----------------------------------------------------------------------------------------------------


@frozen(eq=False, kw_only=True)
class Int8Metadata(Metadata):
    cu_seqlens_k: Tensor | None = None
    context_lens: Tensor | None = None


class Int8Impl(AttentionImpl):
    cache_write = {"prefill": "either", "decode": "forward"}  # noqa: RUF012 - read once, by the core

    def init_cache(self, kv_cache):
        """Level 1: the value scales of this layer, from the file that a calibration wrote. No step changes them."""
        if "v_scale" in kv_cache.tensors:
            kv_cache["v_scale"].copy_(torch.load(self.agreement.options["value_scales"])[self.layer.name])

    def run(self, query, key, value, kv_cache, metadata, output, lse):
        batch, rows = metadata.batch, output.unflatten(1, (self.num_q_heads, self.head_size))
        keys, values = self._pages(kv_cache)
        decodes, prefills = metadata.decodes, metadata.prefills
        if prefills is not None:
            part = prefills.rows
            if "prefill" in self.forward_writes and key is not None:
                self.update_kv_cache(key[part], value[part], kv_cache, batch.slot_mapping[part])
            q, scale = ixformer.scaled_int8_quant_for_attn(query[part], 2, transpose_scale=True)
            ixformer.flash_attn_varlen_int8_func(
                q, keys, values, q_scale=scale, k_scale=kv_cache["k_scale"], v_scale=kv_cache.tensors.get("v_scale"),
                cu_seqlens_q=prefills.query_start_loc, cu_seqlens_k=metadata.cu_seqlens_k,
                max_seqlen_q=prefills.max_query_len, max_seqlen_k=prefills.max_seq_len, softmax_scale=self.scale,
                causal=True, window_size=self.window, out=rows[part], block_table=prefills.block_table,
            )  # fmt: skip
        if decodes is not None:
            part = decodes.rows
            q, scale = ixformer.scaled_int8_quant_for_attn(query[part], 2)
            saved = self._saved(key, value, kv_cache, part) if "decode" in self.forward_writes else {}
            ixformer.vllm_paged_attention(
                rows[part], q, keys, values, scale, kv_cache["k_scale"],
                value_scale_cache=kv_cache.tensors.get("v_scale"),
                num_kv_heads=self.num_kv_heads, scale=self.scale, block_tables=decodes.block_table,
                context_lens=metadata.context_lens, max_context_len=decodes.max_seq_len,
                cu_query_lens=decodes.query_start_loc, max_query_len=decodes.max_query_len,
                use_cuda_graph=metadata.graph is not None, **saved,
            )  # fmt: skip

    def update_kv_cache(self, key, value, kv_cache, slot_mapping):
        saved = self._saved(key, value, kv_cache, slice(None))
        keys, values = self._pages(kv_cache)
        ixformer.reshape_and_cache_flash(*saved.values(), keys, values, kv_cache["k_scale"], slot_mapping)

    def _saved(self, key, value, kv_cache, part):
        key, scale = ixformer.scaled_int8_quant_for_attn(key[part], 2)
        value = value[part]
        if "v_scale" in kv_cache.tensors:
            value, _ = ixformer.scaled_int8_quant_for_attn(value, 0, scale=kv_cache["v_scale"])
        return {"save_key": key, "save_value": value, "save_key_scale": scale}

    def _pages(self, kv_cache):
        return kv_cache.k.transpose(1, 2), kv_cache.v.transpose(1, 2)  # heads first, as in memory


class Int8Builder(MetadataBuilder):
    supports_graphs = True

    def plan_batch(self, batch, split, *, fast, graph):
        prefills, decodes, found = split.prefills, split.decodes, {}
        if prefills is not None:
            found["cu_seqlens_k"] = torch.nn.functional.pad(prefills.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        if decodes is not None:
            lens = decodes.seq_lens.clamp(min=1)  # a padded request writes one key: into the null block
            found["context_lens"] = self.persist(graph, "lens", lens)
        return found

    def can_capture(self, batch):
        return batch.max_query_len <= self.agreement.requirements.decode_query_len


class Int8Backend(Backend):
    impl_class = Int8Impl
    builder_class = Int8Builder
    metadata_class = Int8Metadata

    def cache_tensors(self, num_blocks):
        requested, size = self.agreement.requirements, self.agreement.block_size
        heads, order = requested.num_kv_heads, (0, 2, 1, 3)
        pages = (num_blocks, size, heads, requested.head_size)
        scales = {"k_scale": CacheTensor((num_blocks, heads, size), torch.float32, 0)}
        if self.agreement.kv_cache_dtype == "int8":  # level 1
            scales["v_scale"] = CacheTensor((heads, requested.head_size), torch.float32, None, fill=1.0)
            return {**{role: CacheTensor(pages, torch.int8, 0, order) for role in "kv"}, **scales}
        values = CacheTensor(pages, torch_dtype(requested.dtype), 0, order)
        return {"k": CacheTensor(pages, torch.int8, 0, order), "v": values, **scales}


# --- level 0: an observer around another backend --------------------------------------------------------------------


@frozen(eq=False, kw_only=True)
class ObservedMetadata(Metadata):
    inner: Metadata | None = None


class ObserverImpl(AttentionImpl):
    cache_write = "forward"

    def __init__(self, layer, backend):
        super().__init__(layer, backend)
        self.inner = backend.inner.make_impl(layer)
        self.largest = torch.zeros(self.num_kv_heads, self.head_size_v, device=self.device)

    def run(self, query, key, value, kv_cache, metadata, output, lse):
        count = metadata.batch.num_actual_tokens
        torch.maximum(self.largest, value[:count].float().abs().amax(0), out=self.largest)
        self.inner.forward(query, key, value, kv_cache, metadata.inner, output, lse=lse)


class ObserverBuilder(MetadataBuilder):
    def __init__(self, backend, impls, state):
        super().__init__(backend, impls, state)
        inner = backend.inner
        self.inner = inner.make_builder([impl.inner for impl in impls], inner.make_state(state.limits, state.parallel))

    def plan_batch(self, batch, split, *, fast, graph):
        return {"inner": self.inner.build(batch, fast=fast)}


class ObserverBackend(Backend):
    """What runs beneath is chosen as any host chooses: `inner` is what attnplug.load returned."""

    impl_class = ObserverImpl
    builder_class = ObserverBuilder
    metadata_class = ObservedMetadata
    inner: Backend

    def cache_tensors(self, num_blocks):
        return self.inner.cache_tensors(num_blocks)
