"""Settles what is open until a builder is made: block size, form, layout, limits, ranks; and loads the backends."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import define, evolve, field
from vllm.v1.attention.backend import AttentionMetadataBuilder

from attnplug.contract import Limits
from attnplug.errors import NotNegotiatedError
from attnplug_vllm import advice, facts, pages
from attnplug_vllm.cache import ORDERS, check_pool, layers_of, resolved_terms, terms_of
from attnplug_vllm.impl import Binding, BoundLayer, contract_layer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnplug import Selection
    from attnplug.contract import Attention, Captures, LoadedBackend, Parallel
    from attnplug_vllm.cache import Terms


_KINDS: Final = ("FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec")
_LATENT_KINDS: Final = ("MLAAttentionSpec",)
"""The classes of vLLM's descriptions of pools that are served."""


@define(eq=False)
class SharedState:
    """
    The state that builders of one backend and variant share.

    Groups of layers share workspace and graph buffers. A second builder of a layer, for a microbatch or after a
    profiling run, gets another state: graphs may still hold the first one.

    Attributes:
        state: The state.
        layers: The names of the layers that have a builder.
    """

    state: Captures
    layers: set[str] = field(factory=set)


def is_full_graph(config: Any) -> bool:
    """Whether vLLM captures attention in CUDA graphs."""
    mode = config.compilation_config.cudagraph_mode
    return mode is not None and mode.has_full_cudagraphs()


def order_of(config: Any, terms: tuple[Terms, ...]) -> str | None:
    """Return the name of the order of memory that vLLM has resolved, None before 0.32, which has layouts only."""
    try:
        order: str | None = config.cache_config.kv_cache_layout
    except AttributeError:
        return None
    return ORDERS[terms[0]][0] if order is None else order


def settle(impl: BoundLayer, layer: Any, spec: Any, config: Any) -> Selection:
    """
    Return the decision for a layer with nothing left to bind. It is for the candidate that was decided on.

    Args:
        impl: The layer's implementation in vLLM.
        layer: vLLM's layer.
        spec: vLLM's description of its pool, with the block size of the kernels.
        config: vLLM's configuration.

    Raises:
        NotNegotiatedError: The candidate refuses the block size, or vLLM's description is of another attention.
        NoBackendError: It refuses what only the layer says: the size of its values, or scales per head.
    """
    if not impl.requirements.paged:
        return impl.selection
    own = (impl.selection.id,)
    if impl.requirements.latent:
        _check_kind(spec, _LATENT_KINDS)
        return facts.select(impl.selection.requirements, own).bind(block_size=spec.block_size)
    _check_kind(spec, _KINDS)
    terms = terms_of(layers_of(impl.choice, config) or [impl])
    form, kv_layout = resolved_terms(order_of(config, terms), terms)
    changes: dict[str, Any] = {"kv_cache_form": form, "kv_layout": kv_layout}
    if getattr(spec, "non_causal", False):  # vLLM says so in each batch, too
        changes |= {"causal": False, "mm_prefix": False}
    if getattr(layer, "head_size_v", impl.head_size) != impl.head_size:
        changes["head_size_v"] = layer.head_size_v
    if layer._k_scale.numel() > 1:  # noqa: SLF001 - vLLM keeps a layer's scales there
        changes["per_head_scales"] = True
    if getattr(config.cache_config, "calculate_kv_scales", False) and impl.kv_cache_dtype.startswith("fp8"):
        raise NotNegotiatedError(
            "calculate_kv_scales=True was given to vLLM",
            "scales are known before CUDA graphs are captured and before anything is in the KV cache",
            "leave --calculate-kv-scales out: scales are then those of the checkpoint, or 1",
        )
    requested = impl.selection.requirements.evolve(**changes)
    if _may_cascade(config) and not facts.reasons(requested.evolve(cascade=True), own):
        requested = requested.evolve(cascade=True)
    return facts.select(requested, own).bind(block_size=spec.block_size)


def _check_kind(spec: Any, kinds: tuple[str, ...]) -> None:
    """Check that a pool is of attention that is served here: vLLM's selector does not say what some layers add."""
    kind = type(spec).__name__
    if kind not in kinds:
        raise NotNegotiatedError(
            f"vLLM describes the KV cache of these layers as {kind}",
            f"attnplug-vllm serves {', '.join(kinds)}: other kinds have masks or keys that no batch shows it",
            advice.OWN,
        )


def _may_cascade(config: Any) -> bool:
    """Whether vLLM looks for prefixes that all requests share; later versions do not."""
    return hasattr(AttentionMetadataBuilder, "use_cascade_attention") and not config.model_config.disable_cascade_attn


