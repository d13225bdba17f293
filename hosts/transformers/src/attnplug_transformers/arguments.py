"""Every argument that transformers may hand to an attention function: used, harmless for a reason, or refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnplug.errors import NotNegotiatedError

if TYPE_CHECKING:
    from collections.abc import Mapping

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
