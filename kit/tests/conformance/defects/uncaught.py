"""The defects that no test of the kit catches, and why."""

from __future__ import annotations

UNCAUGHT = {
    "offsets_of32_bits": "beyond 2^31 elements keys have 2 GiB in FP8, and 8 in float32: the kit's have 128 MiB",
}
