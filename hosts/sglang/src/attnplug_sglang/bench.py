"""
What ``attnplug bench --host sglang`` measures: steps of SGLang's model runner on its own backend and on attnplug, the
module of the entry point `sglang` in the group ``attnplug.benchmarks``.

The runner is real, with its layers and its pools, and has no scheduler. Attention is called as models call it, with
random queries, keys and values.
"""

from __future__ import annotations

import inspect
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import frozen

from attnplug.errors import AttnplugError, RequestError
from attnplug_sglang.names import AUTO, name_of
from attnplug_sglang.registration import register

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor


DISTRIBUTIONS: Final = ("sglang", "sglang-kernel", "attnplug-sglang")

REQUESTS: Final = 8
LENGTH: Final = 128
"""Tokens of each request in the pool."""

LAYERS: Final = 4
NATIVE: Final = {"cpu": "torch_native", "cuda": "triton"}
"""Device type -> SGLang's backend that needs no further library."""


@frozen
class Variant:
    """
    What is requested of attention besides its shape.

    Attributes:
        name: Its name in a report.
        window: Tokens to the left of a token that it attends to, as SGLang counts; None for all.
        cap: The soft cap of scores; 0.0 for none.
        sinks: Whether each head has a sink.
    """

    name: str
    window: int | None = None
    cap: float = 0.0
    sinks: bool = False


def make_runner(folder: Path, device: str, page_size: int, tokens: int, kv_cache_dtype: str) -> Any:
    """
    Return a model runner of SGLang, 0.5.15 or newer, without an attention backend.

    Args:
        folder: A model's folder; its weights are random.
        device: ``"cpu"`` or ``"cuda"``.
        page_size: Tokens of a page.
        tokens: Slots of the pool.
        kv_cache_dtype: As SGLang's option.
    """
    from sglang.srt.configs.model_config import ModelConfig  # noqa: PLC0415 - whoever starts engines needs none here
    from sglang.srt.model_executor.model_runner import ModelRunner  # noqa: PLC0415 - likewise
    from sglang.srt.server_args import PortArgs, ServerArgs  # noqa: PLC0415 - likewise

    options = ServerArgs(
        model_path=str(folder),
        device=device,
        load_format="dummy",
        dtype="float32" if device == "cpu" else "bfloat16",
        skip_tokenizer_init=True,
        attention_backend="torch_native",  # it is not made
        page_size=page_size,
        disable_cuda_graph=True,
        mem_fraction_static=0.5,
        max_total_tokens=tokens,
        max_running_requests=128,
        kv_cache_dtype=kv_cache_dtype,
        grammar_backend="none",
        random_seed=1,
    )
    port = PortArgs.init_new(options).nccl_port
    own = {"model_config": None, "mem_fraction_static": 0.5, "gpu_id": 0, "nccl_port": port, "server_args": options}
    if "tp_rank" in inspect.signature(ModelRunner.__init__).parameters:
        own |= {"tp_rank": 0, "tp_size": 1, "moe_ep_rank": 0, "moe_ep_size": 1, "pp_rank": 0, "pp_size": 1}
        own["model_config"] = ModelConfig.from_server_args(options)
    else:
        own["model_config"] = _begin(options, device, port, ModelConfig)
    runner = ModelRunner(**own)
    runner.alloc_memory_pool()
    return runner


