"""Calls for which torch's own operator was measured to be faster than a backend: they are left to torch."""

from __future__ import annotations

from typing import Final

from attnplug.dense import NativeRow, NativeRows

_PAGE: Final = "docs/reference/evidence/torch-h200.md"

FASTER_NATIVELY: Final = NativeRows(
    _PAGE,
    NativeRow("flash_attn/fa3_vllm", (9, 0), 8, 0.49, "sdpa causal 1x4x8x64"),
    NativeRow("flash_attn/fa4", (9, 0), 8, 0.86, "sdpa causal 1x4x8x64"),
)
"""Of padded calls. The next longer ones on the page have 2,048 keys, for which both backends are faster."""

FASTER_PACKED: Final = NativeRows(
    _PAGE,
    NativeRow("flash_attn/fa3_vllm", (9, 0), 2048, 0.88, "varlen causal 4x16x2048x128"),
    NativeRow("flash_attn/fa4", (9, 0), 8, 0.91, "varlen causal 1x4x8x64"),
)
"""Of packed calls: each waits for the device, to read its lengths, where torch's operator does not."""
