"""A model's attention while engines own it: the function that transformers calls, and the step that it calls."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from attnplug.errors import NotNegotiatedError, RequirementsError, TensorError
from attnplug_transformers.call import AttentionCall, module_name, uncompiled
from attnplug_transformers.engine import adapters
from attnplug_transformers.mask import make_mask

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from attnplug.contract import KVCache, Metadata
    from attnplug_transformers.engine.latent import LatentCache
    from attnplug_transformers.engine.layers import PagedLayer
    from attnplug_transformers.engine.runner import Runner
    from attnplug_transformers.engine.scales import RangeCheck

KEY: Final = "attnplug_engine"
"""The attention implementation's name in transformers."""

_Implementations: TypeAlias = "str | dict[str, _Implementations]"
"""As `set_attn_implementation` takes them: one name, or that of a configuration (under "") with those of its parts."""

_installed: WeakKeyDictionary[Any, list[_Implementations]] = WeakKeyDictionary()
"""Model -> the attention implementations that each of its engines replaced; the first ones are the model's own."""

_lock = threading.Lock()

# Several models pass no keywords down to their attention. Each thread has its own value: engines share no state.
_handler: ContextVar[AttentionHandler | None] = ContextVar("attnplug_engine", default=None)
_latents: ContextVar[LatentCache | None] = ContextVar("attnplug_engine_latents", default=None)


class ModelAttention:
    """
    The attention of a model, replaced by the engine's until `restore`.

    It refers to the runner and not to the engine, so that it can restore the attention of an engine that is
    garbage-collected.

    Args:
        model: The model.

    Raises:
        RequirementsError: The model's classes do not let their attention be replaced.

    Attributes:
        runner: What holds KV caches and graphs; `restore` frees them.
    """

    def __init__(self, model: Any) -> None:
        self.runner: Runner | None = None
        self._model = model
        with _lock:
            AttentionMaskInterface.register(KEY, make_mask)
            AttentionInterface.register(KEY, attend)
            replaced = _implementations(model.config)
            if adapters.is_adapted(model):
                AttentionMaskInterface.register(adapters.KEY, adapters.make_mask)
                adapters.install(model, attend)
                model.config._attn_implementation = adapters.KEY  # noqa: SLF001 - no public name
            else:
                model.set_attn_implementation(KEY)
            if model.config._attn_implementation not in {KEY, adapters.KEY}:  # noqa: SLF001 - likewise
                model.set_attn_implementation(replaced)  # parts of the model may have taken the engine's
                raise fixed_attention(model)
            _installed.setdefault(model, []).append(replaced)

    def restore(self) -> None:
        """Free KV caches and graphs, and give the model its own attention back after its last engine."""
        try:
            if self.runner is not None:
                self.runner.free()
        finally:
            with _lock:
                own, *others = _installed[self._model]
                if others:
                    _installed[self._model] = [own, *others[1:]]
                else:
                    del _installed[self._model]
                    self._restore(own)

    def _restore(self, implementation: _Implementations) -> None:
        if adapters.is_adapted(self._model):
            adapters.restore(self._model)
            self._model.config._attn_implementation = implementation  # noqa: SLF001 - the setter of such models refuses
        else:
            self._model.set_attn_implementation(implementation)


def fixed_attention(model: Any) -> RequirementsError:
    """Return the error for a model whose classes do not let their attention be replaced."""
    return RequirementsError(
        f"{type(model).__name__} was given to the engine: it does not take an attention implementation",
        "the engine serves the calls of transformers' AttentionInterface, and code that a model is published with"
        " often calls its own kernels",
        "keep the attention that this model came with, or run it from classes that go through the interface",
    )


def _implementations(config: Any) -> _Implementations:
    """Return the attention implementation of a configuration, and of each part that may have another one."""
    own: str = config._attn_implementation  # noqa: SLF001 - the library has no public name for it
    parts = {name: getattr(config, name, None) for name in config.sub_configs}
    found = {name: _implementations(part) for name, part in parts.items() if part is not None}
    return {"": own, **found} if found else own


class AttentionHandler(Protocol):
    """Serves the attention calls of one forward pass of the model."""

    def attend(self, call: AttentionCall) -> Tensor:
        """Return ``(tokens, num_q_heads * head_size_v)`` of the tokens that have a query."""


@contextmanager
def serving(handler: AttentionHandler, latents: LatentCache | None = None) -> Iterator[dict[str, Any]]:
    """
    Let a handler serve the attention calls of this thread.

    Args:
        handler: The handler.
        latents: Takes the latents of a model with latent attention, whose calls the handler gets absorbed.

    Yields:
        Arguments with which the model has to be called.
    """
    token, other = _handler.set(handler), _latents.set(latents)
    try:
        yield {} if latents is None else latents.argument
    finally:
        _latents.reset(other)
        _handler.reset(token)


