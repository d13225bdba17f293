"""
Prefills of multi-head latent attention (MLA) in vLLM, on the backend that attnplug chooses for contiguous keys.

vLLM expands latents to keys and values per head, loops over a cached prefix and merges by LSE. attnplug attends
from new tokens to each other, and to each chunk of cached ones. Metadata is built once per step, for all layers.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import frozen
from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend
from vllm.v1.attention.backends.mla.prefill.registry import MLAPrefillBackendEnum

from attnplug import Requirements
from attnplug.contract import Batch, Layer
from attnplug.errors import AttnplugError, NotNegotiatedError
from attnplug_vllm import binding, facts, selector
from attnplug_vllm.names import PREFILL, SLOT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attnplug import Selection
    from attnplug.contract import Attention, Metadata, StepBuilder

_log: Final = logging.getLogger("vllm.attnplug")  # vLLM shows the records of loggers below its own

_offered: Final[set[int]] = set()
"""The configurations that name `LatentPrefill` because attnplug offered it, by ``id``."""


def requests(num_heads: int, head_size: int, head_size_v: int, dtype: Any) -> tuple[Requirements, Requirements]:
    """
    Return what attention among new tokens requests, and what attention from new tokens to cached ones does.

    Args:
        num_heads: Query heads of a rank. Keys and values have as many.
        head_size: Elements of a query and a key of one head.
        head_size_v: Elements of a value.
        dtype: The model's, of torch.
    """
    from vllm.envs import VLLM_BATCH_INVARIANT  # noqa: PLC0415 - read anew with each call

    fields: dict[str, Any] = {
        "head_size": head_size,
        "head_size_v": head_size_v,
        "num_q_heads": num_heads,
        "num_kv_heads": num_heads,
        "dtype": str(dtype).removeprefix("torch."),
        "paged": False,
        "phases": ("prefill",),
        "return_lse": True,
        "batch_invariant": bool(VLLM_BATCH_INVARIANT),  # builders are made without a current configuration
    }
    return Requirements(**fields), Requirements(**fields, causal=False)


def offer(impl: Any, dtype: Any) -> None:
    """
    Let vLLM prefill a layer of attnplug on attnplug, where its configuration names no other prefill backend.

    Where no backend serves these heads, vLLM chooses one of its own, and the reason is in its log.

    Args:
        impl: The layer's implementation, before vLLM asks for a prefill backend.
        dtype: The layer's.

    Raises:
        AttnplugError: The configuration names attnplug's on a CPU, and no backend serves the layer.
    """
    attention = getattr(facts.current_config(), "attention_config", None)
    named = None if attention is None else attention.mla_prefill_backend
    is_ours = named is MLAPrefillBackendEnum[SLOT]
    if attention is None or (named is not None and not (is_ours and _is_on_cpu())):
        return
    try:
        _check_slot()
        chosen = _choose(requests(impl.num_heads, impl.qk_head_dim, impl.v_head_dim, dtype), impl.choice)
    except AttnplugError as error:
        if is_ours:  # a GPU's selection asks `LatentPrefill` instead
            raise
        _say(f"vLLM prefills latents on a backend of its own, not on one of attnplug: {_text_of(error)}")
    else:
        impl.prefills = True
        if not _is_on_cpu():
            attention.mla_prefill_backend = MLAPrefillBackendEnum[SLOT]
            _offered.add(id(attention))
        _say(f"vLLM prefills latents on {' and '.join(dict.fromkeys(each.id for each in chosen))} of attnplug")


def prepared(own: Any, impl: Any, config: Any, spec: Any) -> Any:
    """
    Return the prefill backend of a metadata builder, ready to run.

    Args:
        own: What vLLM has made for the builder.
        impl: The implementation of one of its layers.
        config: vLLM's configuration.
        spec: vLLM's description of the layers' pool.
    """
    if impl.prefills and _is_on_cpu():
        own = LatentPrefill(
            num_heads=own.num_heads,
            scale=own.scale,
            kv_lora_rank=own.kv_lora_rank,
            qk_nope_head_dim=own.qk_nope_head_dim,
            qk_rope_head_dim=own.qk_rope_head_dim,
            v_head_dim=own.v_head_dim,
            vllm_config=config,
        )
    if isinstance(own, LatentPrefill):
        own.load(impl.choice, spec)
        if config.model_config.enable_cumem_allocator:
            own.made_in_pool = impl.choice, spec
    return own


@frozen(eq=False)
class _Calls:
    """Calls of one kind, of all layers."""

    attn: Attention
    builder: StepBuilder


class LatentPrefill(MLAPrefillBackend):  # type: ignore[misc]  # vLLM is no dependency, and untyped here
    """
    The backend of vLLM's registry of prefills.

    Attributes:
        made_in_pool: What it is loaded with once more: vLLM 0.26 discards the memory that is allocated beside KV caches
            while it sleeps. None where it was loaded elsewhere.
    """

    made_in_pool: tuple[facts.Choice, Any] | None = None
    _among_new: _Calls
    _to_cached: _Calls
    _of_new: Metadata
    _of_cached: list[Metadata]

    def __init__(self, *, vllm_config: Any, **sizes: Any) -> None:
        super().__init__(vllm_config=vllm_config, **sizes)
        attention = vllm_config.attention_config
        if id(attention) in _offered:
            # The next layer of attnplug offers it again. A drafter on a backend of vLLM inherits the configuration.
            attention.mla_prefill_backend = None
            _offered.discard(id(attention))

    @staticmethod
    def get_name() -> str:
        """Return the name of the enum's member."""
        return SLOT

    @classmethod
    def validate_configuration(cls, device_capability: Any, selector_config: Any) -> list[str]:
        """Return why no backend prefills the heads of vLLM's current configuration; empty where one does."""
        del device_capability  # of the device that `facts.device` names
        config, sizes = facts.current_config(), selector_config.mla_dimensions
        try:
            choice = selector.chosen_by_config()
            if choice is None:
                return ["attnplug prefills for its own attention backends: no other hands it the lengths on the CPU"]
            heads = config.model_config.get_num_attention_heads(config.parallel_config)
            head_size = sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
            _choose(requests(heads, head_size, sizes.v_head_dim, selector_config.dtype), choice)
        except AttnplugError as error:
            return [_text_of(error)]
        return []

    def load(self, choice: facts.Choice, spec: Any) -> None:
        """
        Load the chosen backends.

        Args:
            choice: The candidates that may be chosen.
            spec: vLLM's description of the layers' pool.

        Raises:
            NoBackendError: None serves the heads of the layers.
        """
        head_size, dtype = self.qk_nope_head_dim + self.qk_rope_head_dim, self.vllm_config.model_config.dtype
        wanted = requests(self.num_heads, head_size, self.v_head_dim, dtype)
        self._among_new, self._to_cached = (self._calls(each, choice, spec) for each in wanted)

    def _calls(self, requirements: Requirements, choice: facts.Choice, spec: Any) -> _Calls:
        backend = facts.choose(requirements, choice).load()
        attn = backend.make_impl(Layer(name="prefills of latents", scale=self.scale))
        state = backend.make_state(binding.limits_of(backend, spec, self.vllm_config))
        return _Calls(attn, backend.make_builder([attn], state))

    def plan(self, prefill: Any, starts: Tensor) -> None:
        """
        Build the metadata of a step's calls. Nothing waits for the device.

        Args:
            prefill: vLLM's metadata of the prefills.
            starts: ``(prefills + 1,)`` int32 on the CPU, where the tokens of each begin, from 0.

        Raises:
            ContractError: The lengths contradict the limits.
        """
        if self.made_in_pool is not None:
            self.load(*self.made_in_pool)
            self.made_in_pool = None
        on_device = prefill.query_start_loc[: starts.shape[0]]
        self._of_new = self._among_new.builder.build(_batch((on_device, starts), (on_device, starts), causal=True))
        chunks = _chunks_of(prefill.chunked_context, (on_device, starts))
        self._of_cached = [self._to_cached.builder.build(_batch(*each, causal=False)) for each in chunks]

    def run_prefill_new_tokens(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        return_softmax_lse: bool,  # noqa: FBT001 - vLLM's signature
        out: Tensor | None = None,
        output_scale: Tensor | None = None,
    ) -> Any:
        """
        Attend from new tokens to each other.

        Args:
            q: ``(tokens, heads, head_size)``.
            k: Likewise.
            v: ``(tokens, heads, head_size_v)``.
            return_softmax_lse: Whether the log-sum-exp is returned, too.
            out: Where the output is written; None allocates it.
            output_scale: None: vLLM quantizes the output itself, unless a backend says that it does.

        Returns:
            ``(tokens, heads, head_size_v)``; with `return_softmax_lse` a pair of that and ``(heads, tokens)``.
        """
        del output_scale
        output, lse = self._attend(self._among_new.attn, self._of_new, (q, k, v), out)
        return (output, lse) if return_softmax_lse else output

    def run_prefill_context_chunk(
        self,
        chunk_idx: Any = None,
        q: Any = None,
        k: Any = None,
        v: Any = None,
        *,
        chunk: Any = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """
        Attend from new tokens to a chunk of cached ones.

        Args:
            chunk_idx: The number of the chunk (before 0.32).
            q: ``(tokens, heads, head_size)``, of the requests that have cached tokens in the chunk from 0.32 on.
            k: ``(cached tokens, heads, head_size)``.
            v: ``(cached tokens, heads, head_size_v)``.
            chunk: The chunk (0.32 and later).
            out: As for `run_prefill_new_tokens`.

        Returns:
            ``(tokens, heads, head_size_v)``, and ``(heads, tokens)``: 0 and -inf of requests without cached tokens.
        """
        metadata = self._of_cached[chunk_idx if chunk is None else chunk.index]
        return self._attend(self._to_cached.attn, metadata, (q, k, v), out)

    def _attend(
        self, attn: Attention, metadata: Metadata, tensors: tuple[Tensor, Tensor, Tensor], out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        query, key, value = tensors
        tokens = query.shape[0]
        output = query.new_empty(tokens, self.num_heads, self.v_head_dim) if out is None else out
        lse = query.new_empty(self.num_heads, tokens, dtype=torch.float32)
        attn.forward(query, key, value, None, metadata, output.view(tokens, attn.output_width), lse=lse.T)
        return output, lse


def _batch(queries: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor], *, causal: bool) -> Batch:
    """Return a batch of contiguous keys, of where the queries and the keys of each request begin."""
    (query_starts, query_starts_cpu), (key_starts, key_starts_cpu) = queries, keys
    seq_lens_cpu = key_starts_cpu.diff()
    return Batch(
        query_start_loc=query_starts,
        query_start_loc_cpu=query_starts_cpu,
        key_start_loc=key_starts,
        key_start_loc_cpu=key_starts_cpu,
        seq_lens=seq_lens_cpu if key_starts.is_cpu else key_starts.diff(),
        seq_lens_cpu=seq_lens_cpu,
        num_reqs=query_starts.shape[0] - 1,
        num_actual_tokens=int(query_starts_cpu[-1]),
        max_query_len=int(query_starts_cpu.diff().max()),
        max_seq_len=int(seq_lens_cpu.max()),
        causal=causal,
    )


def _chunks_of(context: Any, queries: tuple[Tensor, Tensor]) -> Iterator[tuple[Any, Any]]:
    """Yield of each chunk of cached tokens where the queries and the keys of its requests begin."""
    if context is None:
        return
    if hasattr(context, "chunks"):  # 0.32 and later
        for chunk in context.chunks:
            starts = queries[1][chunk.request_slice.start : chunk.request_slice.stop + 1]
            yield (chunk.query_start_loc, starts - starts[0]), (chunk.cu_seq_lens, _starts_of(chunk.seq_lens))
        return
    for on_device, lens in zip(context.cu_seq_lens, context.seq_lens, strict=True):
        yield queries, (on_device, _starts_of(lens))


def _starts_of(lens: Tensor) -> Tensor:
    return torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))


