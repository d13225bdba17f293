"""
What backends are tested with: the conformance kit, its oracle, and the commands `check`, `new` and `bench`.

Public are the names of `attnplug_kit.conformance`, `attnplug_kit.oracle` and `attnplug_kit.bench`.
"""

from __future__ import annotations

from typing import Final

__all__: Final[list[str]] = []
