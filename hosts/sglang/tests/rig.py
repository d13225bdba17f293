"""Steps of SGLang's model runner, made by hand: its layers, pools and batches, without an engine."""

from __future__ import annotations

import random
from types import SimpleNamespace as Names
from typing import Any

from hosts.sglang.tests import stand_ins

stand_ins.install()

import torch  # noqa: E402 - SGLang imports torchvision
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context  # noqa: E402

from attnplug_kit.oracle import attend  # noqa: E402
from attnplug_sglang.backend import AttnplugAttnBackend  # noqa: E402

MAX_LEN = 192
ROWS = 8
POOL = 2048

__all__ = ["AttentionType", "ForwardMode", "World", "worst"]


class Block(torch.nn.Module):
    """The module around an attention layer, which has its sinks."""

    def __init__(self, attn: Any, sinks: torch.Tensor | None) -> None:
        super().__init__()
        self.attn, self.sinks = attn, sinks


class World:
    """
    A model of attention layers, its pools, and requests with their keys and values in float64.

    Args:
        page: Tokens of a page.
        windows: The window of each layer, as SGLang counts: tokens to the left of a token; -1 for none.
        swa: Whether layers with a window have a pool for themselves.
        options: ``dtype``, ``kv_dtype``, ``heads``, ``kv_heads``, ``size``, ``size_v``, ``cap``, ``scaling``,
            ``sinks``, ``seed``, ``scales`` (of keys and of values), ``backend``, ``attn_type``, ``server`` (further
            options of SGLang), ``rows`` (of the table of slots), ``slots`` (of the pool), ``latent`` (whether values
            are the first elements of the one key head).
    """

    def __init__(
        self, page: int = 1, windows: tuple[int, ...] = (-1, 20), *, swa: bool = False, **options: Any
    ) -> None:
        self.random = random.Random(options.get("seed", 0))
        self.generator = torch.Generator().manual_seed(options.get("seed", 0))
        self.page, self.dtype = page, options.get("dtype", torch.float32)
        self.heads, self.kv_heads = options.get("heads", 4), options.get("kv_heads", 2)
        self.size, self.size_v = options.get("size", 16), options.get("size_v", options.get("size", 16))
        self.cap, self.has_sinks = options.get("cap", 0.0), options.get("sinks", False)
        self.scales = options.get("scales")
        self.slots = options.get("slots", POOL)
        self.latent = options.get("latent", False)
        self.layers = [self._layer(i, window, options) for i, window in enumerate(windows)]
        self.table = ReqToTokenPool(options.get("rows", ROWS), MAX_LEN, "cpu", enable_memory_saver=False)
        kv_dtype = options.get("kv_dtype", self.dtype)
        self.pool = self._swa_pool(windows, kv_dtype) if swa else self._pool(len(windows), kv_dtype)
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(self.layers)
        server = {"chunked_prefill_size": 512, "max_prefill_tokens": 1024, **options.get("server", {})}
        self.runner = Names(
            model=self.model,
            device="cpu",
            dtype=self.dtype,
            page_size=page,
            req_to_token_pool=self.table,
            token_to_kv_pool=self.pool,
            server_args=Names(**server),
        )
        self.pages = self._shuffled(self.slots // page)
        self.requests: list[dict[str, Any]] = []
        self.named = options.get("backend")

    def backend(self) -> AttnplugAttnBackend:
        """Return the backend that is tested."""
        return AttnplugAttnBackend(self.runner, backend=self.named)

    def _layer(self, index: int, window: int, options: dict[str, Any]) -> Block:
        attn = RadixAttention(
            self.heads,
            self.size,
            options.get("scaling", self.size**-0.5),
            self.kv_heads,
            index,
            logit_cap=self.cap,
            v_head_dim=self.size_v,
            sliding_window_size=window,
            attn_type=options.get("attn_type", AttentionType.DECODER),
        )
        if self.scales:
            attn.k_scale_float, attn.v_scale_float = self.scales
        return Block(attn, self.randn(self.heads) if self.has_sinks else None)

    def _pool(self, layers: int, dtype: torch.dtype) -> MHATokenToKVPool | MLATokenToKVPool:
        if self.latent:
            sizes = {"kv_lora_rank": self.size_v, "qk_rope_head_dim": self.size - self.size_v}
            return MLATokenToKVPool(
                self.slots, self.page, dtype, **sizes, layer_num=layers, device="cpu", enable_memory_saver=False
            )
        return MHATokenToKVPool(
            self.slots, self.page, dtype, self.kv_heads, self.size, layers, "cpu", False, v_head_dim=self.size_v
        )

    def _swa_pool(self, windows: tuple[int, ...], dtype: torch.dtype) -> SWAKVPool:
        """Return a pool for each kind of layer, and slots that differ between them."""
        pool = SWAKVPool(
            size=self.slots,
            size_swa=self.slots,
            page_size=self.page,
            dtype=dtype,
            head_num=self.kv_heads,
            head_dim=self.size,
            swa_attention_layer_ids=[i for i, window in enumerate(windows) if window > -1],
            full_attention_layer_ids=[i for i, window in enumerate(windows) if window < 0],
            device="cpu",
            enable_memory_saver=False,
            v_head_dim=self.size_v,
        )
        pages = [0, *self._shuffled(self.slots // self.page)]
        mapping = torch.tensor(pages)[:, None] * self.page + torch.arange(self.page)
        pool.register_mapping(torch.cat([mapping.flatten(), torch.full((self.page + 1,), -1)]))
        return pool

    def _shuffled(self, pages: int) -> list[int]:
        found = list(range(1, pages + 1))
        self.random.shuffle(found)
        return found

    def randn(self, *shape: int) -> torch.Tensor:
        """Return random numbers."""
        return torch.randn(*shape, generator=self.generator)

    def new(self) -> int:
        """Return a new request, which has slots for all its tokens."""
        row = len(self.requests) + 1
        mine = [self.pages.pop() for _ in range(-(-MAX_LEN // self.page))]
        slots = torch.cat([torch.arange(page * self.page, (page + 1) * self.page) for page in mine])[:MAX_LEN]
        self.table.write((row, slice(0, MAX_LEN)), slots.int())
        cached = [
            (torch.zeros(0, self.kv_heads, self.size), torch.zeros(0, self.kv_heads, self.size_v)) for _ in self.layers
        ]
        self.requests.append({"row": row, "length": 0, "kv": cached})
        return len(self.requests) - 1

    def fork(self, request: int, length: int) -> int:
        """Return a new request that has the first tokens of another one in the same slots, as a prefix hit does."""
        child, parent = self.new(), self.requests[request]
        made = self.requests[child]
        shared = length // self.page * self.page
        self.table.req_to_token[made["row"], :shared] = self.table.req_to_token[parent["row"], :shared]
        made["length"] = shared
        made["kv"] = [(k[:shared], v[:shared]) for k, v in parent["kv"]]
        return child

    def batch(
        self, requests: list[int], lens: list[int], mode: Any, *, spec: Any = None, pad: int = 0, on_cpu: bool = True
    ) -> ForwardBatch:
        """Return SGLang's batch: `pad` requests of length 0 come last."""
        rows = [self.requests[r]["row"] for r in requests]
        before = [self.requests[r]["length"] for r in requests]
        after = [b + n for b, n in zip(before, lens, strict=True)]
        slots = [self.table.req_to_token[row, b:a].long() for row, b, a in zip(rows, before, after, strict=True)]
        slots.append(torch.zeros(pad * (lens[0] if lens and spec else 1), dtype=torch.long))
        seq = torch.tensor([*(before if spec is not None else after), *[0] * pad], dtype=torch.int64)
        out = torch.cat(slots)
        step = ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows) + pad,
            input_ids=torch.zeros(len(out), dtype=torch.long),
            req_pool_indices=torch.tensor([*rows, *[0] * pad]),
            seq_lens=seq,
            out_cache_loc=out,
            seq_lens_sum=int(seq.sum()),
            seq_lens_cpu=seq.clone() if on_cpu else None,
            spec_info=spec,
        )
        if mode.is_extend() and spec is None:
            step.extend_seq_lens = torch.tensor(lens)
            step.extend_prefix_lens = torch.tensor(before)
            step.extend_seq_lens_cpu = list(lens) if on_cpu else None
            step.extend_prefix_lens_cpu = list(before)
        return step

    def qkv(self, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Return queries, keys and values of each layer."""
        shapes = ((self.heads, self.size), (self.kv_heads, self.size), (self.kv_heads, self.size_v))
        found = [tuple(self.randn(tokens, *shape).to(self.dtype) for shape in shapes) for _ in self.layers]
        return [(q, k, k[..., : self.size_v]) for q, k, _ in found] if self.latent else found  # type: ignore[misc]

    def run(self, backend: Any, step: ForwardBatch, data: Any, *, save: bool = True) -> list[torch.Tensor]:
        """Return the attention of each layer, called as SGLang's models do."""
        return [self.call(i, backend, step, qkv, save=save) for i, qkv in enumerate(data)]

    def call(self, index: int, backend: Any, step: ForwardBatch, qkv: Any, *, save: bool = True) -> torch.Tensor:
        """Return the attention of one layer."""
        layer, (q, k, v) = self.layers[index], qkv
        sinks = {} if layer.sinks is None else {"sinks": layer.sinks}
        with forward_context(ForwardContext(attn_backend=backend)), torch.no_grad():
            found: torch.Tensor = layer.attn(q.flatten(1), k.flatten(1), v.flatten(1), step, save, **sinks)
        return found

    def expected(
        self, requests: list[int], lens: list[int], data: Any, masks: Any = None, *, commit: bool = True
    ) -> list[torch.Tensor]:
        """Return the float64 attention of each layer, and take the keys and values of the step over."""
        outputs: list[list[torch.Tensor]] = [[] for _ in self.layers]
        starts = [sum(lens[:i]) for i in range(len(lens))]
        for position, (request, start, count) in enumerate(zip(requests, starts, lens, strict=True)):
            known = self.requests[request]
            for i, layer in enumerate(self.layers):
                q, k, v = (t[start : start + count].double() for t in data[i])
                keys = torch.cat([known["kv"][i][0].double(), k])
                values = torch.cat([known["kv"][i][1].double(), v])
                outputs[i].append(self._attend(layer, q, keys, values, None if masks is None else masks[position]))
                if commit:
                    known["kv"][i] = (keys, values)
            if commit:
                known["length"] += count
        return [torch.cat(each) for each in outputs]

    def _attend(self, layer: Block, q: Any, keys: Any, values: Any, mask: Any) -> torch.Tensor:
        window = layer.attn.sliding_window_size
        return attend(
            q,
            keys,
            values,
            scale=layer.attn.scaling,
            causal=layer.attn.attn_type is not AttentionType.ENCODER_ONLY,
            window=(window, 0) if window > -1 else (-1, -1),
            logits_soft_cap=self.cap or None,
            sinks=layer.sinks,
            custom_mask=mask,
        ).output.flatten(1)

    def step(self, backend: Any, requests: list[int], lens: list[int], mode: Any, **more: Any) -> float:
        """Run a step eagerly, and return its largest error."""
        step, data = self.batch(requests, lens, mode, **more), self.qkv(sum(lens))
        backend.init_forward_metadata(step)
        return worst(self.run(backend, step, data), self.expected(requests, lens, data))


def worst(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest difference; rows of padding are not compared."""
    pairs = zip(found, expected, strict=True)
    return max(float((got[: len(want)].double() - want).abs().max()) for got, want in pairs)