def _choose(wanted: tuple[Requirements, ...], choice: facts.Choice) -> list[Selection]:
    """Return the decisions for prefills, or raise why attnplug does not serve them."""
    if getattr(facts.current_config().attention_config, "use_prefill_query_quantization", False):
        raise NotNegotiatedError(
            "use_prefill_query_quantization=True was given to vLLM",
            "attnplug attends to expanded keys in the dtype of the model",
            "leave it out of --attention-config",
        )
    return [facts.choose(each, choice) for each in wanted]


def _is_on_cpu() -> bool:
    """Whether vLLM has a prefill backend of its own, whatever is named."""
    return facts.platform_name() == "cpu"


def _check_slot() -> None:
    """Check that vLLM gets `LatentPrefill` for the slot of its registry."""
    member = MLAPrefillBackendEnum[SLOT]
    path = member.get_path() if member.is_overridden() else "no class"
    if path != PREFILL:
        raise NotNegotiatedError(
            f"vLLM's MLA prefill backend {SLOT} is {path}",
            f"attnplug registers {PREFILL} for it",
            "leave the plugin that registers another out of VLLM_PLUGINS",
        )


def _text_of(error: AttnplugError) -> str:
    return "; ".join(filter(None, (error.problem, error.expected, f"fix: {error.fix}")))


@cache
def _say(text: str) -> None:
    """Write once where vLLM prefills latents."""
    _log.info("%s", text)