def load(selection: Selection, spec: Any, config: Any) -> LoadedBackend:
    """
    Return the backend of a decision: that of another layer of the model where the agreement is the same.

    Raises:
        CacheError: The pool that vLLM is about to make does not fit.
        PluginError: The plugin fails.
    """
    for impl in impls_of(config):
        if impl.binding is not None and impl.binding.backend.agreement == selection.agreement:
            return impl.binding.backend
    backend = selection.load()
    if selection.requirements.paged:
        terms = (str(selection.agreement.kv_cache_form), str(selection.agreement.kv_layout))
        check_pool(spec, order_of(config, (terms,)), backend)
    return backend


def bind(impl: BoundLayer, layer: Any, name: str, backend: LoadedBackend) -> Attention:
    """
    Return the implementation of a layer, made once for an agreement.

    Raises:
        ContractError: A learned tensor of the layer does not fit.
    """
    if impl.binding is None or impl.binding.backend is not backend:
        attn = backend.make_impl(contract_layer(impl, layer, name, backend))
        if pages.in_pages(impl.requirements) and impl.kv_sharing_target_layer_name is None:
            backend.make_cache(2, "meta", impl=attn)  # a calibration that is missing is missed here, not in a step
        impl.bind(Binding(backend, attn))
    assert impl.binding is not None  # noqa: S101 - for the type checker
    return impl.binding.attn


def impls_of(config: Any) -> list[BoundLayer]:
    """Return the layers of a model that attnplug carries out."""
    layers: Mapping[str, Any] = config.compilation_config.static_forward_context
    impls = (getattr(layer, "impl", None) for layer in layers.values())
    return [impl for impl in impls if isinstance(impl, BoundLayer)]


def share_state(backend: LoadedBackend, impls: Mapping[str, BoundLayer], spec: Any, config: Any) -> Captures:
    """
    Return the state for a builder of these layers, by name: that of builders of other layers, or a new one.

    Raises:
        LimitsError: The limits contradict the agreement.
    """
    limits = limits_of(backend, spec, config)
    for shared in dict.fromkeys(impl.shared for impl in impls_of(config) if impl.shared is not None):
        state = shared.state
        if state.backend.id == backend.id and state.limits == limits and shared.layers.isdisjoint(impls):
            break
    else:
        shared = SharedState(backend.make_state(limits, parallel_of(config, next(iter(impls.values())))))
    shared.layers.update(impls)
    for impl in impls.values():
        impl.shared = shared
    return shared.state


def limits_of(backend: LoadedBackend, spec: Any, config: Any) -> Limits:
    """
    Return the most that vLLM's batches need.

    Drafts add tokens and lengths to those of the scheduler. Chunked-local attention turns each chunk of a request into
    a request.
    """
    scheduler, requested = config.scheduler_config, backend.agreement.requirements
    drafts = getattr(config.speculative_config, "num_speculative_tokens", None) or 0
    reqs, tokens = scheduler.max_num_seqs, scheduler.max_num_batched_tokens + drafts * scheduler.max_num_seqs
    chunk = getattr(spec, "attention_chunk_size", None)
    if chunk:
        reqs = min(tokens, 2 * reqs + tokens // chunk)
    sizes: tuple[int, ...] = ()
    if is_full_graph(config) and backend.agreement.cudagraph != "never" and requested.paged:
        sizes = tuple(n for n in config.compilation_config.cudagraph_capture_sizes or () if n <= tokens)
    splits = getattr(getattr(config, "attention_config", None), "flash_attn_max_num_splits_for_cuda_graph", None)
    return Limits(
        max_num_reqs=reqs,
        max_num_tokens=tokens,
        max_seq_len=config.model_config.max_model_len + drafts,
        capture_sizes=sizes,
        max_num_splits=splits if sizes and backend.supports_max_num_splits else None,
    )


def parallel_of(config: Any, impl: BoundLayer) -> Parallel:
    """Return the ranks that share the model."""
    if impl.requirements.latent or impl.dcp_world_size == 1:
        return impl.parallel
    from vllm.distributed import parallel_state  # noqa: PLC0415 - needs vLLM's process groups

    return evolve(
        impl.parallel,
        dcp_rank=impl.dcp_rank,
        dcp_size=impl.dcp_world_size,
        dcp_interleave=config.parallel_config.cp_kv_cache_interleave_size,
        dcp_group=parallel_state.get_dcp_group().device_group,
    )
