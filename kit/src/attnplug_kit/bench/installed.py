"""What is installed here, without any settings: made-up plugins come beside it."""

from __future__ import annotations

from attnplug import Registry
from attnplug.request import Settings


def installed() -> Registry:
    """Return the registry of a process without settings."""
    return Registry.scan(Settings())
