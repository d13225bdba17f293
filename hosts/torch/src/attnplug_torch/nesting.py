"""
Whether a call is made inside attnplug: there the replaced operators are torch's own.

Backends call torch's operators themselves: the built-in one `scaled_dot_product_attention`, FlashAttention's variant
inside of torch `_flash_attention_forward`, and torch's own operators call each other. None of them has to know of this.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_INSIDE: Final[ContextVar[bool]] = ContextVar("attnplug_torch_inside", default=False)

is_inside: Final = _INSIDE.get
"""Return whether attnplug, or an operator of torch that it called, makes the call. Other threads are outside."""


@contextmanager
def inside() -> Iterator[None]:
    """Make calls from within; autograd is above the replaced operators, and has its own formulas for them."""
    token = _INSIDE.set(True)
    try:
        with torch.no_grad():
            yield
    finally:
        _INSIDE.reset(token)
