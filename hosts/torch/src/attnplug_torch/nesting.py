"""
Whether a call is made inside attnplug: there the replaced operators are torch's own.

Backends call torch's operators themselves: the built-in one `scaled_dot_product_attention`, FlashAttention's variant
inside of torch `_flash_attention_forward`, and torch's own operators call each other. None of them has to know of this.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from contextvars import Token

    from torch import Tensor

_OUTSIDE, _WITHOUT_GRADIENTS, _WITH_GRADIENTS = range(3)
_INSIDE: Final[ContextVar[int]] = ContextVar("attnplug_torch_inside", default=_OUTSIDE)

is_inside: Final = _INSIDE.get
"""Return whether attnplug, or an operator of torch that it called, makes the call: 0 if not. Threads are apart."""


def records_gradients(*tensors: Tensor) -> bool:
    """Return whether autograd records the call that is being served, and one of its tensors requires a gradient."""
    return _INSIDE.get() == _WITH_GRADIENTS and any(one.requires_grad for one in tensors)


class inside:  # noqa: N801 - a context manager, and no function that makes one: each call enters it
    """
    Make calls from within, without recording gradients.

    Autograd is above the replaced operators, and has its own formulas for them.
    """

    __slots__ = ("_records", "_token")
    _records: bool
    _token: Token[int]

    def __enter__(self) -> None:
        self._records = torch.is_grad_enabled()
        self._token = _INSIDE.set(_WITH_GRADIENTS if self._records else _WITHOUT_GRADIENTS)
        if self._records:
            torch.set_grad_enabled(False)

    def __exit__(self, *error: object) -> None:
        if self._records:
            torch.set_grad_enabled(True)
        _INSIDE.reset(self._token)
