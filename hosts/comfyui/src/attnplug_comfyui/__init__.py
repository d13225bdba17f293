"""
Run the attention of a model in ComfyUI through attnplug, by a node or from Python.

    patched = attnplug_comfyui.patch(model)     # a clone whose calls run on the backend that a selection chooses
    ...                                         # sample with it
    for route in attnplug_comfyui.report(patched):
        print(route)

The names load on first use, since most of them import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from attnplug_comfyui.folder import install as install
    from attnplug_comfyui.nodes import NODE_CLASS_MAPPINGS as NODE_CLASS_MAPPINGS
    from attnplug_comfyui.nodes import NODE_DISPLAY_NAME_MAPPINGS as NODE_DISPLAY_NAME_MAPPINGS
    from attnplug_comfyui.override import AttentionOverride as AttentionOverride
    from attnplug_comfyui.patching import override_of as override_of
    from attnplug_comfyui.patching import patch as patch
    from attnplug_comfyui.patching import report as report
    from attnplug_comfyui.routes import Route as Route

_HOMES: Final = {
    "AttentionOverride": "attnplug_comfyui.override",
    "Route": "attnplug_comfyui.routes",
    "install": "attnplug_comfyui.folder",
    **dict.fromkeys(("NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"), "attnplug_comfyui.nodes"),
    **dict.fromkeys(("override_of", "patch", "report"), "attnplug_comfyui.patching"),
}

__all__ = [
    "NODE_CLASS_MAPPINGS",
    "NODE_DISPLAY_NAME_MAPPINGS",
    "AttentionOverride",
    "Route",
    "install",
    "override_of",
    "patch",
    "report",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # a module of the same name must not take its place
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
