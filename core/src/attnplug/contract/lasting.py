"""Memory that outlives the call which makes it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def lasting() -> Iterator[None]:
    """
    Make plain tensors inside this context, whatever mode the caller is in.

    Tensors that are made under `torch.inference_mode` cannot be written outside of it: a host that captures under it
    could not build a replay without it.
    """
    with torch.inference_mode(mode=False), torch.no_grad():
        yield
