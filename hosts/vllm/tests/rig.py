"""Steps of vLLM's model runner, made by hand: metadata, pools and layers as the runner makes them, without an engine."""

from __future__ import annotations

import random
from types import SimpleNamespace as Names
from typing import Any

import torch
from attnplug_kit.oracle import attend
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.kv_cache_interface import FullAttentionSpec

from attnplug_vllm.builder import make_builder_class
from attnplug_vllm.cache import CacheMembers
from attnplug_vllm.impl import make_impl_class

HAS_LAYOUTS = not hasattr(AttentionBackend, "get_kv_cache_shape")
BLOCKS = 64


class Backend(CacheMembers):
    """The members of a backend class that are about pools."""

    choice = ("torch/sdpa",)


def config_of(layers: dict[str, Any], **further: Any) -> Any:
    """vLLM's configuration, as much of it as an attention backend reads."""
    options: dict[str, Any] = {
        "mode": None,
        "order": None,
        "drafts": 0,
        "max_num_seqs": 8,
        "dcp_size": 1,
        "disable_cascade_attn": True,
    } | further
    cache_config = Names(calculate_kv_scales=False)
    if HAS_LAYOUTS:
        cache_config.kv_cache_layout = options["order"]
    return Names(
        compilation_config=Names(
            static_forward_context=layers, cudagraph_mode=options["mode"], cudagraph_capture_sizes=[1, 2, 4, 8]
        ),
        scheduler_config=Names(max_num_seqs=options["max_num_seqs"], max_num_batched_tokens=256, async_scheduling=False),
        model_config=Names(max_model_len=256, disable_cascade_attn=options["disable_cascade_attn"]),
        cache_config=cache_config,
        speculative_config=Names(num_speculative_tokens=options["drafts"], parallel_drafting=False)
        if options["drafts"]
        else None,
        parallel_config=Names(
            decode_context_parallel_size=options["dcp_size"], use_ubatching=False, cp_kv_cache_interleave_size=1
        ),
        attention_config=Names(flash_attn_max_num_splits_for_cuda_graph=32),
        use_v2_model_runner=False,
    )


def make_pool(spec: Any, order: str | None, members: type[CacheMembers] = Backend, *, dtype: Any = None) -> torch.Tensor:
    """A layer's pool, as the runner views its bytes; each byte is that of a NaN."""
    if not HAS_LAYOUTS:
        shape = members.get_kv_cache_shape(BLOCKS, spec.block_size, spec.num_kv_heads, spec.head_size)
        axes = members.get_kv_cache_stride_order()
        raw = torch.full([shape[axis] for axis in axes], 0, dtype=spec.dtype)
        fill_nan(raw)
        return raw.permute([axes.index(axis) for axis in range(len(axes))])
    from vllm.v1.kv_cache_interface import KVCacheLayout, compute_layout_strides

    layout = KVCacheLayout[order or members.supported_kv_cache_layouts()[0].name]
    layers = 3
    strides = compute_layout_strides(spec, BLOCKS, layers, layout)
    shape = (layers, BLOCKS, spec.num_heads, spec.block_size, spec.state_content_size_bytes)
    raw = torch.full((layers * BLOCKS * spec.page_size_bytes,), -1, dtype=torch.int8)
    return raw.as_strided(shape, strides)[1].view(spec.dtype)


def fill_nan(tensor: torch.Tensor) -> None:
    """Fill a tensor with what a pool may hold: NaN, in bytes where it has 8-bit floats."""
    tensor.view(torch.int8).fill_(-1)