@uncompiled
def attend(module: nn.Module, *args: Any, **arguments: Any) -> Any:
    """
    Attend through the handler of this thread: see `serving`. Registered under the name ``"attnplug_engine"``.

    Args:
        module: The attention module.
        args: As for `AttentionCall.of`, with a batch of 1: the tokens of all requests, concatenated.
        arguments: As for `AttentionCall.of`.

    Returns:
        ``(1, tokens, num_q_heads, head_size_v)``; and None in place of attention weights.

    Raises:
        NotNegotiatedError: The call differs from what was negotiated, or does not come from an engine's step.
        TensorError: The tensors are not those of an engine's step.
    """
    handler = _handler.get()
    if handler is None:
        raise NotNegotiatedError(
            f"{module_name(module)}: attention was called without a step of an engine",
            "an engine has replaced the model's attention, and the model was called by other code",
            "generate through the engine, or call engine.close(), which restores the model's own attention",
        )
    latents = _latents.get()
    chosen = None if latents is None else arguments.pop("indices", None)
    call = AttentionCall.of(module, *args, **arguments)
    served = call if latents is None else latents.absorb(call, chosen)
    if len(call.query) != 1 or served.key.shape[2] != call.query.shape[2]:
        raise TensorError(
            f"{module_name(module)}: query {tuple(call.query.shape)} and key {tuple(served.key.shape)} were given",
            "a step of the engine has one row of tokens, and each token has its own key and value",
            "call the model through the engine alone; the keys of earlier steps are in the engine's KV cache",
        )
    _, heads, tokens, _ = served.query.shape
    output = handler.attend(served).view(1, tokens, heads, served.value.shape[3])
    return output if latents is None else latents.finish(call, served, output), None


def placeholder_mask(device: torch.device, *, alibi: bool = False) -> Tensor | None:
    """
    Return the mask of a step. With four axes the library takes it for a prepared one, and builds none.

    Models with ALiBi compute their biases from the mask, and take one of two axes only: for them it is None.
    """
    return None if alibi else torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


class StepAttention:
    """
    Serves the attention calls of one step from paged KV caches.

    Args:
        layers: The layer of each attention module.
        caches: The KV cache of each layer that has its own, by name; empty for a profile run.
        metadata: The metadata of each group, None where a group has no query; empty for a profile run.
        mask: What the model is called with for a mask.
        ranges: Records the keys and values of the step; None does not.
    """

    def __init__(
        self,
        layers: Mapping[nn.Module, PagedLayer],
        caches: Mapping[str, KVCache],
        metadata: Sequence[Metadata | None],
        mask: Tensor | None,
        ranges: RangeCheck | None = None,
    ) -> None:
        self._ranges = ranges
        self._pending = dict(layers)
        self._caches = caches
        self._metadata = metadata
        self._mask = mask

    def attend(self, call: AttentionCall) -> Tensor:
        """
        Write the keys and values of the step's tokens to the KV cache, unless an earlier layer has, and attend.

        Raises:
            NotNegotiatedError: The call differs from what the engine was made for.
            ContractError: The backend refuses the tensors.
        """
        layer = self._pending.pop(call.module, None)
        if layer is None:
            raise NotNegotiatedError(
                f"{module_name(call.module)} attends once more",
                "each attention layer of the engine attends once a step",
                "make a new engine after changing the model",
            )
        layer.spec.check(call, self._mask)
        query = call.query[0].transpose(0, 1)
        key = value = None
        if layer.spec.kv_sharing_target is None:
            key, value = call.key[0].transpose(0, 1), call.value[0].transpose(0, 1)
            if self._ranges is not None:
                self._ranges.record(layer, key, value)
        output = query.new_empty(query.shape[0], layer.impl.output_width)
        metadata = self._metadata[layer.group] if self._metadata else None
        if layer.spec.requirements.latent:
            if not len(query):  # all are long prefills
                return output
            key, value = key if key is None else key[: len(query)], None  # a value is a part of its key
        cache = self._caches.get(layer.spec.cache_name)
        layer.impl.forward(query, key, value, cache, metadata, output, indices=call.indices)
        return output

    def check_complete(self) -> None:
        """
        Check that every layer was called: another attention would have run without its KV cache, to wrong tokens.

        Raises:
            NotNegotiatedError: One was not.
        """
        if self._pending:
            missing = next(iter(self._pending.values())).spec.name
            raise NotNegotiatedError(
                f"{len(self._pending)} attention layers, {missing!r} first, did not call the engine",
                "while an engine is open, its model is on the attention implementation 'attnplug_engine'",
                "leave model.set_attn_implementation alone until engine.close()",
            )
