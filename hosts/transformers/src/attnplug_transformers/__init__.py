"""
Run the attention of transformers' models through attnplug.

    import attnplug_transformers as host

    host.requirements(config)                         # what each layer asks for, from the configuration alone
    host.register()
    model.set_attn_implementation("attnplug")         # or attn_implementation="attnplug" when the model is made
    model.generate(...)
    host.selections(model)                            # which backend each layer runs on, and why

Reading configurations needs neither transformers nor torch; the other names are imported when first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from attnplug.models import requirements, requirements_from_json

if TYPE_CHECKING:
    from attnplug_transformers.registration import KEY as KEY
    from attnplug_transformers.registration import register as register
    from attnplug_transformers.registration import selections as selections

_HOMES: Final = {"KEY": "registration", "register": "registration", "selections": "registration"}

__all__ = ["KEY", "register", "requirements", "requirements_from_json", "selections"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
