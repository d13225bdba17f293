"""Steps of vLLM's model runner, made by hand: layers, pools and metadata as it makes them, without an engine."""

from __future__ import annotations

import random
from contextlib import contextmanager
from types import SimpleNamespace as Names
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from attnplug.contract import capture
from attnplug_kit.oracle import attend
from attnplug_vllm import facts
from attnplug_vllm.builder import make_builder_class
from attnplug_vllm.cache import CacheMembers
from attnplug_vllm.impl import make_impl_class

if TYPE_CHECKING:
    from collections.abc import Iterator

HAS_LAYOUTS = not hasattr(AttentionBackend, "get_kv_cache_shape")
ORDERS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC") if HAS_LAYOUTS else ("NHD", "HND")
"""The orders of memory of pools: by name since 0.32, by layout before."""

BLOCKS = 64
MAX_LEN = 256
CPU = torch.device("cpu")
CHOICE = ("torch/sdpa",)


class Compilation(Names):
    """VLLM's compilation configuration: unlike its base, it can be referenced weakly."""


def config_of(layers: dict[str, Any], **options: Any) -> Any:
    """Return as much of vLLM's configuration as an attention backend reads."""
    drafts = options.get("drafts", 0)
    speculative = Names(num_speculative_tokens=drafts, parallel_drafting=False) if drafts else None
    cache = Names(
        calculate_kv_scales=options.get("calculate_kv_scales", False),
        cache_dtype=options.get("cache_dtype", "auto"),
        kv_cache_dtype_skip_layers=[],
    )
    if HAS_LAYOUTS:
        cache.kv_cache_layout = options.get("order")
    return Names(
        compilation_config=Compilation(
            static_forward_context=layers,
            cudagraph_mode=options.get("mode"),
            cudagraph_capture_sizes=[1, 2, 4, 8],
        ),
        scheduler_config=Names(
            max_num_seqs=options.get("max_num_seqs", 8),
            max_num_batched_tokens=options.get("max_model_len", MAX_LEN),
            async_scheduling=options.get("async_scheduling", False),
        ),
        model_config=Names(
            max_model_len=options.get("max_model_len", MAX_LEN),
            disable_cascade_attn=not options.get("cascade", False),
            enable_cumem_allocator=options.get("enable_cumem_allocator", False),
            is_mm_prefix_lm=options.get("mm_prefix", False),
        ),
        cache_config=cache,
        speculative_config=speculative,
        parallel_config=Names(
            decode_context_parallel_size=options.get("dcp_size", 1),
            tensor_parallel_size=options.get("tp_size", 1),
            use_ubatching=options.get("use_ubatching", False),
            cp_kv_cache_interleave_size=options.get("dcp_interleave", 1),
        ),
        attention_config=Names(flash_attn_max_num_splits_for_cuda_graph=32, use_non_causal=False),
        kv_transfer_config=options.get("kv_transfer_config"),
        use_v2_model_runner=False,
        additional_config=options.get("additional_config", {}),
    )


def members_of(choice: tuple[str, ...]) -> type[CacheMembers]:
    """Return the members of a choice's backend class that are about pools."""
    return type("Members", (CacheMembers,), {"choice": choice})


def make_pool(spec: Any, order: str | None, members: type[CacheMembers]) -> torch.Tensor:
    """Return a layer's pool, as the runner views its bytes. It is full of NaN, as memory may be."""
    if not HAS_LAYOUTS:
        is_int8 = spec.kv_quant_mode.name == "INT8_PER_TOKEN_HEAD"
        name = "int8_per_token_head" if is_int8 else "auto"
        shape = members.get_kv_cache_shape(BLOCKS, spec.block_size, spec.num_kv_heads, spec.head_size, name)
        axes = members.get_kv_cache_stride_order()
        raw = torch.empty([shape[axis] for axis in axes], dtype=spec.dtype)
        raw.view(torch.int8).fill_(-1)
        return raw.permute([axes.index(axis) for axis in range(len(axes))])
    from vllm.v1.kv_cache_interface import KVCacheLayout, compute_layout_strides  # noqa: PLC0415 - not before 0.32

    layers, layout = 3, KVCacheLayout[order or members.supported_kv_cache_layouts()[0].name]
    strides = compute_layout_strides(spec, BLOCKS, layers, layout)
    shape = (layers, BLOCKS, spec.num_heads, spec.block_size, spec.state_content_size_bytes)
    raw = torch.full((layers * BLOCKS * spec.page_size_bytes,), -1, dtype=torch.int8)
    return raw.as_strided(shape, strides)[1].view(spec.dtype)


