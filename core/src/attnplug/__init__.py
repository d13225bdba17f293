"""
Attention backends as parts: a small core that negotiates, and one distribution per backend, chosen at run time.

    req = attnplug.Requirements(head_size=64, num_q_heads=64, num_kv_heads=8, dtype="bfloat16", sinks=True)
    pick = attnplug.select(req)       # pure: no plugin, no kernel library, no torch is imported
    print(attnplug.explain(req))      # why this one, and why not the others
    backend = attnplug.load(req)      # import, check, probe

Names are imported when first used (PEP 562), so that ``import attnplug`` costs what attrs costs.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from attnplug.contract.batch import Batch as Batch
    from attnplug.contract.layer import Layer as Layer
    from attnplug.contract.limits import Limits as Limits
    from attnplug.contract.limits import Parallel as Parallel
    from attnplug.discovery.registry import Registry as Registry
    from attnplug.errors import AttnplugError as AttnplugError
    from attnplug.errors import NoBackendError as NoBackendError
    from attnplug.negotiation.agreement import Agreement as Agreement
    from attnplug.negotiation.reason import Reason as Reason
    from attnplug.negotiation.remedy import Remedy as Remedy
    from attnplug.negotiation.verdict import Verdict as Verdict
    from attnplug.request.device import Device as Device
    from attnplug.request.requirements import Requirements as Requirements
    from attnplug.request.settings import Settings as Settings
    from attnplug.selection.explanation import Explanation as Explanation
    from attnplug.selection.kv_layout import kv_cache_layout as kv_cache_layout
    from attnplug.selection.load import load as load
    from attnplug.selection.plan import Plan as Plan
    from attnplug.selection.plan import plan as plan
    from attnplug.selection.register import register as register
    from attnplug.selection.scope import using as using
    from attnplug.selection.select import explain as explain
    from attnplug.selection.select import select as select
    from attnplug.selection.selection import Selection as Selection
    from attnplug.selection.state import refresh as refresh
    from attnplug.selection.state import registry as registry

_HOMES: Final = {
    "Agreement": "negotiation.agreement",
    "AttnplugError": "errors",
    "Batch": "contract.batch",
    "Device": "request.device",
    "Explanation": "selection.explanation",
    "Layer": "contract.layer",
    "Limits": "contract.limits",
    "NoBackendError": "errors",
    "Parallel": "contract.limits",
    "Plan": "selection.plan",
    "Reason": "negotiation.reason",
    "Registry": "discovery.registry",
    "Remedy": "negotiation.remedy",
    "Requirements": "request.requirements",
    "Selection": "selection.selection",
    "Settings": "request.settings",
    "Verdict": "negotiation.verdict",
    "explain": "selection.select",
    "kv_cache_layout": "selection.kv_layout",
    "load": "selection.load",
    "plan": "selection.plan",
    "refresh": "selection.state",
    "register": "selection.register",
    "registry": "selection.state",
    "select": "selection.select",
    "using": "selection.scope",
}

__all__ = ["__version__", *sorted(_HOMES)]  # noqa: PLE0604 - the names are texts, spread from the table


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(_import(f"attnplug.{_HOMES[name]}", name), name)
        globals()[name] = value
        return value
    if name == "__version__":
        from importlib.metadata import version  # noqa: PLC0415 - costs 20 ms, and few ask

        return version("attnplug")
    msg = f"module 'attnplug' has no attribute {name!r}"
    raise AttributeError(msg)


def _import(module: str, name: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        msg = f"attnplug.{name} needs torch, which is not installed\n  way out: pip install 'attnplug[torch]'"
        raise ImportError(msg, name="torch") from error


def __dir__() -> list[str]:
    return sorted(__all__)
