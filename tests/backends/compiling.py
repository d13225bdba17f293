"""Triton compiles kernels where there is no GPU: which releases are asked to, and what they make."""

from __future__ import annotations

from importlib import metadata
from importlib.util import find_spec
from typing import Final

import pytest

_RELEASE: Final = (
    tuple(int(part) for part in metadata.version("triton").split(".")[:2]) if find_spec("triton") else None
)

NEEDS_TRITON: Final = pytest.mark.skipif(
    _RELEASE is None or _RELEASE < (3, 3), reason="Triton is not installed, or is before 3.3, which is asked otherwise"
)
"""Of a test that compiles by ``ASTSource``."""

DIVISION: Final = "div.rn.f32" if _RELEASE is None or _RELEASE >= (3, 6) else "div.rn.ftz.f32"
"""The division that rounds to nearest. Before Triton 3.6 it takes subnormal numbers for zero."""