def _begin(options: Any, device: str, port: int, config: Any) -> Any:
    """Begin the process as versions after 0.5.20 want it, and return the model's configuration."""
    try:
        from sglang.srt.distributed.bootstrap import (  # noqa: PLC0415 - 0.5.15 lacks it
            init_layer_runtime,
            init_parallel_runtime,
        )
        from sglang.srt.runtime_context import SpawnRanks, publish  # noqa: PLC0415 - likewise
    except ImportError as error:
        raise RequestError(
            f"the installed SGLang has another way to begin a process: {error}",
            "the benchmark knows those of 0.5.15 and 0.5.23",
            "install sglang==0.5.23, or measure whole engines with benchmarks/sglang_engines.py",
        ) from error

    options.resolve_once()
    publish(options, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
    found = config.from_server_args(options)
    init_parallel_runtime(server_args=options, device=device, dist_port=port)
    init_layer_runtime(model_config=found)
    return found


class Rig:
    """
    Requests on a runner, with their keys and values apart for the reference.

    Args:
        runner: SGLang's.
        variant: What is requested of its layers.
        seed: Of the random numbers.
    """

    def __init__(self, runner: Any, variant: Variant, seed: int = 0) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention  # noqa: PLC0415 - see make_runner

        self.runner, self.variant, self.page = runner, variant, runner.page_size
        self.table = runner.req_to_token_pool.req_to_token
        self.device = self.table.device
        self.generator = torch.Generator(self.device).manual_seed(seed)
        modules = dict(runner.model.named_modules())
        paths = [path for path, module in modules.items() if isinstance(module, RadixAttention)]
        self.layers = [modules[path] for path in paths]
        heads = self.layers[0].tp_q_head_num
        self.sinks = [self._randn(heads).to(runner.dtype) if variant.sinks else None for _ in paths]
        for path, layer, sinks in zip(paths, self.layers, self.sinks, strict=True):
            modules[path.rpartition(".")[0]].sinks = sinks
            layer.sliding_window_size = -1 if variant.window is None else variant.window
            layer.logit_cap = variant.cap
        runner.sliding_window_size = variant.window
        pages = list(range(1, runner.token_to_kv_pool.size // self.page))
        random.Random(seed).shuffle(pages)
        self._pages, self._row = pages, 0
        self.requests: list[dict[str, Any]] = []

    def backend(self, name: str) -> Any:
        """Return a backend by its name in SGLang's registry."""
        from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: PLC0415 - see make_runner

        return ATTENTION_BACKENDS[name](self.runner)

    def clear(self) -> None:
        """Forget all requests, and free their pages."""
        for request in self.requests:
            self._pages += request["pages"]
        self.requests, self._row = [], 0

    def new(self, room: int, length: int = 0) -> int:
        """
        Return a new request with slots for `room` tokens.

        Args:
            room: Tokens.
            length: How many of them are in the pool already, whatever they are; there is no reference for them.
        """
        self._row += 1
        mine = [self._pages.pop() for _ in range(-(-room // self.page))]
        starts = torch.tensor(mine, device=self.device)[:, None] * self.page
        slots = (starts + torch.arange(self.page, device=self.device)).flatten()[:room]
        self.table[self._row, :room] = slots.int()
        layer = self.layers[0]
        sizes = (layer.qk_head_dim, layer.v_head_dim)
        empty = [torch.zeros(0, layer.tp_k_head_num, size, device=self.device) for size in sizes]
        kept = [tuple(empty) for _ in self.layers]
        self.requests.append({"row": self._row, "length": length, "pages": mine, "kv": kept})
        return len(self.requests) - 1

    def batch(self, requests: list[int], lens: list[int], mode: Any, *, pad: int = 0, fill: int = 0) -> Any:
        """Return SGLang's batch; `pad` requests of length `fill` come last."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch  # noqa: PLC0415 - see make_runner

        rows = [self.requests[r]["row"] for r in requests]
        before = [self.requests[r]["length"] for r in requests]
        after = [b + n for b, n in zip(before, lens, strict=True)]
        slots = [self.table[row, b:a].long() for row, b, a in zip(rows, before, after, strict=True)]
        on = {"device": self.device, "dtype": torch.int64}
        slots.append(torch.zeros(pad, **on))
        lengths = torch.tensor([*after, *[fill] * pad], dtype=torch.int64)
        step = ForwardBatch(
            forward_mode=mode,
            batch_size=len(lengths),
            input_ids=torch.zeros(sum(lens) + pad, **on),
            req_pool_indices=torch.tensor([*rows, *[0] * pad], **on),
            seq_lens=lengths.to(self.device),
            out_cache_loc=torch.cat(slots),
            seq_lens_sum=int(lengths.sum()),
            seq_lens_cpu=lengths,
        )
        step.positions = torch.zeros_like(step.input_ids)
        if mode.is_extend():
            step.extend_num_tokens, step.global_num_token_non_padded_cpu = sum(lens), sum(lens)
            step.extend_seq_lens_cpu, step.extend_prefix_lens_cpu = list(lens), before
            step.extend_seq_lens = torch.tensor(lens, device=self.device, dtype=torch.int32)
            step.extend_prefix_lens = torch.tensor(before, device=self.device, dtype=torch.int32)
            step.extend_start_loc = step.extend_seq_lens.cumsum(0, dtype=torch.int32) - step.extend_seq_lens
            step.extend_logprob_start_lens_cpu = [0] * len(lens)
        return step

    def qkv(self, tokens: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return queries, keys and values of each layer, in rows as a projection makes them."""
        made = []
        for layer in self.layers:
            widths = (layer.tp_q_head_num * layer.qk_head_dim, layer.tp_k_head_num * layer.qk_head_dim)
            sizes = (*widths, layer.tp_k_head_num * layer.v_head_dim)
            made.append(tuple(self._randn(tokens, size).to(self.runner.dtype) for size in sizes))
        return made  # type: ignore[return-value]

    def _randn(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator, device=self.device)

    def run(self, backend: Any, step: Any, data: Any) -> list[Tensor]:
        """Return the attention of each layer."""
        from sglang.srt.model_executor.forward_context import ForwardContext, forward_context  # noqa: PLC0415 - likewise

        with forward_context(ForwardContext(attn_backend=backend)):
            return [
                layer(q, k, v, step, save_kv_cache=True, **({} if sinks is None else {"sinks": sinks}))
                for layer, sinks, (q, k, v) in zip(self.layers, self.sinks, data, strict=True)
            ]


class Graph:
    """
    Decodes of a number of requests, captured. On a CPU the same calls run each time.

    Args:
        rig: The requests.
        backend: SGLang's.
        size: Requests of the graph.
    """

    def __init__(self, rig: Rig, backend: Any, size: int) -> None:
        from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: PLC0415 - see make_runner

        self.rig, self.backend, self.size, self.mode = rig, backend, size, ForwardMode.DECODE
        self.fill = int(backend.get_cuda_graph_seq_len_fill_value())
        self.step = rig.batch([], [], self.mode, pad=size, fill=self.fill)
        self.data = rig.qkv(size)
        backend.init_forward_metadata_out_graph(self.step, in_capture=True)
        self.metadata = getattr(backend, "forward_metadata", None)
        self.outputs: list[Tensor] = []
        self._replay = self._captured() if rig.device.type == "cuda" else self._body

    def _body(self) -> None:
        self.backend.init_forward_metadata_in_graph(self.step)
        self.outputs = self.rig.run(self.backend, self.step, self.data)

    def _captured(self) -> Callable[[], None]:
        beside: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # of torch
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(2):
                self._body()
        torch.cuda.current_stream().wait_stream(beside)
        after_warm_up = getattr(self.backend, "on_after_cuda_graph_warmup", None)
        if after_warm_up is not None:
            after_warm_up()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._body()
        kept = self.outputs

        def replay() -> None:
            graph.replay()
            self.outputs = kept

        return replay

    def prepare(self, requests: list[int]) -> None:
        """Write a step into what the graph reads."""
        made = self.rig.batch(requests, [1] * len(requests), self.mode, pad=self.size - len(requests), fill=self.fill)
        for name in ("req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc"):
            getattr(self.step, name).copy_(getattr(made, name))
        self.step.seq_lens_sum = made.seq_lens_sum
        self.write()

    def write(self) -> None:
        """Let the backend prepare the replay, as SGLang does before each."""
        self.backend.init_forward_metadata_out_graph(self.step)

    def replay(self) -> list[Tensor]:
        """Run the step, and return the attention of each layer."""
        if self.rig.device.type != "cuda":
            self.backend.forward_metadata = self.metadata
        self._replay()
        return self.outputs


def parts(device: str, backend: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """
    Yield the parts of a decode step: its metadata and its layers, and on a GPU those of a replay.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        backend: The backend of attnplug; None for the one that is chosen.

    Raises:
        AttnplugError: The backends compute different results.
    """
    from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: PLC0415 - see make_runner

    register()
    with TemporaryDirectory() as folder:
        _write_model(folder, device)
        rig = Rig(make_runner(Path(folder), device, 16, 4096, "auto"), Variant("plain"))
        names = (NATIVE[device], AUTO if backend is None else name_of(backend))
        requests = [rig.new(LENGTH + 1, LENGTH) for _ in range(REQUESTS)]
        step, data = rig.batch(requests, [1] * REQUESTS, ForwardMode.DECODE), rig.qkv(REQUESTS)
        eager = {name: rig.backend(name) for name in names}
        for name, made in eager.items():
            made.init_forward_metadata(step)
            _check(name, rig.run(made, step, data), rig.run(_prepared(eager[names[0]], step), step, data))
        of = f"{REQUESTS} decodes at {LENGTH} tokens"
        yield (
            f"metadata of an eager step, {of}",
            {name: (lambda _, made=made: made.init_forward_metadata(step), _nothing) for name, made in eager.items()},
        )
        yield (
            f"layers of an eager step, {of}, {LAYERS} layers",
            {
                name: (lambda made: rig.run(made, step, data), lambda made=made: _prepared(made, step))
                for name, made in eager.items()
            },
        )
        if device == "cpu":  # SGLang's own backend has no graphs there
            return
        graphs = {name: _captured(rig, name, requests) for name in names}
        yield (
            f"metadata of a replay, {of}",
            {name: (lambda _, graph=graph: graph.write(), _nothing) for name, graph in graphs.items()},
        )
        yield (
            f"a replayed step, {of}, {LAYERS} layers",
            {
                name: (lambda _, graph=graph: (graph.write(), graph.replay()), _nothing)
                for name, graph in graphs.items()
            },
        )


def _captured(rig: Rig, name: str, requests: list[int]) -> Graph:
    """Return the captured decodes of these requests, on another instance of a backend."""
    backend = rig.backend(name)
    backend.init_cuda_graph_state(len(requests), len(requests))
    graph = Graph(rig, backend, len(requests))
    graph.prepare(requests)
    return graph


def _prepared(backend: Any, step: Any) -> Any:
    """Return a backend with the metadata of a step: that of all backends is kept by themselves."""
    backend.init_forward_metadata(step)
    return backend


def _nothing() -> None:
    """Return no argument."""


def _check(name: str, found: list[Tensor], wanted: list[Tensor]) -> None:
    pairs = zip(found, wanted, strict=True)
    if not all(torch.allclose(one.float(), other.float(), atol=3e-2, rtol=3e-2) for one, other in pairs):
        raise AttnplugError(
            f"{name} computes another result than SGLang's own backend", "", "run the conformance kit on the backend"
        )


def _write_model(folder: str, device: str) -> None:
    """Write the configuration of a small model; on a GPU its heads have the size that kernels like."""
    from transformers import LlamaConfig  # noqa: PLC0415 - a second

    heads, size = (4, 16) if device == "cpu" else (16, 128)
    LlamaConfig(
        vocab_size=512,
        hidden_size=heads * size,
        intermediate_size=2 * heads * size,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=size,
        max_position_embeddings=2048,
        architectures=["LlamaForCausalLM"],
        torch_dtype="float32" if device == "cpu" else "bfloat16",  # type: ignore[call-arg]  # in those of its base
    ).save_pretrained(folder)
