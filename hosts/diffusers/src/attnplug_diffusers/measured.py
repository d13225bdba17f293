"""Calls for which diffusers' native attention was measured to be faster than a backend: it runs them."""

from __future__ import annotations

from typing import Final

from attnplug.dense import NativeRow, NativeRows

FASTER_NATIVELY: Final = NativeRows(
    "docs/reference/evidence/diffusers-h200.md",
    NativeRow("flash_attn/fa3_vllm", (9, 0), 1, 0.85, "one token"),
    NativeRow("flash_attn/fa3_vllm", (9, 0), 512, 0.74, "Wan 1.3B, 480p, 81 frames: cross"),
    NativeRow("flash_attn/fa3_vllm", (9, 0), 1536, 0.93, "Flux, 512 px: joint"),
    NativeRow("flash_attn/fa4", (9, 0), 512, 0.77, "Wan 1.3B, 480p, 81 frames: cross"),
)
"""From 4,429 keys on, both backends are faster in every row of the page."""
