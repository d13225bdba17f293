"""
Run torch's `scaled_dot_product_attention` and `varlen_attn` through attnplug.

    torch.nn.attention.activate_flash_attention_impl("attnplug")
    ...                                                  # models as they are
    for route in attnplug_torch.report():                # where their calls went, and why
        print(route)
    torch.nn.attention.restore_flash_attention_impl()

torch knows the name without an import of this package: `attnplug_torch.registration.autoload` is called at the end of
``import torch``. The names below load on first use; those that need torch import it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from attnplug_torch.forecast import explain as explain
    from attnplug_torch.registration import NAME as NAME
    from attnplug_torch.registration import register as register
    from attnplug_torch.registration import unregister as unregister
    from attnplug_torch.routes import Route as Route
    from attnplug_torch.routes import report as report
    from attnplug_torch.routes import reset as reset

_HOMES: Final = {
    **dict.fromkeys(("NAME", "register", "unregister"), "attnplug_torch.registration"),
    **dict.fromkeys(("Route", "report", "reset"), "attnplug_torch.routes"),
    "explain": "attnplug_torch.forecast",
}

__all__ = ["NAME", "Route", "explain", "register", "report", "reset", "unregister"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value  # a module of the same name must not take its place
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
