"""
A plugin system for attention kernels: a small core that negotiates, one distribution per backend, chosen at run time.

    req = attnplug.Requirements(head_size=64, num_q_heads=64, num_kv_heads=8, dtype="bfloat16", sinks=True)
    pick = attnplug.select(req)       # pure: no plugin, no kernel library, no torch is imported
    print(attnplug.explain(req))      # why this one, and why not the others
    backend = attnplug.load(req)      # import, check, probe

Names are imported when first used (PEP 562), so that ``import attnplug`` takes 2 ms.
"""

from __future__ import annotations

from attnplug._lazy import lazy

TYPE_CHECKING = False  # true to type checkers; `typing` would take 17 of the 19 ms of a bare ``import attnplug``
if TYPE_CHECKING:
    from attnplug._version import __version__ as __version__
    from attnplug.contract.inputs.batch import Batch as Batch
    from attnplug.contract.inputs.layer import Layer as Layer
    from attnplug.contract.inputs.limits import Limits as Limits
    from attnplug.contract.inputs.limits import Parallel as Parallel
    from attnplug.dense.functions import attention as attention
    from attnplug.dense.functions import attention_varlen as attention_varlen
    from attnplug.discovery.plugin import Plugin as Plugin
    from attnplug.discovery.registry import Registry as Registry
    from attnplug.errors import AttnplugError as AttnplugError
    from attnplug.errors import NoBackendError as NoBackendError
    from attnplug.negotiation.agreement import Agreement as Agreement
    from attnplug.negotiation.reason import Fix as Fix
    from attnplug.negotiation.reason import Reason as Reason
    from attnplug.negotiation.verdict import Verdict as Verdict
    from attnplug.request.device import Device as Device
    from attnplug.request.requirements import Requirements as Requirements
    from attnplug.request.settings import Settings as Settings
    from attnplug.selection.explanation import Explanation as Explanation
    from attnplug.selection.load import load as load
    from attnplug.selection.plan import Plan as Plan
    from attnplug.selection.plan import plan as plan
    from attnplug.selection.process import current_device as current_device
    from attnplug.selection.process import refresh as refresh
    from attnplug.selection.process import register as register
    from attnplug.selection.process import registry as registry
    from attnplug.selection.scope import kv_cache_layout as kv_cache_layout
    from attnplug.selection.scope import scope_key as scope_key
    from attnplug.selection.scope import using as using
    from attnplug.selection.select import explain as explain
    from attnplug.selection.select import select as select
    from attnplug.selection.selection import Selection as Selection

_MODULES = {
    "attnplug._version": "__version__",
    "attnplug.contract.inputs.batch": "Batch",
    "attnplug.contract.inputs.layer": "Layer",
    "attnplug.contract.inputs.limits": "Limits Parallel",
    "attnplug.dense.functions": "attention attention_varlen",
    "attnplug.discovery.plugin": "Plugin",
    "attnplug.discovery.registry": "Registry",
    "attnplug.errors": "AttnplugError NoBackendError",
    "attnplug.negotiation.agreement": "Agreement",
    "attnplug.negotiation.reason": "Fix Reason",
    "attnplug.negotiation.verdict": "Verdict",
    "attnplug.request.device": "Device",
    "attnplug.request.requirements": "Requirements",
    "attnplug.request.settings": "Settings",
    "attnplug.selection.explanation": "Explanation",
    "attnplug.selection.load": "load",
    "attnplug.selection.plan": "Plan plan",
    "attnplug.selection.process": "current_device refresh register registry",
    "attnplug.selection.scope": "kv_cache_layout scope_key using",
    "attnplug.selection.select": "explain select",
    "attnplug.selection.selection": "Selection",
}

__getattr__, __dir__, __all__ = lazy(__name__, _MODULES)
