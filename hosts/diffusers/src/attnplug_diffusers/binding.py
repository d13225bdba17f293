"""Models on a backend: their processors are replaced by copies, and put back."""

from __future__ import annotations

import copy
import logging
import threading
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

from torch import nn

import attnplug
from attnplug import using
from attnplug.errors import NoBackendError, NotNegotiatedError, RequestError
from attnplug.negotiation import AUTO
from attnplug_diffusers.backend import Attention, attention_for
from attnplug_diffusers.rerouting import demands, direct_methods, dispatches, original

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from typing_extensions import Self

    from attnplug.request import BackendNames, Options

_logger: Final = logging.getLogger("attnplug.diffusers")
_PROCESSOR: Final = "processor"
_CLASS: Final = "__class__"
_lock: Final = threading.RLock()
# A model that is bound for good is garbage-collected like any other: this keeps no binding, which keeps its model.
_active: Final[WeakKeyDictionary[Binding, frozenset[int]]] = WeakKeyDictionary()
"""Bindings that are in force, the newest last, with the identities of their modules."""


class Binding:
    """
    Models' attention on a backend, until `restore`. `bind` makes it.

    As a context manager it restores at the end of the block, whatever is raised there; of blocks inside each other, at
    the end of the outermost.

    Attributes:
        modules: Names of the modules whose attention runs on the backend, as in `model.named_modules()`.
        left: Names of modules with an attention processor that computes attention in another way, by linear attention
            for example, or whose class is made for one backend of diffusers. They run as they are.
    """

    def __init__(self, attention: Attention, changes: list[_Change], modules: list[str], left: list[str]) -> None:
        self.modules = tuple(modules)
        self.left = tuple(left)
        self._attention = attention
        self._changes = changes
        self._blocks = 0

    @property
    def native(self) -> tuple[str, ...]:
        """
        Why calls ran in diffusers' native attention, sorted.

        No backend serves them, with `native_fallback`; or none is named, and native attention was measured to be
        faster. Models that are bound with the same settings share it.
        """
        return tuple(sorted(self._attention.fallback.reasons))

    def restore(self) -> None:
        """
        Put back what the model had. A second time changes nothing.

        A processor that was set on the model since is left as it is, with a warning: its calls have run without
        attnplug.

        Raises:
            RequestError: The model is bound again since: restore that first.
        """
        with _lock:
            if self not in _active:
                return
            bindings = list(_active)
            newer = bindings[bindings.index(self) + 1 :]
            if any(_active[self] & _active[one] for one in newer):
                raise RequestError(
                    "a binding was restored before a newer one of the same model",
                    "bindings of a model are restored in the opposite order",
                    "restore the newest first, or use `with attnplug_diffusers.bind(...)` blocks inside each other",
                )
            kept = [change for change in self._changes if not change.is_in_force()]
            for change in reversed(self._changes):
                change.revert()
            del _active[self]
        if kept:
            _logger.warning(
                "%d of %d changes of a binding were replaced while it was in force, so that attention ran without "
                "attnplug: bind after set_attn_processor, fuse_qkv_projections and load_ip_adapter",
                len(kept),
                len(self._changes),
            )

    def __enter__(self) -> Self:
        with _lock:
            if self not in _active:
                raise RequestError(
                    "a binding that was restored is entered",
                    "a binding is in force from bind to restore, and once",
                    "call attnplug_diffusers.bind again",
                )
            self._blocks += 1
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._blocks -= 1
        if not self._blocks:
            self.restore()

    def __repr__(self) -> str:
        state = f"{len(self.modules)} modules" if self in _active else "restored"
        return f"<Binding to {self._attention.member.value!r}: {state}>"

    def _apply(self) -> None:
        with _lock:
            try:
                for change in self._changes:
                    change.apply()
            except BaseException:
                for change in reversed(self._changes):
                    change.revert()
                raise
            _active[self] = frozenset(id(change.module) for change in self._changes)


class _Change:
    """One attribute of a module: its processor, or its class."""

    def __init__(self, module: nn.Module, name: str, after: Any) -> None:
        self.module = module
        self._name = name
        self._before = getattr(module, name)
        self._after = after

    def apply(self) -> None:
        setattr(self.module, self._name, self._after)

    def is_in_force(self) -> bool:
        return getattr(self.module, self._name) is self._after

    def revert(self) -> None:
        if self.is_in_force():
            setattr(self.module, self._name, self._before)


