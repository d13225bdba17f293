"""
What stands in for libraries that SGLang imports and that have no build here.

torchvision registers descriptions of its compiled operators, which need the CUDA build of torch that it was made for:
without them it imports, and nothing here calls them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

_REGISTER = torch.library.register_fake


def _register_fake(op: Any, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    if isinstance(op, str) and op.startswith("torchvision::"):
        return lambda function: function
    return _REGISTER(op, *args, **kwargs)  # type: ignore[return-value]


def install() -> None:
    """Let torchvision import; the second call changes nothing."""
    torch.library.register_fake = _register_fake
