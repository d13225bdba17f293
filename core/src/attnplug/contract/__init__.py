"""
The contract between a host engine and an attention backend.

Plugins write `Backend`, `AttentionImpl`, `MetadataBuilder`, `State` and `Metadata`. Hosts use the handles that hold
these objects: `LoadedBackend`, `Attention`, `StepBuilder` and `Captures`. `Layer`, `Batch`, `Limits` and `Parallel` are
data that hosts hand over. The names load on first use, so that a plugin module can take its hook markers
from here without importing torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnplug._lazy import lazy

if TYPE_CHECKING:
    from attnplug.contract.attention import Attention as Attention
    from attnplug.contract.calls.advance import DecodeInputs as DecodeInputs
    from attnplug.contract.calls.check import check_backend_class as check_backend_class
    from attnplug.contract.calls.op import forward_context as forward_context
    from attnplug.contract.calls.warm_up import dummy_layer as dummy_layer
    from attnplug.contract.calls.warm_up import warm_up as warm_up
    from attnplug.contract.captures import Captures as Captures
    from attnplug.contract.captures import Step as Step
    from attnplug.contract.graphs.buffers import GraphBuffers as GraphBuffers
    from attnplug.contract.graphs.capture import capture as capture
    from attnplug.contract.graphs.dummy import dummy_batch_of as dummy_batch_of
    from attnplug.contract.graphs.shape import GraphShape as GraphShape
    from attnplug.contract.guards.cache import by_phase as by_phase
    from attnplug.contract.hooks import hookimpl as hookimpl
    from attnplug.contract.inputs.batch import PAD_SLOT_ID as PAD_SLOT_ID
    from attnplug.contract.inputs.batch import Batch as Batch
    from attnplug.contract.inputs.cache_form import split_kv as split_kv
    from attnplug.contract.inputs.kv_cache import CacheTensor as CacheTensor
    from attnplug.contract.inputs.kv_cache import KVCache as KVCache
    from attnplug.contract.inputs.kv_cache import is_narrow_float as is_narrow_float
    from attnplug.contract.inputs.kv_cache import torch_dtype as torch_dtype
    from attnplug.contract.inputs.layer import Layer as Layer
    from attnplug.contract.inputs.limits import Limits as Limits
    from attnplug.contract.inputs.limits import Parallel as Parallel
    from attnplug.contract.inputs.phase import BatchSplit as BatchSplit
    from attnplug.contract.inputs.phase import Phase as Phase
    from attnplug.contract.inputs.upload import upload as upload
    from attnplug.contract.loaded import LoadedBackend as LoadedBackend
    from attnplug.contract.recording import RecordedLayer as RecordedLayer
    from attnplug.contract.recording import RecordedStep as RecordedStep
    from attnplug.contract.recording import Recording as Recording
    from attnplug.contract.recording import read_steps as read_steps
    from attnplug.contract.step_builder import StepBuilder as StepBuilder
    from attnplug.contract.vendor import AttentionImpl as AttentionImpl
    from attnplug.contract.vendor import Backend as Backend
    from attnplug.contract.vendor import Metadata as Metadata
    from attnplug.contract.vendor import MetadataBuilder as MetadataBuilder
    from attnplug.contract.vendor import State as State

_MODULES: Final = {
    "attnplug.contract.attention": "Attention",
    "attnplug.contract.calls.advance": "DecodeInputs",
    "attnplug.contract.calls.check": "check_backend_class",
    "attnplug.contract.calls.op": "forward_context",
    "attnplug.contract.calls.warm_up": "dummy_layer warm_up",
    "attnplug.contract.captures": "Captures Step",
    "attnplug.contract.graphs.buffers": "GraphBuffers",
    "attnplug.contract.graphs.capture": "capture",
    "attnplug.contract.graphs.dummy": "dummy_batch_of",
    "attnplug.contract.graphs.shape": "GraphShape",
    "attnplug.contract.guards.cache": "by_phase",
    "attnplug.contract.hooks": "hookimpl",
    "attnplug.contract.inputs.batch": "Batch PAD_SLOT_ID",
    "attnplug.contract.inputs.cache_form": "split_kv",
    "attnplug.contract.inputs.kv_cache": "CacheTensor KVCache is_narrow_float torch_dtype",
    "attnplug.contract.inputs.layer": "Layer",
    "attnplug.contract.inputs.limits": "Limits Parallel",
    "attnplug.contract.inputs.phase": "BatchSplit Phase",
    "attnplug.contract.inputs.upload": "upload",
    "attnplug.contract.loaded": "LoadedBackend",
    "attnplug.contract.recording": "RecordedLayer RecordedStep Recording read_steps",
    "attnplug.contract.step_builder": "StepBuilder",
    "attnplug.contract.vendor": "AttentionImpl Backend Metadata MetadataBuilder State",
}

__getattr__, __dir__, __all__ = lazy(__name__, _MODULES)