class Rig:
    """A model's attention layers of one KV-cache group, and the requests of a runner."""

    def __init__(
        self,
        layers: list[dict[str, Any]],
        *,
        num_heads: int = 8,
        num_kv_heads: int = 2,
        head_size: int = 16,
        block_size: int = 16,
        seed: int = 0,
        choice: tuple[str, ...] = ("torch/sdpa",),
        kv_cache_dtype: str = "auto",
        order: str | None = None,
        **further: Any,
    ) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        self.heads, self.kv_heads, self.size, self.block_size = num_heads, num_kv_heads, head_size, block_size
        self.layers: dict[str, Any] = {}
        make = make_impl_class(choice)
        scale = head_size**-0.5
        for index, given in enumerate(layers):
            impl = make(
                num_heads, head_size, scale, num_kv_heads, kv_cache_dtype=kv_cache_dtype, **given
            )
            self.layers[f"layers.{index}"] = Names(
                impl=impl,
                head_size_v=head_size,
                kv_cache=torch.tensor([]),
                **{f"_{letter}_scale": torch.tensor(1.0) for letter in "qkv"},
            )
        self.config = config_of(self.layers, order=order, **further)
        members = type("Members", (CacheMembers,), {"choice": choice})
        dtype = torch.uint8 if kv_cache_dtype.startswith("fp8") else torch.float32
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=num_kv_heads, head_size=head_size, dtype=dtype)
        self.spec = members.customize_spec(spec) if HAS_LAYOUTS else spec
        self.members, self.order = members, order
        self.builder = make_builder_class(choice)(
            self.spec, list(self.layers), self.config, torch.device("cpu")
        )
        self.bind_pools()
        self.free = list(range(1, BLOCKS))
        self.random.shuffle(self.free)
        self.requests: list[Any] = []
        self.buffers = Names(
            starts=torch.zeros(9, dtype=torch.int32),
            lens=torch.zeros(8, dtype=torch.int32),
            table=torch.zeros(8, 16, dtype=torch.int32),
            slots=torch.full((256,), -1, dtype=torch.int64),
        )

    def bind_pools(self) -> None:
        for name, layer in self.layers.items():
            target = layer.impl.kv_sharing_target_layer_name
            layer.kv_cache = make_pool(self.spec, self.order, self.members) if target is None else self.layers[target].kv_cache
            del name

    def add(self) -> int:
        """A new request."""
        empty = torch.empty(0, self.kv_heads, self.size)
        self.requests.append(
            Names(blocks=[], len=0, k=dict.fromkeys(self.layers, empty), v=dict.fromkeys(self.layers, empty))
        )
        return len(self.requests) - 1

    def common(self, step: list[tuple[int, int]], pad_reqs: int = 0, pad_tokens: int = 0, **further: Any) -> Any:
        """The metadata of a step: (request, tokens) in the runner's order, in the runner's own buffers."""
        lens = [count for _, count in step]
        tokens, reqs, buffers = sum(lens), len(step), self.buffers
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
        place = 0
        for row, (index, count) in enumerate(step):
            request = self.requests[index]
            table[row, : len(request.blocks)] = torch.tensor(request.blocks, dtype=torch.int32)
            for position in range(request.len, request.len + count):
                block = request.blocks[position // self.block_size]
                slots[place] = block * self.block_size + position % self.block_size
                place += 1
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

    def run(self, step: list[tuple[int, int]], common: Any = None, metadata: Any = None) -> float:
        """Run a step through all layers, and return the largest difference from the oracle."""
        common = self.common(step) if common is None else common
        metadata = self.builder.build(0, common) if metadata is None else metadata
        rows, tokens, worst = common.num_actual_tokens, sum(count for _, count in step), 0.0
        for name, layer in self.layers.items():
            query = torch.randn(rows, self.heads, self.size)
            key, value = torch.randn(rows, self.kv_heads, self.size), torch.randn(rows, self.kv_heads, self.size)
            output = torch.full((rows, self.heads, self.size), 7.0)
            result = layer.impl.forward(layer, query, key, value, layer.kv_cache, metadata, output=output)
            assert result is output
            if metadata.parts[layer.impl.binding.backend].graph is None:
                assert bool((output[tokens:] == 7.0).all()), "padding was written"
            place = 0
            for index, count in step:
                request, rows_of = self.requests[index], slice(place, place + count)
                source = layer.impl.kv_sharing_target_layer_name or name
                if source == name:
                    request.k[name] = torch.cat([request.k[name], key[rows_of]])
                    request.v[name] = torch.cat([request.v[name], value[rows_of]])
                expected = self.expected(layer, query[rows_of], request.k[source], request.v[source])
                worst = max(worst, float((output[rows_of].double() - expected).abs().max()))
                place += count
        for index, count in step:
            self.requests[index].len += count
        return worst

    def expected(self, layer: Any, query: Any, keys: Any, values: Any) -> Any:
        impl = layer.impl
        window = (-1, -1) if impl.sliding_window is None else (impl.sliding_window - 1, 0)
        slopes = None if impl.alibi_slopes is None else torch.tensor(impl.alibi_slopes)
        return attend(
            query, keys, values,
            scale=impl.scale,
            window=window,
            logits_soft_cap=impl.logits_soft_cap,
            sinks=impl.sinks,
            alibi=impl.requirements.alibi,
            alibi_slopes=slopes,
        ).output
