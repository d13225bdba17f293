"""
The attention functions that bound models call: a pair for each combination of settings, with a name in diffusers.

diffusers' registry is one of the process, its names are the members of a closed enumeration, and a function there is
not told which model calls it. So every combination of settings has a name: models that are bound to different backends
have different ones, and the active backend of the process stays what it is.
"""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import field, frozen
from diffusers.models import attention_dispatch as dispatch

from attnplug.dense import attend_like_sdpa, autocast_like_sdpa
from attnplug.errors import NotNegotiatedError
from attnplug_diffusers.fallback import Fallback
from attnplug_diffusers.masks import has_more_digits, mask_by_key
from attnplug_diffusers.packed import attend_by_key, can_leave_out, is_by_key
from attnplug_diffusers.rerouting import Route, direct_methods, original

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnplug.request import BackendNames, Options

NAME: Final = "attnplug"
"""What every name begins with."""

_NATIVE: Final = dispatch.AttentionBackendName.NATIVE
_NO_WINDOW: Final = (-1, -1)


@frozen(eq=False)
class Settings:
    """
    What the calls of a bound model are made with.

    Attributes:
        backend: As for `attnplug.select`.
        options: As for `attnplug.select`.
        fallback: Decides which calls diffusers' native attention runs.
    """

    backend: BackendNames | None
    options: Options | None
    fallback: Fallback


@frozen(eq=False)
class Attention:
    """
    What models with one combination of settings call.

    Attributes:
        member: Its name in diffusers' enumeration; the registry has the function for it.
        route: Where copied functions call, that have no name to pass.
        fallback: Decides which calls diffusers' native attention runs.
    """

    member: Any
    route: Route
    fallback: Fallback
    _classes: dict[type, type | None] = field(factory=dict)

    def rerouted(self, owner: type) -> type | None:
        """
        Return a class with those of its methods on the route that call attention directly; None without any.

        Raises:
            NotNegotiatedError: As for `Route.copy`.
        """
        owner = original(owner)
        if owner not in self._classes:
            names = direct_methods(owner)
            self._classes[owner] = self.route.subclass(owner, names) if names else None
        return self._classes[owner]


class _Everything(set[str]):
    """Names of arguments: it has every one, and lists those that diffusers has."""

    def __contains__(self, name: object) -> bool:
        return True


_made: Final[dict[str, Attention]] = {}
_lock: Final = threading.Lock()


def attention_for(backend: BackendNames | None, options: Options | None, *, native_fallback: bool) -> Attention:
    """
    Return the functions for a combination of settings, with its name in diffusers' registry.

    Args:
        backend: As for `attnplug.select`.
        options: As for `attnplug.select`.
        native_fallback: Whether diffusers' native attention runs what no backend serves.
    """
    names = [backend] if isinstance(backend, str) else list(backend or ())
    text = f"{','.join(names)}{json.dumps(options, sort_keys=True) if options else ''}"
    name = f"{NAME}{f':{text}' if text else ''}{' or native' if native_fallback else ''}"
    with _lock:
        if name not in _made:
            settings = Settings(backend, options, Fallback(backend, options, serves_rest=native_fallback))
            member = _register(name, _dispatched(settings))
            permit = settings.fallback.note if native_fallback else _refuse_mask
            _made[name] = Attention(member, Route.to(_like_sdpa(settings), member, permit), settings.fallback)
        return _made[name]


def _register(name: str, function: Callable[..., Any]) -> Any:
    """Add a member to diffusers' enumeration, and the function to its registry; diffusers has no public way."""
    names, registry = dispatch.AttentionBackendName, dispatch._AttentionBackendRegistry  # noqa: SLF001 - likewise
    member = str.__new__(names, name)
    member._name_, member._value_ = name.upper(), name
    member._sort_order_ = len(names.__members__)
    registry.register(member)(function)
    # diffusers leaves out of a call what a backend has no argument for. Here all of it arrives, to be refused by name.
    known = registry._supported_arg_names  # noqa: SLF001 - likewise
    known[member] = _Everything(set().union(*known.values()) - {"others"})
    names._member_map_[name.upper()] = names._value2member_map_[name] = member
    names._member_names_.append(name.upper())
    return member


