"""
Copies of functions whose attention calls go elsewhere.

Most of diffusers' processors call `dispatch_attention_fn` with the backend of the processor. Others, and the modules of
autoencoders, call `torch.nn.functional.scaled_dot_product_attention` directly, or dispatch without a backend or with
one that their code names. A copy of such a function has other globals, and nothing in the process is patched.
"""

from __future__ import annotations

import dis
import inspect
from functools import wraps
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import frozen
from diffusers.models import attention_dispatch as dispatch
from torch import nn
from torch.nn import functional

from attnplug.errors import NotNegotiatedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_SDPA: Final = "scaled_dot_product_attention"
_DISPATCH: Final = "dispatch_attention_fn"
_BACKEND: Final = "_attention_backend"
_ORIGINAL: Final = "_attnplug_original"


@frozen(eq=False)
class Route:
    """
    Where the attention calls of copied functions go.

    Attributes:
        replaced: Identity of an object that globals may hold -> what takes its place where a function uses these
            names, too.
    """

    replaced: dict[int, tuple[Any, set[str]]]

    @classmethod
    def to(cls, like_sdpa: Callable[..., Any], member: Any, permit: Callable[[str], None]) -> Route:
        """
        Return the route to a function with torch's arguments, and to a name of diffusers' registry.

        Args:
            like_sdpa: Takes the place of `torch.nn.functional.scaled_dot_product_attention`.
            member: The backend of calls of `dispatch_attention_fn`, whichever they name.
            permit: Called with the reason where a call can only run on the backend of diffusers that it names: its mask
                is in the form of that backend. It raises where that is not permitted.
        """

        def dispatch_attention_fn(
            query: Any, key: Any, value: Any, attn_mask: Any = None, *args: Any, backend: Any = None, **kwargs: Any
        ) -> Any:
            chosen = member
            if backend is not None and attn_mask is not None and not isinstance(attn_mask, torch.Tensor):
                permit(f"a mask of type {type(attn_mask).__name__}")
                chosen = backend
            return dispatch.dispatch_attention_fn(query, key, value, attn_mask, *args, backend=chosen, **kwargs)

        of_functional = _shim(functional, **{_SDPA: like_sdpa})
        of_nn = _shim(torch.nn, functional=of_functional)
        return cls(
            {
                id(functional): (of_functional, {_SDPA}),
                id(torch.nn): (of_nn, {"functional", _SDPA}),
                id(torch): (_shim(torch, nn=of_nn), {"nn", "functional", _SDPA}),
                id(functional.scaled_dot_product_attention): (like_sdpa, set()),
                id(dispatch.dispatch_attention_fn): (dispatch_attention_fn, set()),
            }
        )

    def copy(self, function: FunctionType) -> FunctionType:
        """
        Return a copy of a function with its attention calls on this route.

        Raises:
            NotNegotiatedError: It takes what it calls from elsewhere than its globals.
        """
        used = set(_names(function.__code__))
        given = {
            name: one[0]
            for name, value in function.__globals__.items()
            if name in used and (one := self.replaced.get(id(value))) is not None and used.issuperset(one[1])
        }
        if not given or functional.__name__ in used:  # imported inside of the function
            _refuse(function)
        globals_ = {**function.__globals__, **given}
        globals_.pop("__name__", None)  # TorchDynamo would read the globals of the module with that name
        copy = FunctionType(function.__code__, globals_, function.__name__, function.__defaults__, function.__closure__)
        copy.__kwdefaults__, copy.__dict__ = function.__kwdefaults__, dict(function.__dict__)
        copy.__annotations__, copy.__doc__ = function.__annotations__, function.__doc__
        copy.__module__, copy.__qualname__ = function.__module__, function.__qualname__
        return copy

    def subclass(self, owner: type, names: list[str]) -> type:
        """
        Return a class with the methods of another, some of them on this route.

        Raises:
            NotNegotiatedError: As for `copy`.
        """
        methods = {name: inspect.getattr_static(owner, name) for name in names}
        copies = {name: self.copy(method) for name, method in methods.items()}
        made = type(owner.__name__, (owner,), {**copies, "__module__": owner.__module__, "__doc__": owner.__doc__})
        made.__qualname__ = owner.__qualname__
        if issubclass(owner, nn.Module):
            for name, method in methods.items():
                setattr(made, name, _while_bound(made, copies[name], method))
        setattr(made, _ORIGINAL, owner)
        return made


def original(owner: type) -> type:
    """Return the class that a class of `Route.subclass` was made of: a model may be bound again."""
    found: type = vars(owner).get(_ORIGINAL, owner)
    return found


def direct_methods(owner: type) -> list[str]:
    """Return the methods of a class that call attention without the backend of a processor."""
    return sorted(
        name
        for name in {name for base in owner.__mro__ for name in vars(base)}
        if isinstance(method := inspect.getattr_static(owner, name), FunctionType) and _is_direct(method)
    )


def dispatches(owner: type) -> bool:
    """Whether calls of a processor's class go to diffusers' dispatch with the backend of the processor."""
    call = inspect.getattr_static(owner, "__call__", None)
    return isinstance(call, FunctionType) and _BACKEND in _names(call.__code__)


def demands(processor: object) -> str:
    """Return the backend of diffusers that a processor's class is made for, and no other; or nothing."""
    return str(getattr(type(processor), _BACKEND, None) or "")


def _is_direct(method: FunctionType) -> bool:
    names = set(_names(method.__code__))
    if _SDPA in names or (_DISPATCH in names and _BACKEND not in names):
        return True
    # A method may pass the backend of the processor to some of its calls, and None or a name to others.
    return _DISPATCH in names and _count(method.__code__, _DISPATCH) > _count(method.__code__, _BACKEND)


def _count(code: CodeType, name: str) -> int:
    """Return how often a function reads a name."""
    inner = sum(_count(constant, name) for constant in code.co_consts if isinstance(constant, CodeType))
    return inner + [one.argval for one in dis.get_instructions(code)].count(name)


def _while_bound(made: type, copy: FunctionType, method: FunctionType) -> Callable[..., Any]:
    """Return a method that is the copy for modules of a class, and the original for others."""
    # A hook of diffusers or accelerate keeps the `forward` of its module. If it is added while the module is bound, it
    # calls that after the module is restored, too.

    @wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        return copy(self, *args, **kwargs) if isinstance(self, made) else method(self, *args, **kwargs)

    return run


def _names(code: CodeType) -> Iterator[str]:
    """Yield the global and attribute names of a function, and of those inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _shim(module: ModuleType, **replaced: Any) -> ModuleType:
    """Return a module with the contents of another, and some of them replaced."""
    made = ModuleType(f"attnplug_diffusers.{module.__name__}")
    made.__dict__.update({name: one for name, one in vars(module).items() if name != "__name__"}, **replaced)
    return made


def _refuse(function: FunctionType) -> None:
    raise NotNegotiatedError(
        f"{function.__module__}.{function.__qualname__} calls attention by a name that is not global",
        "what is bound calls torch.nn.functional.scaled_dot_product_attention, or diffusers' dispatch_attention_fn, "
        "by a global name of its module",
        "import torch.nn.functional at the top of that module",
    )
