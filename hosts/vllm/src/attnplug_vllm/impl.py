"""One attention layer of vLLM, carried out by an implementation of attnplug."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from attrs import define
from vllm.v1.attention.backend import AttentionImpl

from attnplug.contract import Layer, Parallel
from attnplug.errors import CacheError, LayerError, NotNegotiatedError
from attnplug_vllm import facts
from attnplug_vllm.cache import bind_pool, enter_engine

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from attnplug import Requirements
    from attnplug.contract import Attention as Implementation
    from attnplug.contract import KVCache, LoadedBackend
    from attnplug_vllm.binding import SharedState
    from attnplug_vllm.builder import StepMetadata

_NO_POOL = object()
"""What a layer is bound to before its first step: no pool is identical to it."""


@define(eq=False)
class Binding:
    """
    What a layer is bound to when its builder is made.

    Attributes:
        backend: The loaded backend, the same object for all layers of one agreement.
        attn: The layer's implementation.
    """

    backend: LoadedBackend
    attn: Implementation


class BoundLayer:
    """
    A layer of vLLM. A decision is made when vLLM makes it; its builder, which knows the block size, binds it.

    Attributes:
        choice: The identifiers of the candidates that may be chosen; empty where attnplug decides.
        requirements: What the layer requests, its block size aside.
        selection: The decision.
        parallel: The ranks of tensor parallelism that the layer is on.
        binding: What the builder bound it to; None before.
        shared: The state that its builder shares with those of other layers; None before.
        sinks: ``(num_heads,)``, or None.
        alibi_slopes: One slope per head, or None.
        kv_sharing_target_layer_name: The layer whose KV cache it reads, or None.
    """

    choice: ClassVar[tuple[str, ...]] = ()

    scale: float
    head_size: int
    kv_cache_dtype: str
    sliding_window: int | None
    logits_soft_cap: float | None = None
    sinks: Tensor | None = None
    alibi_slopes: list[float] | None = None
    kv_sharing_target_layer_name: str | None = None
    dcp_world_size: int
    dcp_rank: int

    def decide(self, requirements: Requirements) -> None:
        """Decide for what the layer requests; nothing is bound yet."""
        self.requirements = requirements
        self.parallel = _tensor_parallel()
        self.selection = facts.choose(requirements, self.choice)
        self.binding: Binding | None = None
        self.shared: SharedState | None = None
        self._pool: object = _NO_POOL
        self._cache: KVCache | None = None
        self._backend: LoadedBackend | None = None
        self._attend: Any = None
        self._known_sinks: Tensor | None = None
        self._width = 0
        enter_engine(facts.current_config())

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.selection.id}, {self.binding and self.binding.attn.layer.name!r})"

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Take note of new weights: the next step reads the scales and the sinks of a bound layer again."""
        del act_dtype
        self._pool = _NO_POOL

    # --- what the builder calls ---

    def bind(self, binding: Binding) -> None:
        """Carry out the layer with an implementation; the pool is bound with the first step."""
        self.binding = binding
        self._backend = binding.backend
        self._width = binding.attn.output_width
        self._known_sinks = None if self.sinks is None else self.sinks.detach().clone()
        self._attend = binding.attn.forward if self.kv_sharing_target_layer_name is None else self._attend_to_target
        self._pool = _NO_POOL

    def take_pool(self, layer: Any, pool: Tensor) -> None:
        """
        Bind the layer's pool, and take over scales and sinks that have changed.

        Raises:
            CacheError: It does not fit.
            ContractError: A captured graph has the former values, or a value is wrong.
        """
        binding = self._bound()
        update_scales(binding.attn, layer)
        if self.sinks is not None:
            self._renew_sinks(binding.attn, self.sinks.detach())
        if binding.attn.is_paged:
            owner = binding.attn if self.kv_sharing_target_layer_name is None else None
            self._cache = bind_pool(pool, binding.backend, owner)
        self._pool = pool

    def release(self) -> None:
        """Forget the pool and the state, whose memory vLLM frees with the builder."""
        self._pool, self._cache, self.shared = _NO_POOL, None, None

    # --- machinery ---

    def _attend_to_target(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, cache: Any, metadata: Any, output: Tensor
    ) -> None:
        """Attend to the KV cache of an earlier layer, whose K/V are there already."""
        del key, value
        self._bound().attn.forward(query, None, None, cache, metadata, output)

    def _renew_sinks(self, attn: Implementation, sinks: Tensor) -> None:
        """Let an implementation derive again what it derived from the sinks, if they were loaded again, in place."""
        if self._known_sinks is not None and torch.equal(sinks, self._known_sinks):
            return
        if self.shared is not None and self.shared.state.graphs:
            raise LayerError(
                f"layer {attn.layer.name!r} was given other sinks by new weights",
                "captured graphs may have what was derived from the former ones, and would go on with it",
                "start vLLM again with the new weights, or with --enforce-eager",
            )
        attn.wrapped.parameters_changed()
        self._known_sinks = sinks.clone()

    def _bound(self) -> Binding:
        if self.binding is None:
            raise LayerError(
                f"a layer on {self.selection.id} was called with metadata of a step",
                "vLLM makes a metadata builder for each group of layers before it runs a step",
                "run the model through vLLM's model runner",
            )
        return self.binding


