"""Where the kernels of this process run."""

from __future__ import annotations

import os
from typing import Final

import pytest

INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether Triton's interpreter runs them."""

DEVICE: Final = "cpu" if INTERPRETED else "cuda"

MARKS: Final = (
    # what numpy says of infinities that cancel, and of rows of nothing but NaN
    [pytest.mark.filterwarnings("ignore:.*encountered in", "ignore:All-NaN slice encountered")]
    if INTERPRETED
    else [pytest.mark.gpu]
)
"""Of a module whose tests run kernels."""
