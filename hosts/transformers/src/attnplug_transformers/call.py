"""One attention call of the library: its tensors, its signature, and the arguments that are refused."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from attrs import frozen
from transformers.utils import output_capturing

from attnplug.errors import NotNegotiatedError, TensorError
from attnplug.request import Requirements

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from attnplug.models import ModelLayer
    from attnplug_transformers.mask import LazyMask

_Function = TypeVar("_Function", bound=Callable[..., Any])

_EAGER: Final = "use attn_implementation='eager' for this model"
_ONE_PER_ROW: Final = "pass one sequence per row, with a two-dimensional padding mask"
_PACKED: Final = ("sequences packed into one row are not the negotiated attention", _ONE_PER_ROW)
_PAGED: Final = ("the dense function does not support the paged KV caches of continuous batching", "use generate()")

NO_FULLGRAPH: Final = (
    "attnplug does not support torch.compile(fullgraph=True) of a transformers model yet; "
    "call torch.compile without fullgraph=True, which breaks the graph around the attention, or run without it"
)

HARMLESS: Final[dict[str, str]] = {
    "position_ids": "rotary embeddings were applied before the call; samples packed into its only row are separated",
    "cache_position": "it is where the KV cache was written, which happened before the call",
    "use_cache": "each call has all keys, cached or not",
    "past_key_values": "each call has all keys, those of the KV cache included",
    "output_hidden_states": "hidden states are collected by the layers",
    "output_router_logits": "router logits are collected by the experts",
    "return_dict": "it shapes the model's output",
    "logits_to_keep": "it trims the model's output",
    "num_items_in_batch": "it scales the loss",
    "labels": "they are used by the loss",
    "token_type_ids": "they were embedded; attention that depends on them shows in the mask",
    "mm_token_type_ids": "attention that depends on them shows in the mask",
    "layer_idx": "the module has its own number",
}
"""Argument -> why ignoring it loses nothing."""

REFUSED: Final[dict[str, tuple[str, str]]] = {
    "output_attentions": (
        "no backend returns the attention weights",
        "use attn_implementation='eager' where the weights are needed",
    ),
    "position_bias": ("a bias on the scores was not negotiated", _EAGER),
    "indices": ("a choice of keys per query was not negotiated", _EAGER),
    "block_indices": ("a choice of key blocks per query was not negotiated", _EAGER),
    "sinks": ("sinks are passed as s_aux, one logit per head", _EAGER),
    "head_mask": ("scaling heads of the attention weights was not negotiated", _EAGER),
    "cache": _PAGED,
    "block_table": _PAGED,
    "cu_seq_lens_q": _PACKED,
    "cu_seq_lens_k": _PACKED,
    "max_length_q": _PACKED,
    "max_length_k": _PACKED,
    "seq_idx": _PACKED,
    "deterministic": ("the order of summation of a backward pass is outside this contract", "leave it out"),
}
"""Argument -> why it is refused where it is set, and the fix."""


def check_arguments(dropout: float, rest: Mapping[str, Any], layer: str) -> None:
    """
    Refuse arguments that would otherwise be ignored.

    Args:
        dropout: Probability of dropping an attention weight.
        rest: The keyword arguments that the attention function has no parameter for.
        layer: The layer, for the message.

    Raises:
        NotNegotiatedError: One of them changes the attention. None and False change nothing.
    """
    if dropout:
        raise NotNegotiatedError(
            f"{layer}: dropout={dropout} was given",
            "attention dropout is a training feature",
            "call model.eval() first",
        )
    for name, value in rest.items():
        if name in HARMLESS or value is None or value is False:
            continue
        because, fix = REFUSED.get(name, ("this argument is unknown", "leave it out, or " + _EAGER))
        shape = getattr(value, "shape", None)
        shown = repr(value) if shape is None else f"<{type(value).__name__} of shape {tuple(shape)}>"
        raise NotNegotiatedError(f"{layer}: {name}={shown} was given", because, fix)


def check_outputs(module: nn.Module) -> None:
    """
    Refuse attention weights that the model's caller requested.

    transformers collects them with hooks, and half of its models pass ``output_attentions`` no further: what the
    collector waits for shows the request in all of them, whether an argument or the configuration made it.

    Args:
        module: The attention module, for the message.

    Raises:
        NotNegotiatedError: They were requested.
    """
    collector: Any = output_capturing._active_collector  # noqa: SLF001 - the library has no public name for it
    collected = collector.get()
    if collected and any(name.endswith("attentions") for name in collected):
        found = f"{module_name(module)}: output_attentions=True was given"
        raise NotNegotiatedError(found, *REFUSED["output_attentions"])


def module_name(module: nn.Module) -> str:
    """Return the name of an attention module for messages: its class, and its number where it has one."""
    index = getattr(module, "layer_idx", None)
    return type(module).__name__ if index is None else f"{type(module).__name__} {index}"


def tensor_version(tensor: Tensor | None) -> int:
    """Return the count of in-place changes, since a reloaded weight keeps its tensor; inference tensors have none."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version  # noqa: SLF001 - torch has no public name for it