def set_layout(order: str | None) -> None:
    """Let vLLM resolve this layout; before 0.32 it is a setting of the process."""
    if not HAS_LAYOUTS:
        from vllm.v1.attention.backends.utils import set_kv_cache_layout  # noqa: PLC0415 - not from 0.32 on

        set_kv_cache_layout(order or "NHD")


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make layers in a dtype, as vLLM's loader does."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Rig:
    """The attention layers of a model that share a KV-cache group, and the requests of a runner."""

    def __init__(
        self,
        layers: list[dict[str, Any]],
        *,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_size: int = 16,
        block_size: int = 16,
        seed: int = 0,
        choice: tuple[str, ...] = CHOICE,
        kv_cache_dtype: str = "auto",
        scales: dict[str, torch.Tensor] | None = None,
        order: str | None = None,
        dtype: torch.dtype = torch.float32,
        described: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.dtype = dtype
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        set_layout(order)
        self.heads, self.kv_heads, self.size, self.block_size = num_heads, num_kv_heads, head_size, block_size
        self.order, self.members, self.choice = order, members_of(choice), choice
        self.kv_cache_dtype = kv_cache_dtype
        self.layers: dict[str, Any] = {}
        self.config = config_of(self.layers, order=order, **options)
        with patch.object(facts, "current_config", lambda: self.config), default_dtype(dtype):
            for index, given in enumerate(layers):
                self.layers[f"layers.{index}"] = layer = self.make_layer(given, scales or {})
                layer.impl.dcp_world_size, layer.impl.dcp_rank = options.get("dcp_size", 1), options.get("dcp_rank", 0)
        pool_dtype = torch.uint8 if kv_cache_dtype.startswith("fp8") else dtype
        sizes = {"block_size": block_size, "num_kv_heads": num_kv_heads, "head_size": head_size}
        spec = FullAttentionSpec(**{**sizes, "dtype": pool_dtype, **(described or {})})
        self.spec = self.members.customize_spec(spec) if HAS_LAYOUTS else spec
        self.builder = self.make_builder(list(self.layers))
        self.bind_pools()
        self.free = list(range(1, BLOCKS))
        self.random.shuffle(self.free)
        self.requests: list[Any] = []
        self.buffers = Names(
            starts=torch.zeros(9, dtype=torch.int32),
            lens=torch.zeros(8, dtype=torch.int32),
            table=torch.zeros(8, MAX_LEN // block_size + 1, dtype=torch.int32),
            slots=torch.full((MAX_LEN,), -1, dtype=torch.int64),
        )

    def make_layer(self, given: dict[str, Any], scales: dict[str, torch.Tensor]) -> Any:
        """Return what the runner knows of one layer."""
        impl = make_impl_class(self.choice)(
            self.heads,
            self.size,
            self.size**-0.5,
            self.kv_heads,
            **{"kv_cache_dtype": self.kv_cache_dtype} | given,
        )
        return Names(
            impl=impl,
            head_size_v=self.size,
            kv_cache=torch.tensor([]),
            **{f"_{letter}_scale": scales.get(letter, torch.tensor(1.0)) for letter in "qkv"},
        )

    def make_builder(self, names: list[str]) -> Any:
        return make_builder_class(self.choice)(self.spec, names, self.config, CPU)

    def bind_pools(self) -> None:
        for layer in self.layers.values():
            target = layer.impl.kv_sharing_target_layer_name
            shared = None if target is None else self.layers[target].kv_cache
            layer.kv_cache = make_pool(self.spec, self.order, self.members) if shared is None else shared

    def add(self, count: int = 1) -> list[int]:
        """Add requests, and return their numbers."""
        empty = torch.empty(0, self.kv_heads, self.size, dtype=self.dtype)
        for _ in range(count):
            caches = (dict.fromkeys(self.layers, empty), dict.fromkeys(self.layers, empty))
            self.requests.append(Names(blocks=[], len=0, k=caches[0], v=caches[1]))
        return list(range(len(self.requests) - count, len(self.requests)))

    def preempt(self, index: int) -> list[int]:
        """Take the blocks of a request, the next ones to be given out, and return them; it begins anew."""
        request = self.requests[index]
        blocks = request.blocks
        self.free += blocks
        empty = torch.empty(0, self.kv_heads, self.size, dtype=self.dtype)
        request.blocks, request.len = [], 0
        request.k, request.v = dict.fromkeys(self.layers, empty), dict.fromkeys(self.layers, empty)
        return list(blocks)

    def common(self, step: list[tuple[int, int]], pad_reqs: int = 0, pad_tokens: int = 0, **further: Any) -> Any:
        """Return the metadata of a step, of (request, tokens) in the runner's order, in the runner's own buffers."""
        lens, buffers = [count for _, count in step], self.buffers
        tokens, reqs = sum(lens), len(step)
        for index, count in step:
            request = self.requests[index]
            while len(request.blocks) * self.block_size < request.len + count:
                request.blocks.append(self.free.pop())
        starts, seq_lens = buffers.starts[: reqs + pad_reqs + 1], buffers.lens[: reqs + pad_reqs]
        starts[1 : reqs + 1] = torch.tensor(lens).cumsum(0)
        starts[reqs + 1 :] = tokens
        seq_lens.zero_()
        seq_lens[:reqs] = torch.tensor([self.requests[index].len + count for index, count in step])
        table, slots = buffers.table[: reqs + pad_reqs], buffers.slots[: tokens + pad_tokens]
        table.zero_()
        slots.fill_(-1)
        for row, (index, count) in enumerate(step):
            request = self.requests[index]
            table[row, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
            for place, position in enumerate(range(request.len, request.len + count), int(starts[row])):
                block = request.blocks[position // self.block_size]
                slots[place] = block * self.block_size + position % self.block_size
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts.clone(),
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens.clone(),
            num_reqs=reqs + pad_reqs,
            num_actual_tokens=tokens + pad_tokens,
            max_query_len=max(lens),
            max_seq_len=int(seq_lens.max()),
            block_table_tensor=table,
            slot_mapping=slots,
            **further,
        )

    def dummy(self, reqs: int, query_len: int = 1) -> Any:
        """Return the metadata of a dummy run: null blocks, and no slots."""
        tokens, buffers = reqs * query_len, self.buffers
        buffers.starts[: reqs + 1] = torch.arange(0, tokens + 1, query_len)
        buffers.lens[:reqs], buffers.slots[:tokens] = query_len, -1
        buffers.table[:reqs] = 0
        return CommonAttentionMetadata(
            query_start_loc=buffers.starts[: reqs + 1],
            query_start_loc_cpu=buffers.starts[: reqs + 1].clone(),
            seq_lens=buffers.lens[:reqs],
            seq_lens_cpu_upper_bound=buffers.lens[:reqs].clone(),
            num_reqs=reqs,
            num_actual_tokens=tokens,
            max_query_len=query_len,
            max_seq_len=MAX_LEN,
            block_table_tensor=buffers.table[:reqs],
            slot_mapping=buffers.slots[:tokens],
        )

    def inputs(self, rows: int) -> dict[str, Any]:
        """Return queries, K/V and a marked output for each layer."""
        found = {}
        for name in self.layers:
            heads = (self.heads, self.kv_heads, self.kv_heads)
            query, key, value = (torch.randn(rows, count, self.size).to(self.dtype) for count in heads)
            output = torch.full((rows, self.heads, self.size), 7.0, dtype=self.dtype)
            found[name] = Names(q=query, k=key, v=value, out=output)
        return found

    def forward(self, inputs: dict[str, Any], metadata: Any) -> None:
        """Call all layers."""
        for name, layer in self.layers.items():
            io = inputs[name]
            of_layer = metadata[name] if isinstance(metadata, dict) else metadata
            assert layer.impl.forward(layer, io.q, io.k, io.v, layer.kv_cache, of_layer, output=io.out) is io.out

    def check(
        self, step: list[tuple[int, int]], inputs: dict[str, Any], spans_of_step: dict[int, Any] | None = None
    ) -> float:
        """Take the K/V of a step over, and return the largest difference of the outputs from the oracle's."""
        worst = 0.0
        for name, layer in self.layers.items():
            io, place = inputs[name], 0
            source = layer.impl.kv_sharing_target_layer_name or name
            for number, (index, count) in enumerate(step):
                request, rows = self.requests[index], slice(place, place + count)
                if source == name:
                    request.k[name] = torch.cat([request.k[name], io.k[rows]])
                    request.v[name] = torch.cat([request.v[name], io.v[rows]])
                spans = (spans_of_step or {}).get(number, [])
                expected = self.expected(layer, io.q[rows], request.k[source], request.v[source], spans)
                worst = max(worst, float((io.out[rows].double() - expected).abs().max()))
                place += count
        for index, count in step:
            self.requests[index].len += count
        return worst

    def run(
        self, step: list[tuple[int, int]], pad_tokens: int = 0, spans: dict[int, list[tuple[int, int]]] | None = None
    ) -> float:
        """Run a step through all layers, eagerly, with the spans of its requests; see `check`."""
        common = self.common(step, pad_tokens=pad_tokens, mm_req_doc_ranges=spans)
        inputs = self.inputs(common.num_actual_tokens)
        self.forward(inputs, self.builder.build(0, common))
        tokens = sum(count for _, count in step)
        assert all(bool((io.out[tokens:] == 7.0).all()) for io in inputs.values()), "padding was written"
        return self.check(step, inputs, spans)

    def expected(self, layer: Any, query: Any, keys: Any, values: Any, spans: Any = ()) -> Any:
        """Return the oracle's output for one request, with the first and last positions of its spans."""
        impl = layer.impl
        is_clamped = getattr(layer, "mm_prefix_clamp_sliding_window", False)
        if not is_clamped and any(
            getattr(each, "mm_prefix_clamp_sliding_window", False) for each in self.layers.values()
        ):
            spans = ()
        ranges = torch.full((len(query), 2), -1)
        for row, position in enumerate(range(len(keys) - len(query), len(keys))):
            for low, high in spans:
                if low <= position <= high:
                    oldest = max(low, position - impl.sliding_window + 1) if is_clamped else low
                    ranges[row] = torch.tensor([oldest, high])
        slopes = None if impl.alibi_slopes is None else torch.tensor(impl.alibi_slopes)
        return attend(
            query,
            keys,
            values,
            scale=impl.scale,
            window=(-1, -1) if impl.sliding_window is None else (impl.sliding_window - 1, 0),
            logits_soft_cap=impl.logits_soft_cap,
            sinks=None if impl.sinks is None else impl.sinks.detach(),
            alibi=impl.requirements.alibi,
            alibi_slopes=slopes,
            spans=ranges,
        ).output

    def capture(self, reqs: int, query_len: int = 1) -> tuple[Any, Any]:
        """Capture a step; return its inputs and its replay."""
        metadata = self.builder.build_for_cudagraph_capture(self.dummy(reqs, query_len))
        inputs = self.inputs(reqs * query_len)
        _, replay = capture(lambda: self.forward(inputs, metadata), CPU)
        return inputs, replay

    def replay(
        self,
        captured: tuple[Any, Any],
        step: list[tuple[int, int]],
        reqs: int,
        spans: dict[int, list[tuple[int, int]]] | None = None,
    ) -> float:
        """Run a step in a graph of so many requests, with the spans of its requests; see `check`."""
        inputs, replay = captured
        rows = inputs[next(iter(inputs))].q.shape[0]
        pad_tokens = rows - sum(count for _, count in step)
        common = self.common(step, pad_reqs=reqs - len(step), pad_tokens=pad_tokens, mm_req_doc_ranges=spans)
        assert common.num_actual_tokens == rows
        metadata = self.builder.build(0, common)
        assert all(part.graph is not None for part in metadata.parts.values())
        for name, fresh in self.inputs(rows).items():
            for each in ("q", "k", "v", "out"):
                getattr(inputs[name], each).copy_(getattr(fresh, each))
        replay()
        return self.check(step, inputs, spans)
