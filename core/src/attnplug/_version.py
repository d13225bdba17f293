"""The version of the core. Looking it up costs 20 ms, so that nothing imports this module but who asks for it."""

from __future__ import annotations

from importlib.metadata import version

__version__ = version("attnplug")
