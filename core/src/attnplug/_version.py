"""The version of core. The look-up takes 20 ms, so only those that need the version import this module."""

from __future__ import annotations

from importlib.metadata import version

__version__ = version("attnplug")
