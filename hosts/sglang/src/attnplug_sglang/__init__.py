"""
Attention backends of attnplug in SGLang: ``--attention-backend attnplug``, or ``attnplug:flash_attn/fa3_vllm``.

SGLang finds this by the entry point `attnplug` in its group ``sglang.srt.plugins``, and calls `register` in every
process. It imports SGLang and torch on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from attnplug_sglang.backend import AttnplugAttnBackend as AttnplugAttnBackend
    from attnplug_sglang.registration import register as register

_HOMES: Final = {"AttnplugAttnBackend": "attnplug_sglang.backend", "register": "attnplug_sglang.registration"}

__all__ = ["AttnplugAttnBackend", "register"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
