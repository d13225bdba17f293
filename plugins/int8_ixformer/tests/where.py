"""Where the kernels of this process run."""

from __future__ import annotations

import os
from typing import Final

import pytest

INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs them."""

DEVICE: Final = "cpu" if INTERPRETED else "cuda"

MARKS: Final = (
    [pytest.mark.filterwarnings("ignore:.*encountered in")]  # what numpy says of infinities that cancel
    if INTERPRETED
    else [pytest.mark.gpu]
)
"""Of a module whose tests run kernels."""