def _dispatched(settings: Settings) -> Callable[..., Any]:
    """Return the function of diffusers' registry."""

    def attend(  # noqa: PLR0913, PLR0917 - the signature of diffusers' functions
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002 - likewise
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: FBT001, FBT002 - likewise
        return_lse: bool = False,  # noqa: FBT001, FBT002 - likewise
        _parallel_config: Any = None,
        **others: Any,
    ) -> Any:
        for name, setting in others.items():
            is_unset = setting is None or (isinstance(setting, (bool, int, float)) and not setting)
            if not is_unset and not (name == "window_size" and tuple(setting) == _NO_WINDOW):
                _refuse_argument(name)
        if _parallel_config is not None:
            _refuse_parallel()
        if attn_mask is not None and not isinstance(attn_mask, torch.Tensor):
            _refuse_mask(f"a mask of type {type(attn_mask).__name__}")
        if attn_mask is not None and attn_mask.ndim == 2:
            attn_mask = mask_by_key(attn_mask, query.shape[0], key.shape[1])
        found = _attend(
            settings, query, key, value, attn_mask,
            dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, tokens_first=True,
            return_lse=return_lse,
        )  # fmt: skip
        return (found[0], found[1].transpose(1, 2)) if return_lse else found  # as FlashAttention has it

    return attend


def _like_sdpa(settings: Settings) -> Callable[..., Any]:
    """Return the function for code that calls torch's."""

    def scaled_dot_product_attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,  # noqa: FBT001, FBT002 - the signature of torch's function
        scale: float | None = None,
        enable_gqa: bool = False,  # noqa: FBT001, FBT002 - likewise
    ) -> Any:
        return _attend(
            settings, query, key, value, attn_mask,
            dropout_p=dropout_p, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa, tokens_first=False,
            return_lse=False,
        )  # fmt: skip

    return scaled_dot_product_attention


def _attend(
    settings: Settings,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    *,
    tokens_first: bool,
    return_lse: bool,
    **call: Any,
) -> Any:
    """Run a call by leaving out keys, natively, or as it is; `call` has the rest of torch's arguments."""
    query, key, value, attn_mask = autocast_like_sdpa(query, key, value, attn_mask)
    heads, tokens = (2, 1) if tokens_first else (1, 2)
    by_key = (
        attn_mask is not None
        and not call["is_causal"]
        and not call["dropout_p"]
        and is_by_key(query, key, value, attn_mask, heads=heads, tokens=tokens, enable_gqa=call["enable_gqa"])
        and can_leave_out(query, key, value, return_lse=return_lse)
    )
    fallback = settings.fallback
    if not fallback.serves_rest and attn_mask is not None and has_more_digits(attn_mask, query):
        _refuse_digits(attn_mask, query)
    if not return_lse:
        about: dict[str, Any] = {name: call[name] for name in ("dropout_p", "is_causal")}
        if fallback.reason(query, key, value, attn_mask, tokens_first=tokens_first, by_key=by_key, **about):
            if not tokens_first:
                return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, **call)
            native = dispatch._AttentionBackendRegistry._backends[_NATIVE]  # noqa: SLF001 - has no public name
            return native(query, key, value, attn_mask, **call)
    chosen: dict[str, Any] = {"backend": settings.backend, "options": settings.options, "return_lse": return_lse}
    if attn_mask is None or not by_key:
        return attend_like_sdpa(query, key, value, attn_mask, tokens_first=tokens_first, **call, **chosen)
    if not tokens_first:
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    output, lse = attend_by_key(query, key, value, attn_mask, scale=call["scale"], **chosen)
    output = output if tokens_first else output.transpose(1, 2)
    return (output, lse) if return_lse else output


def _refuse_argument(name: str) -> None:
    raise NotNegotiatedError(
        f"the attention argument {name!r} was given",
        "models that are bound to attnplug pass query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa "
        "and return_lse",
        f"leave {name!r} out of attention_kwargs, or restore the model",
    )


def _refuse_digits(mask: Tensor, query: Tensor) -> None:
    raise NotNegotiatedError(
        f"an added mask of {mask.dtype} was given to a call in {query.dtype}",
        "backends add a mask in the dtype of the call, which has fewer digits",
        f"pass the mask in {query.dtype}, or bind with native_fallback=True",
    )


def _refuse_mask(mask: str) -> None:
    raise NotNegotiatedError(
        f"{mask} was given to a model that is bound to attnplug",
        "a mask is a tensor: boolean, or added to the scores",
        "restore the model; where its code names a backend of diffusers for this mask, native_fallback=True permits it",
    )


def _refuse_parallel() -> None:
    raise NotNegotiatedError(
        "context parallelism is enabled for a model that is bound to attnplug",
        "each call attends to all of its keys on one device",
        "restore the model, or load it without a context-parallel configuration",
    )