def bind(
    model: nn.Module,
    backend: BackendNames | None = None,
    *,
    options: Options | None = None,
    native_fallback: bool = False,
) -> Binding:
    """
    Run the attention of a model on a backend of attnplug, until the binding is restored.

    Other models keep theirs, and so does the process: diffusers' own `set_attention_backend` also sets the backend of
    every model that has none. Each call selects for its shapes, as `attnplug.attention` does. It works in
    ``torch.compile(fullgraph=True)``, before or after this.

    Processors are copied, since models may share them. Those that call diffusers' `dispatch_attention_fn` name a
    backend that is registered there. Those that call torch's `scaled_dot_product_attention` directly, and modules that
    do so without a processor, call attnplug instead.

    Args:
        model: A model of diffusers, for example ``pipe.transformer``; or any module with such modules in it.
        backend: As for `attnplug.select`: None for the best one, or names in order of preference.
        options: As for `attnplug.select`.
        native_fallback: Whether diffusers' native attention runs the calls that no backend serves; `Binding.native` has
            the reasons. Otherwise they are errors. In ``torch.compile`` this is decided when the graph is traced.

    Raises:
        RequestError: It is not a model, or has no attention that can be bound.
        SettingsError: A backend or an option is no such thing.
        UnknownBackendError: A name is neither installed nor known.
        NoBackendError: No backend of these names can run in this environment, and `native_fallback` is False.
        NotNegotiatedError: Context parallelism is enabled for the model, or a hook has replaced the forward of a module
            that calls torch's function.
    """
    _check_model(model)
    with using(backend=backend, options=options):  # which checks them
        _check_names([backend] if isinstance(backend, str) else backend or (), native_fallback=native_fallback)
        attention = attention_for(backend, options, native_fallback=native_fallback)
    binding = _prepare(model, attention)
    if not binding.modules:
        raise RequestError(
            f"{type(model).__name__} has no attention that can be bound",
            "its modules call diffusers' dispatch_attention_fn, or torch's scaled_dot_product_attention",
            "bind the model that attends; "
            + (
                f"these compute attention in another way: {', '.join(binding.left)}" if binding.left else "print(model)"
            ),
        )
    binding._apply()  # noqa: SLF001 - of this module
    return binding


def _check_model(model: object) -> None:
    if isinstance(model, nn.Module):
        return
    parts = getattr(model, "components", {})
    models = [name for name, part in parts.items() if isinstance(part, nn.Module)] if isinstance(parts, dict) else []
    raise RequestError(
        f"bind was called with a {type(model).__name__}",
        "a model is bound, and each model of a pipeline separately",
        f"bind the part that denoises: one of {', '.join(models)}"
        if models
        else "pass a model, such as pipe.transformer",
    )


def _check_names(names: Sequence[str], *, native_fallback: bool) -> None:
    """Check that a call may find a backend by one of these names; its shapes and device are not known yet."""
    found = attnplug.registry()
    for name in names:
        found.check_name(name)
    if native_fallback or AUTO in names:
        return
    named = [each for each in found.candidates() if not {each.id, each.backend, *each.aliases}.isdisjoint(names)]
    if any(each.availability == "ready" for each in named):
        return
    for first in named[:1]:
        listed = (f"{each.id}: {'; '.join(map(str, each.reasons))}" for each in named)
        raise NoBackendError(
            f"a model was bound to {', '.join(map(repr, names))}",
            "\n    ".join(["a backend that can run in this environment", *listed]),
            "; ".join(filter(None, (first.fix, ", ".join(f"install {each}" for each in first.install))))
            or "name another backend, or 'auto' after it",
        )


def _prepare(model: nn.Module, attention: Attention) -> Binding:
    """Return the binding of a model, before anything of it is changed."""
    changes, modules, left = [], [], []
    processors: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in processors:
            continue  # a processor that is a module: its copy takes its place
        found = []
        processor = getattr(module, _PROCESSOR, None)
        if callable(processor):
            processors.add(id(processor))
            _check_parallel(name, processor)
            changed = _bound_processor(processor, attention)
            if changed is None:
                left.append(name)
            else:
                found.append(_Change(module, _PROCESSOR, changed))
        owner = attention.rerouted(type(module))
        if owner is not None:
            _check_hooks(name, module)
            found.append(_Change(module, _CLASS, owner))
        if found:
            modules.append(name)
            changes += found
    return Binding(attention, changes, modules, left)


def _bound_processor(processor: Any, attention: Attention) -> Any:
    """Return a copy of a processor that calls attnplug, or None where it calls no attention."""
    if demands(processor):
        return None
    owner, dispatched = attention.rerouted(type(processor)), dispatches(type(processor))
    if owner is None and not dispatched:
        return None
    made = copy.copy(processor)
    if owner is not None:
        made.__class__ = owner
    if dispatched:
        made._attention_backend = attention.member  # noqa: SLF001 - as diffusers' set_attention_backend does
    return made


def _check_parallel(name: str, processor: object) -> None:
    if getattr(processor, "_parallel_config", None) is not None:
        raise NotNegotiatedError(
            f"context parallelism is enabled for the attention of {name or 'the model'}",
            "each call of a bound model attends to all of its keys on one device",
            "bind a model that was loaded without a context-parallel configuration",
        )


def _check_hooks(name: str, module: nn.Module) -> None:
    """Check that a module runs the methods of its class, which a binding replaces by copies."""
    for method in direct_methods(original(type(module))):
        if method in vars(module):
            raise NotNegotiatedError(
                f"{name or 'the model'} has a {method} that is not the one of {type(module).__name__}",
                "a hook, of offloading or caching for example, keeps the method that it has replaced, which calls "
                "attention without attnplug",
                "bind the model first, then enable offloading and caching",
            )
