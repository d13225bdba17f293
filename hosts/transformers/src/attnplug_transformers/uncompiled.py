"""What torch.compile leaves out of its graphs, and why."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

REASON: Final = (
    "attnplug does not support torch.compile(fullgraph=True) of a transformers model yet; "
    "call torch.compile without fullgraph=True, which breaks the graph around the attention, or run without it"
)


def uncompiled(function: _Function) -> _Function:
    """Keep torch.compile out of a function. Who asks for one graph is told why there is none, where torch can say."""
    disable: Any = torch.compiler.disable
    says_why = "reason" in inspect.signature(disable).parameters
    kept_out: _Function = disable(function, reason=REASON) if says_why else disable(function)
    return kept_out
