"""What one attention call brings, and whether it is what the model's configuration says of the layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch
from attrs import frozen

from attnplug.errors import NotNegotiatedError
from attnplug.request import Requirements

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor, nn

    from attnplug.models import ModelLayer


@frozen
class CallSignature:
    """
    The facts of a call, tensor-free.

    Attributes:
        num_q_heads: Query heads given.
        num_kv_heads: Key and value heads given.
        head_size: Size of a query head.
        head_size_v: Size of a value head.
        dtype: Dtype of the query, in the words of `Requirements`.
        sliding_window: The window handed over; None where none was, though the mask may have one.
        softcap: The soft cap handed over.
        sinks: Whether sinks were handed over.
        is_causal: What the caller said; None where it said nothing.
        is_cross: Whether keys and queries are different sequences, as far as the call tells.
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

    @classmethod
    def of(
        cls,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        sliding_window: int | None,
        softcap: float | None,
        sinks: bool,
        is_causal: bool | None,
    ) -> CallSignature:
        """Return the facts of ``(batch, heads, tokens, size)`` tensors and of what came with them."""
        return cls(
            num_q_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            head_size=query.shape[3],
            head_size_v=value.shape[3],
            dtype=str(query.dtype).removeprefix("torch."),
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
            is_causal=is_causal,
            is_cross="Cross" in type(module).__name__ or query.shape[2] > key.shape[2],
        )

    def requirements(self, module: nn.Module) -> Requirements:
        """Return what the call alone asks for, where the configuration says nothing; the mask is held against it."""
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

    def agree(self, layer: ModelLayer) -> Requirements:
        """
        Return the layer's requirements as this call has them: its dtype, and the heads of this tensor-parallel rank.

        Raises:
            NotNegotiatedError: The call brings something else than the configuration says.
        """
        asked = layer.requirements
        self._compare(layer.name, "head_size", self.head_size, asked.head_size)
        self._compare(layer.name, "head_size of the values", self.head_size_v, asked.head_size_v)
        self._compare(layer.name, "softcap", self.softcap, asked.logits_soft_cap)
        self._compare(layer.name, "sinks (s_aux)", self.sinks, asked.sinks)
        if self.sliding_window is not None:
            self._compare(layer.name, "sliding_window", self.sliding_window, asked.sliding_window)
        if self.is_causal is not None:
            self._compare(layer.name, "is_causal", self.is_causal, asked.causal)
        ranks = max(1, asked.num_q_heads // self.num_q_heads)
        self._compare(layer.name, "query heads", self.num_q_heads * ranks, asked.num_q_heads)
        self._compare(layer.name, "key and value heads", self.num_kv_heads, max(1, asked.num_kv_heads // ranks))
        return asked.evolve(
            dtype=self.dtype, kv_cache_dtype="auto", num_q_heads=self.num_q_heads, num_kv_heads=self.num_kv_heads
        )

    def _compare(self, layer: str, what: str, brought: object, layer_of_module: object) -> None:
        if brought != layer_of_module:
            raise NotNegotiatedError(
                f"{layer}: the call brings {what} {brought}",
                f"by the model's configuration it is {layer_of_module}, and the backend was chosen for that",
                "build the model from the configuration that it runs with, or use attn_implementation='eager'",
            )


HARMLESS: Final[dict[str, str]] = {
    "position_ids": "rotary embeddings were applied before the call; sequences packed by position show in the mask",
    "cache_position": "it says where the cache was written, which happened before the call",
    "use_cache": "the keys come whole with each call, cached or not",
    "past_key_values": "the keys in it come whole with each call",
    "output_hidden_states": "hidden states are collected by the layers",
    "output_router_logits": "router logits are collected by the experts",
    "return_dict": "it shapes the model's output",
    "logits_to_keep": "it trims the model's output",
    "num_items_in_batch": "it scales the loss",
    "labels": "they make the loss",
    "token_type_ids": "they were embedded; attention that depends on them shows in the mask",
    "mm_token_type_ids": "attention that depends on them shows in the mask",
    "layer_idx": "the module knows its own number",
}
"""Name -> why nothing is lost when it is not looked at."""

_ONE_PER_ROW: Final = "pass one sequence per row, with a two-dimensional padding mask"
_EAGER: Final = "use attn_implementation='eager' for this model"

REFUSED: Final[dict[str, tuple[str, str]]] = {
    "output_attentions": (
        "no backend returns the attention weights",
        "use attn_implementation='eager' where the weights are needed",
    ),
    "position_bias": ("a bias on the scores was not negotiated", _EAGER),
    "indices": ("a choice of keys per query was not negotiated", _EAGER),
    "block_indices": ("a choice of key blocks per query was not negotiated", _EAGER),
    "sinks": ("sinks come as s_aux, one logit per head", _EAGER),
    "head_mask": ("scaling heads of the attention weights was not negotiated", _EAGER),
    "cache": ("paged caches of continuous batching are not served by the dense function", "generate with generate()"),
    "block_table": (
        "paged caches of continuous batching are not served by the dense function",
        "generate with generate()",
    ),
    "cu_seq_lens_q": ("sequences packed into one row are another attention than the negotiated one", _ONE_PER_ROW),
    "cu_seq_lens_k": ("sequences packed into one row are another attention than the negotiated one", _ONE_PER_ROW),
    "max_length_q": ("sequences packed into one row are another attention than the negotiated one", _ONE_PER_ROW),
    "max_length_k": ("sequences packed into one row are another attention than the negotiated one", _ONE_PER_ROW),
    "seq_idx": ("sequences packed into one row are another attention than the negotiated one", _ONE_PER_ROW),
    "deterministic": ("the order of summation of a backward pass is not this contract's", "leave it out"),
}
"""Name -> why it is refused where it is set, and the fix."""


def check_arguments(dropout: float, rest: Mapping[str, Any], layer: str) -> None:
    """
    Refuse what would otherwise be lost.

    Args:
        dropout: Probability of dropping an attention weight.
        rest: The keyword arguments that the attention function has no parameter for.
        layer: The layer, for the message.

    Raises:
        NotNegotiatedError: One of them asks for something. None and False ask for nothing.
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
        because, fix = REFUSED.get(name, ("nothing here knows what it asks for", "drop it, or " + _EAGER))
        raise NotNegotiatedError(f"{layer}: {name}={_shown(value)} was given", because, fix)


def _shown(value: object) -> str:
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else f"<{type(value).__name__} of shape {tuple(shape)}>"


_Function = TypeVar("_Function", bound=Callable[..., Any])

REASON: Final = (
    "attnplug does not support torch.compile(fullgraph=True) of a transformers model yet; "
    "call torch.compile without fullgraph=True, which breaks the graph around the attention, or run without it"
)


def uncompiled(function: _Function) -> _Function:
    """Keep torch.compile out of a function. Who asks for one graph is told why there is none, where torch can say."""
    disable: Any = torch.compiler.disable
    says_why = "reason" in inspect.signature(disable).parameters
    kept_out: _Function = disable(function, reason=REASON) if says_why else disable(function)
    return kept_out


def tensor_version(tensor: Tensor | None) -> int:
    """Count of in-place changes: weights that are loaded again keep their tensor. Inference tensors do not count."""
    return 0 if tensor is None or tensor.is_inference() else tensor._version  # noqa: SLF001 - torch has no public name for it
