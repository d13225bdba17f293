"""
Run models of diffusers on a backend of attnplug, for each model its own.

    with attnplug_diffusers.bind(pipe.transformer, backend="flash_attn"):
        pipe("a cat")
    binding = attnplug_diffusers.bind(pipe.transformer)  # until binding.restore()

The names below load on first use: they import torch and diffusers.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from attnplug_diffusers.binding import Binding as Binding
    from attnplug_diffusers.binding import bind as bind

_HOMES: Final = dict.fromkeys(("Binding", "bind"), "attnplug_diffusers.binding")

__all__ = ["Binding", "bind"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