def uncompiled(function: _Function) -> _Function:
    """Exclude a function from torch.compile, with a reason for fullgraph=True where this torch takes one."""
    disable: Any = torch.compiler.disable
    takes_reason = "reason" in inspect.signature(disable).parameters
    excluded: _Function = disable(function, reason=NO_FULLGRAPH) if takes_reason else disable(function)
    return excluded


@frozen
class CallSignature:
    """
    What of a call is not a tensor.

    Attributes:
        num_q_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_size: Size of a query head.
        head_size_v: Size of a value head.
        dtype: Dtype of the query, as `Requirements` names it.
        sliding_window: The argument; where it is None the mask may still have a window.
        softcap: The argument.
        sinks: Whether sinks were passed.
        is_causal: The argument; None leaves it to the module.
        is_cross: Whether keys and queries are of different sequences, as far as the call shows.
    """

    num_q_heads: int
    num_kv_heads: int
    head_size: int
    head_size_v: int
    dtype: str
    sliding_window: int | None
    softcap: float | None
    sinks: bool
    is_causal: bool | None
    is_cross: bool

    def requirements(self, module: nn.Module) -> Requirements:
        """Return what the call requires, where the configuration does not describe the layer."""
        causal = bool(getattr(module, "is_causal", True)) if self.is_causal is None else self.is_causal
        return Requirements(
            head_size=self.head_size,
            num_q_heads=self.num_q_heads,
            num_kv_heads=self.num_kv_heads,
            head_size_v=self.head_size_v,
            dtype=self.dtype,
            sliding_window=self.sliding_window,
            logits_soft_cap=self.softcap,
            sinks=self.sinks,
            attn_type="decoder" if causal else "encoder_decoder" if self.is_cross else "encoder_only",
            paged=False,
        )

    def narrow(self, layer: ModelLayer) -> Requirements:
        """
        Return the layer's requirements with the dtype of this call, and the heads of its tensor-parallel rank.

        Raises:
            NotNegotiatedError: The call differs from the model's configuration.
        """
        configured = layer.requirements
        ranks = max(1, configured.num_q_heads // self.num_q_heads)
        window = configured.sliding_window if self.sliding_window is None else self.sliding_window
        causal = configured.causal if self.is_causal is None else self.is_causal
        for what, found, expected in (
            ("head_size", self.head_size, configured.head_size),
            ("head_size of the values", self.head_size_v, configured.head_size_v),
            ("softcap", self.softcap, configured.logits_soft_cap),
            ("sinks (s_aux)", self.sinks, configured.sinks),
            ("sliding_window", window, configured.sliding_window),
            ("is_causal", causal, configured.causal),
            ("query heads", self.num_q_heads * ranks, configured.num_q_heads),
            ("key and value heads", self.num_kv_heads, max(1, configured.num_kv_heads // ranks)),
        ):
            if found != expected:
                raise NotNegotiatedError(
                    f"{layer.name}: the call has {what} {found}",
                    f"by the model's configuration it is {expected}, and the backend was chosen for that",
                    "build the model from the configuration that it runs with, or use attn_implementation='eager'",
                )
        return configured.evolve(
            dtype=self.dtype, kv_cache_dtype="auto", num_q_heads=self.num_q_heads, num_kv_heads=self.num_kv_heads
        )


@frozen(eq=False)
class AttentionCall:
    """
    One call of a model's attention.

    Attributes:
        module: The attention module.
        query: ``(batch, num_q_heads, queries, head_size)``.
        key: ``(batch, num_kv_heads, keys, head_size)``.
        value: ``(batch, num_kv_heads, keys, head_size_v)``.
        mask: What a mask function of this package returned; or a mask of the caller; or None.
        scale: Factor of the scores; None is ``head_size ** -0.5``.
        sinks: ``(num_q_heads,)``.
        signature: What of the call is not a tensor.
        positions: ``(1, queries)`` positions of a call of one row and several queries; None for other calls.
        indices: ``(queries, topk)`` int32 slots of the cached tokens that an indexer has selected; None for all.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | LazyMask | None
    scale: float | None
    sinks: Tensor | None
    signature: CallSignature
    positions: Tensor | None = None
    indices: Tensor | None = None

    @classmethod
    def of(  # noqa: PLR0913, PLR0917 - the library's signature of an attention function
        cls,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | LazyMask | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,  # noqa: FBT001 - the library's signature
        s_aux: Tensor | None = None,
        **rest: Any,
    ) -> AttentionCall:
        """
        Return the call of an attention function with these arguments, which are those of the library.

        Args:
            module: The attention module.
            query: ``(batch, num_q_heads, queries, head_size)``.
            key: ``(batch, num_kv_heads, keys, head_size)``.
            value: ``(batch, num_kv_heads, keys, head_size_v)``.
            attention_mask: The mask.
            dropout: Probability of dropping an attention weight, which has to be 0.
            scaling: Factor of the scores; None is ``head_size ** -0.5``.
            sliding_window: Tokens that a token attends to, itself included.
            softcap: Scores become ``cap * tanh(score / cap)``.
            is_causal: Whether tokens attend to no later ones; None leaves it to the module.
            s_aux: ``(num_q_heads,)`` attention sinks.
            rest: Other arguments: see `HARMLESS` and `REFUSED`.

        Raises:
            NotNegotiatedError: An argument would be ignored, or gradients are recorded.
            TensorError: The tensors have other shapes.
        """
        name = module_name(module)
        check_arguments(dropout, rest, name)
        shapes = (query.shape, key.shape, value.shape)
        if any(len(shape) != 4 for shape in shapes) or key.shape[:3] != value.shape[:3] or len(query) != len(key):
            raise TensorError(
                f"{name}: query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} were given",
                "they are (batch, heads, tokens, size), with as many keys as values",
                "use attn_implementation='eager' for a model that calls attention otherwise",
            )
        if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
            raise NotNegotiatedError(
                f"{name}: gradients are recorded through this call",
                "contract 1.0 has no backward pass",
                "call the model under torch.no_grad() or torch.inference_mode(), or train with"
                " attn_implementation='sdpa'",
            )
        signature = CallSignature(
            num_q_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_size=query.shape[3],
            head_size_v=value.shape[3],
            dtype=str(query.dtype).removeprefix("torch."),
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=s_aux is not None,
            is_causal=is_causal,
            is_cross="Cross" in type(module).__name__ or query.shape[2] > key.shape[2],
        )
        positions = rest.get("position_ids")
        if positions is not None and (query.shape[2] == 1 or positions.shape != (1, query.shape[2]) or len(query) > 1):
            positions = None
        return cls(module, query, key, value, attention_mask, scaling, s_aux, signature, positions)
