"""
What a vendor writes: the contract between a host engine and an attention backend.

`Backend`, `AttentionImpl`, `MetadataBuilder` and `State` are written by plugins; `Layer`, `Batch`, `Limits` and
`Parallel` are data that hosts hand over. The names load on first use, so that a plugin module can take its hook markers
from `attnplug.contract.hooks` without importing torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attnplug.contract.advance import StepTokens
    from attnplug.contract.backend import Backend
    from attnplug.contract.batch import PAD_SLOT_ID, Batch
    from attnplug.contract.builder import MetadataBuilder
    from attnplug.contract.cache_views import CacheViews
    from attnplug.contract.check import check_backend_class
    from attnplug.contract.dtypes import torch_dtype
    from attnplug.contract.graph_key import GraphKey
    from attnplug.contract.impl import AttentionImpl
    from attnplug.contract.kv_cache import Cache, CacheTensor
    from attnplug.contract.layer import Layer
    from attnplug.contract.limits import Limits, Parallel
    from attnplug.contract.metadata import Metadata
    from attnplug.contract.op import forward_context
    from attnplug.contract.phase import Phase
    from attnplug.contract.recording import capture
    from attnplug.contract.slot import GraphSlot
    from attnplug.contract.staging import upload
    from attnplug.contract.state import State, Step

_HOMES = {
    "PAD_SLOT_ID": "batch",
    "AttentionImpl": "impl",
    "Backend": "backend",
    "Batch": "batch",
    "Cache": "kv_cache",
    "CacheTensor": "kv_cache",
    "CacheViews": "cache_views",
    "GraphKey": "graph_key",
    "GraphSlot": "slot",
    "Layer": "layer",
    "Limits": "limits",
    "Metadata": "metadata",
    "MetadataBuilder": "builder",
    "Parallel": "limits",
    "Phase": "phase",
    "State": "state",
    "Step": "state",
    "StepTokens": "advance",
    "capture": "recording",
    "check_backend_class": "check",
    "forward_context": "op",
    "torch_dtype": "dtypes",
    "upload": "staging",
}

__all__ = [
    "PAD_SLOT_ID",
    "AttentionImpl",
    "Backend",
    "Batch",
    "Cache",
    "CacheTensor",
    "CacheViews",
    "GraphKey",
    "GraphSlot",
    "Layer",
    "Limits",
    "Metadata",
    "MetadataBuilder",
    "Parallel",
    "Phase",
    "State",
    "Step",
    "StepTokens",
    "capture",
    "check_backend_class",
    "forward_context",
    "torch_dtype",
    "upload",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
