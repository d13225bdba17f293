"""Captures a call in a CUDA graph, to replay it on the same tensors."""

from __future__ import annotations

from functools import partial
from threading import local
from typing import TYPE_CHECKING, Any, Final, TypeVar

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_T = TypeVar("_T")
_EMULATED: Final = local()  # `active` while this thread records a call without CUDA


def capture(call: Callable[[], _T], device: torch.device, *, pool: Any = None) -> tuple[_T, Callable[[], object]]:
    """
    Run a call, record it, and return what the recorded run returned and how to replay it.

    On CUDA the call is captured in a graph, after a run on a side stream that compiles and loads what the first use
    would. Elsewhere a replay is the call itself, made again: it sees what a graph would see, the tensors of now, and
    its result is copied into the tensors of the first run.

    The replay keeps the call alive, and with it the tensors that it holds: a graph knows their addresses alone.

    Args:
        call: Launches work on tensors that never move; returns a tensor, a tuple of tensors, or None.
        device: Where it runs.
        pool: Memory to share with other graphs, as `torch.cuda.graph` takes it; such graphs replay one at a time.
    """
    if device.type != "cuda":
        return _emulated(call)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Other threads go on meanwhile: what they do is recorded in no graph of this one.
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        result = call()
    return result, partial(_replay, graph, call)


def is_capturing(device: torch.device) -> bool:
    """Whether a graph records what this thread launches. Without CUDA: whether `capture` runs."""
    if device.type == "cuda":
        return torch.cuda.is_current_stream_capturing()
    return getattr(_EMULATED, "active", False)


def _emulated(call: Callable[[], _T]) -> tuple[_T, Callable[[], object]]:
    before, _EMULATED.active = getattr(_EMULATED, "active", False), True
    try:
        result = call()
    finally:
        _EMULATED.active = before
    return result, lambda: _copy(result, call())


def _replay(graph: torch.cuda.CUDAGraph, _call: Callable[[], object]) -> None:
    graph.replay()


def _copy(kept: Any, fresh: Any) -> None:
    if isinstance(kept, torch.Tensor):
        kept.copy_(fresh)
    elif isinstance(kept, tuple):
        for old, new in zip(kept, fresh, strict=True):
            _copy(old, new)
