"""The attention function of the engine: it asks the step that the model is called with."""

from __future__ import annotations

from typing import Any, Final, Protocol

import torch
from attrs import frozen
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from attnplug.errors import NotNegotiatedError, TensorError
from attnplug_transformers.arguments import check_arguments
from attnplug_transformers.call import Call
from attnplug_transformers.mask import AskedMask, make_mask
from attnplug_transformers.uncompiled import uncompiled

KEY: Final = "attnplug_engine"
"""The attention implementation's name in transformers."""


def register() -> str:
    """Register the attention function and its mask function with transformers, and return their name."""
    AttentionMaskInterface.register(KEY, make_mask)
    AttentionInterface.register(KEY, attend)
    return KEY


@frozen(eq=False)
class Asked:
    """
    One attention call of the model.

    Attributes:
        module: The attention module.
        call: The facts of the call.
        query: ``(tokens, num_q_heads, head_size)``.
        key: ``(tokens, num_kv_heads, head_size)``.
        value: ``(tokens, num_kv_heads, head_size_v)``.
        mask: The mask that came with it.
        scale: Factor of the scores; None is ``head_size ** -0.5``.
        sinks: ``(num_q_heads,)``.
    """

    module: nn.Module
    call: Call
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | AskedMask | None
    scale: float | None
    sinks: Tensor | None


class Answering(Protocol):
    """What a model is called with, to answer the attention calls of that one run."""

    def answer(self, asked: Asked) -> Tensor:
        """Return ``(tokens, num_q_heads * head_size_v)``."""


@uncompiled
def attend(  # noqa: PLR0913, PLR0917 - the library's signature
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | AskedMask | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,  # noqa: FBT001 - the library's signature
    s_aux: Tensor | None = None,
    attnplug_step: Answering | None = None,
    **rest: Any,
) -> tuple[Tensor, None]:
    """
    Attend as the step says that the model was called with. Registered under the name ``"attnplug_engine"``.

    Args:
        module: The attention module.
        query: ``(1, num_q_heads, tokens, head_size)``: the tokens of all requests behind one another.
        key: ``(1, num_kv_heads, tokens, head_size)`` of the same tokens.
        value: ``(1, num_kv_heads, tokens, head_size_v)``.
        attention_mask: What the model made of the step's mask.
        dropout: Probability of dropping a weight; only 0 is served.
        scaling: Factor of the scores; None is ``head_size ** -0.5``.
        sliding_window: Tokens that a token attends, itself included.
        softcap: Scores become ``cap * tanh(score / cap)``.
        is_causal: Whether tokens attend no later ones; None asks the module.
        s_aux: ``(num_q_heads,)`` sinks.
        attnplug_step: What answers. It comes down with the model's keywords, so that engines in several threads do not
            meet, not even on one model.
        rest: What else the library hands over: harmless, or refused (see `attnplug_transformers.arguments`).

    Returns:
        ``(1, tokens, num_q_heads, head_size_v)``; and None, for no weights are returned.

    Raises:
        NotNegotiatedError: The call brings what was not negotiated, or none of an engine's steps.
        TensorError: The tensors are none of an engine's step.
    """
    name = type(module).__name__
    check_arguments(dropout, rest, name)
    if attnplug_step is None:
        raise _not_a_step(name)
    _check_tensors(query, key, value, name)
    call = Call.of(
        module,
        query,
        key,
        value,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux is not None,
        is_causal=is_causal,
    )
    asked = Asked(module, call, _rows(query), _rows(key), _rows(value), attention_mask, scaling, s_aux)
    output = attnplug_step.answer(asked)
    return output.view(1, query.shape[2], query.shape[1], value.shape[3]), None


def _rows(tensor: Tensor) -> Tensor:
    return tensor[0].transpose(0, 1)


def _check_tensors(query: Tensor, key: Tensor, value: Tensor, name: str) -> None:
    tokens = query.shape[2]
    if query.shape[0] != 1 or key.shape[:3:2] != (1, tokens) or value.shape[:3:2] != (1, tokens):
        raise TensorError(
            f"{name}: query {tuple(query.shape)}, key {tuple(key.shape)} and value {tuple(value.shape)} were given",
            "a step of the engine brings one row of tokens, and each token its own key and value",
            "call the model through the engine alone; the keys of earlier steps are in the engine's cache",
        )
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise NotNegotiatedError(
            f"{name}: gradients are recorded through this call",
            "contract 1.0 has no backward pass",
            "run the engine under torch.inference_mode(), as it does by itself",
        )


def _not_a_step(name: str) -> NotNegotiatedError:
    return NotNegotiatedError(
        f"{name}: attention was called without a step of an engine",
        "the model is on an engine's paged caches, and either was called by somebody else or does not pass its"
        " keywords down to its attention",
        "generate through the engine, or end it with engine.close(), which gives the model its own attention back",
    )
