"""Lends a model's attention to engines, and gives it back when the last of them is done."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from attnplug.errors import RequirementsError
from attnplug_transformers.engine.attention import KEY, register

if TYPE_CHECKING:
    from attnplug_transformers.engine.runner import Runner

_lent: WeakKeyDictionary[Any, list[str]] = WeakKeyDictionary()
"""Model -> the attention implementation that each of its engines has found; the first one is the model's own."""

_lock = threading.Lock()


class Loan:
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
