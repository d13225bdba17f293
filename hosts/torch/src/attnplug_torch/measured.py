"""Calls for which torch's own operator was measured to be faster than a backend: they are left to torch."""

from __future__ import annotations

from typing import Final

from attnplug.dense import NativeRow, NativeRows

FASTER_NATIVELY: Final = NativeRows(
    "docs/reference/evidence/torch-h200.md",
    NativeRow("flash_attn/fa3_vllm", (9, 0), 8, 0.62, "sdpa causal 1x4x8x64"),
    NativeRow("flash_attn/fa4", (9, 0), 8, 0.86, "sdpa causal 1x4x8x64"),
)
"""The next longer sequences on the page have 2,048 keys, for which both backends are faster."""
