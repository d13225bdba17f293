"""The attention function of the engine: it asks the step that the model is called with."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakKeyDictionary

import torch
from attrs import frozen
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from attnplug.errors import NotNegotiatedError, RequirementsError, TensorError
from attnplug_transformers.call import CallSignature, check_arguments, uncompiled
from attnplug_transformers.mask import LazyMask, make_mask

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor, nn

    from attnplug.contract import Cache, Metadata
    from attnplug_transformers.engine.layers import PagedLayer
    from attnplug_transformers.engine.runner import Runner


KEY: Final = "attnplug_engine"
"""The attention implementation's name in transformers."""


def register() -> str:
    """Register the attention function and its mask function with transformers, and return their name."""
    AttentionMaskInterface.register(KEY, make_mask)
    AttentionInterface.register(KEY, attend)
    return KEY


@frozen(eq=False)
class AttentionCall:
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
    call: CallSignature
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | LazyMask | None
    scale: float | None
    sinks: Tensor | None


class AttentionHandler(Protocol):
    """What a model is called with, to answer the attention calls of that one run."""

    def answer(self, asked: AttentionCall) -> Tensor:
        """Return ``(tokens, num_q_heads * head_size_v)``."""


@uncompiled
def attend(  # noqa: PLR0913, PLR0917 - the library's signature
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
    attnplug_step: AttentionHandler | None = None,
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
        rest: What else the library hands over: harmless, or refused (see `attnplug_transformers.call`).

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
    call = CallSignature.of(
        module,
        query,
        key,
        value,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=s_aux is not None,
        is_causal=is_causal,
    )
    asked = AttentionCall(module, call, _rows(query), _rows(key), _rows(value), attention_mask, scaling, s_aux)
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


class StepAttention:
    """
    The attention of one step.

    Args:
        layers: The layer of each attention module.
        caches: The cache of each layer, by name; empty for a run that measures memory.
        metadata: The metadata of each group; empty for a run that measures memory.
        mask: What stands in place of a mask.
    """

    def __init__(
        self,
        layers: Mapping[nn.Module, PagedLayer],
        caches: Mapping[str, Cache],
        metadata: Sequence[Metadata],
        mask: Tensor,
    ) -> None:
        self._waiting = dict(layers)
        self._caches = caches
        self._metadata = metadata
        self._mask = mask

    def answer(self, asked: AttentionCall) -> Tensor:
        """
        Write the keys and values of the step's tokens, and attend.

        Raises:
            NotNegotiatedError: The call is not what the engine was made for.
            ContractError: The backend refuses the tensors.
        """
        layer = self._waiting.pop(asked.module, None)
        if layer is None:
            raise _called_again(asked)
        learned = layer.spec
        learned.check(asked, self._mask)
        output = asked.query.new_empty(asked.query.shape[0], layer.impl.output_width)
        metadata = self._metadata[layer.group] if self._metadata else None
        cache = self._caches.get(learned.name)
        layer.impl.forward(asked.query, asked.key, asked.value, cache, metadata, output)
        return output

    def check_complete(self) -> None:
        """
        See that every layer has asked: another attention would have run without its cache, into wrong tokens.

        Raises:
            NotNegotiatedError: One has not.
        """
        if self._waiting:
            missing = next(iter(self._waiting.values())).spec.name
            raise NotNegotiatedError(
                f"{len(self._waiting)} attention layers, {missing!r} first, did not ask the engine",
                "while an engine is open, its model is on the attention implementation 'attnplug_engine'",
                "leave model.set_attn_implementation alone until engine.close()",
            )


def _called_again(asked: AttentionCall) -> NotNegotiatedError:
    return NotNegotiatedError(
        f"{type(asked.module).__name__} {getattr(asked.module, 'layer_idx', '')} attends once more",
        "each attention layer that the engine knows attends once a step",
        "make a new engine after changing the model",
    )


_lent: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()
"""Model -> the attention implementation that each of its engines has found; the first one is the model's own."""

_lock = threading.Lock()


class ModelAttention:
    """
    One engine's hold on a model. It knows the runner and not the engine, so that it can end after the engine.

    Args:
        model: The model, which is lent at once.

    Raises:
        RequirementsError: As `lend`.
    """

    def __init__(self, model: Any) -> None:
        lend(model)
        self._model = model
        self.runner: Runner | None = None

    def end(self) -> None:
        """Free caches and graphs, which may hold each other, and give the model back."""
        try:
            if self.runner is not None:
                self.runner.equip((), {})
        finally:
            give_back(self._model)


def lend(model: Any) -> None:
    """
    Put a model on the engine's attention.

    Raises:
        RequirementsError: Its classes do not let their attention be replaced.
    """
    with _lock:
        register()
        found = model.config._attn_implementation  # noqa: SLF001 - the library has no public name for it
        model.set_attn_implementation(KEY)
        if model.config._attn_implementation != KEY:  # noqa: SLF001 - likewise
            model.set_attn_implementation(found)  # parts of the model may have taken it
            raise RequirementsError(
                f"{type(model).__name__} was given to the engine: it does not take an attention implementation",
                "the engine answers the attention calls that transformers' AttentionInterface makes, and code that a"
                " model is published with often calls kernels of its own",
                "keep the attention that this model came with, or run it from classes that go through the interface",
            )
        _lent.setdefault(model, []).append(found)


def give_back(model: Any) -> None:
    """End one engine's loan; after the last one the model has the attention again that it had before the first."""
    with _lock:
        first, *rest = _lent[model]
        if rest:
            _lent[model] = [first, *rest[1:]]
        else:
            del _lent[model]
            model.set_attn_implementation(first)