class LayerImpl(BoundLayer, AttentionImpl):  # type: ignore[misc]  # vLLM is no dependency, and untyped here
    """One layer with keys and values per head."""

    # Backends merge the ranks' parts themselves; vLLM refuses decode context parallelism for layers that say no.
    can_return_lse_for_decode = True
    supports_dcp = True

    def __init__(  # noqa: PLR0913, PLR0917 - vLLM's signature
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        use_alibi_sqrt: bool = False,  # noqa: FBT001, FBT002 - vLLM's signature
        block_sparse: Mapping[str, Any] | None = None,
        **further: Any,
    ) -> None:
        _refuse_further({name: value for name, value in further.items() if value is not None})
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.alibi_slopes = alibi_slopes
        self.sliding_window = sliding_window
        self.kv_cache_dtype = kv_cache_dtype
        self.logits_soft_cap = logits_soft_cap or None  # some models pass 0 for none
        self.attn_type = facts.text_of(attn_type)
        if self.attn_type == "encoder_decoder":
            _refuse_cross_attention()
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        requirements = facts.layer_requirements(
            head_size=head_size,
            dtype=torch.get_default_dtype(),
            num_q_heads=num_heads,
            num_kv_heads=self.num_kv_heads,
            kv_cache_dtype=kv_cache_dtype,
            sliding_window=sliding_window,
            logits_soft_cap=self.logits_soft_cap,
            attn_type=attn_type,
            alibi=None if alibi_slopes is None else "sqrt" if use_alibi_sqrt else "linear",
            sinks=sinks is not None,
            kv_sharing=kv_sharing_target_layer_name is not None,
            block_sparse=block_sparse,
            **facts.engine_fields(),
        )
        self.decide(requirements)

    def forward(  # noqa: PLR0913, PLR0917 - vLLM's signature
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: StepMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """
        Attend, and write the K/V of the step into the KV cache.

        Args:
            layer: vLLM's layer, with the quantization scales.
            query: ``(tokens, num_heads, head_size)``, padded rows included.
            key: ``(tokens, num_kv_heads, head_size)``, None where nothing is written.
            value: ``(tokens, num_kv_heads, head_size_v)``, likewise.
            kv_cache: The layer's pool, the same object in every step.
            attn_metadata: What the builder returned; None in a profiling run, which fills the output with zeros.
            output: ``(tokens, num_heads, head_size_v)``, written in place.
            output_scale: None: a quantized output is refused.
            output_block_scale: Likewise.

        Raises:
            NotNegotiatedError: The output is to be quantized.
            ContractError: The pool does not fit, or a tensor does not.
        """
        if attn_metadata is None:
            return output.zero_()
        if kv_cache is not self._pool or output_scale is not None or output_block_scale is not None:
            if self.binding is None and getattr(attn_metadata, "late", None) is not None:
                attn_metadata.bind(self, layer, query, kv_cache)
            self._prepare(layer, kv_cache, output_scale, output_block_scale)
        self._attend(query, key, value, self._cache, attn_metadata.parts[self._backend], output.view(-1, self._width))
        return output

    # --- machinery ---

    def _prepare(self, layer: Any, pool: Tensor, *output_scales: Tensor | None) -> None:
        """Do what a call does not have to do again: bind the pool, and read scales that have changed."""
        attn = self._bound().attn
        if any(scale is not None for scale in output_scales):
            raise NotNegotiatedError(
                f"layer {attn.layer.name!r} was given the scale of a quantized output",
                "vLLM fuses the quantization of an output into attention where a backend says that it supports that",
                "set fuse_attn_quant=False in vLLM's pass_config",
            )
        if attn.is_paged and not pool.numel():
            raise CacheError(
                f"layer {attn.layer.name!r} was given metadata of a step, and no KV cache",
                "vLLM binds a pool to each layer before it runs a step",
                "run the model through vLLM's model runner",
            )
        self.take_pool(layer, pool)


def _tensor_parallel() -> Parallel:
    """Return the ranks of the model whose layers vLLM is making: a drafter may have other ranks than its target."""
    config = facts.current_config()
    size = 1 if config is None else config.parallel_config.tensor_parallel_size
    if size == 1:
        return Parallel()
    from vllm.distributed import parallel_state  # noqa: PLC0415 - needs vLLM's process groups

    return Parallel(tp_size=size, tp_rank=parallel_state.get_tensor_model_parallel_rank())


def _refuse_further(further: Mapping[str, Any]) -> None:
    if further:
        raise NotNegotiatedError(
            f"vLLM's layer has {', '.join(f'{name}={value!r}' for name, value in further.items())}",
            "attnplug has no feature of that name",
            "leave --attention-backend out for this model: vLLM then chooses one of its own",
        )


def _refuse_cross_attention() -> None:
    raise NotNegotiatedError(
        "vLLM's layer has attn_type='encoder_decoder'",
        "attnplug-vllm does not serve cross attention: vLLM replaces a decoder's lengths by those of the encoder",
        "leave --attention-backend out for this model: vLLM then chooses one of its own",
    )


@cache
def make_impl_class(choice: tuple[str, ...] = ()) -> type[LayerImpl]:
    """
    Return the class of the layers of a choice.

    Args:
        choice: The identifiers of the candidates that may be chosen; empty leaves it to attnplug and its settings.
    """
    return type("AttnplugImpl", (LayerImpl,), {"choice": choice, "__module__": __name__})


def contract_layer(impl: BoundLayer, layer: Any, name: str, backend: LoadedBackend) -> Layer:
    """
    Return a layer of the contract, with the learned tensors of vLLM's, after its weights are loaded.

    Args:
        impl: The layer's implementation in vLLM.
        layer: vLLM's layer.
        name: Its name.
        backend: Its backend.
    """
    slopes = None
    if impl.alibi_slopes is not None:
        slopes = torch.as_tensor(impl.alibi_slopes, dtype=torch.float32, device=backend.device).detach()
    return Layer(
        name=name,
        scale=impl.scale,
        sliding_window=impl.sliding_window,
        logits_soft_cap=impl.logits_soft_cap,
        alibi_slopes=slopes,
        sinks=None if impl.sinks is None else impl.sinks.detach(),
        kv_sharing_target=impl.kv_sharing_target_layer_name,
        parallel=impl.parallel,
        **scales_of(layer, backend),
    )


def scales_of(layer: Any, backend: LoadedBackend) -> dict[str, Any]:
    """
    Return the quantization scales of vLLM's layer that its backend applies, as fields of `Layer`.

    A scale of keys or values other than 1 that it does not apply is returned too: the contract refuses it.
    """
    if not backend.agreement.kv_cache_dtype.startswith("fp8"):
        return {}
    found: dict[str, Any] = {}
    for letter in "qkv":
        scale = getattr(layer, f"_{letter}_scale").detach()
        applied = letter in backend.impl_class.static_scales
        if applied or (letter != "q" and bool((scale != 1).any())):
            found[f"{letter}_scale_tensor"] = scale
    return found


def update_scales(attn: Implementation, layer: Any) -> None:
    """
    Give an implementation the scales that vLLM's layer has now, if they are others.

    Raises:
        ContractError: A captured graph has the former ones, or a value is wrong.
    """
    changed: dict[str, Any] = {}
    for name, scale in scales_of(layer, attn.backend).items():
        former = getattr(attn.layer, name)
        if _differs(former, scale, getattr(attn.layer, name.removesuffix("_tensor"))):
            in_place = former is not None and former.data_ptr() == scale.data_ptr()
            changed[name] = former if in_place else scale  # graphs may go on with a tensor that was changed in place
    if changed:
        attn.update_scales(**changed)


def _differs(former: Tensor | None, scale: Tensor, host: float | None) -> bool:
    """Whether a scale changed: a new tensor with other values, or the same tensor modified in place."""
    if former is None or not torch.equal(former.flatten(), scale.flatten().to(former.device)):
        return True
    return former.numel() == 1 and host is not None and abs(host - float(scale)) > 1e-6 * host
