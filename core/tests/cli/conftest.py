"""The command line with plugins of a scratch folder: fixtures that other tests of commands share."""

from __future__ import annotations

from tests.command import empty, no_plugins, on_terminal, run, site, start

__all__ = ["empty", "no_plugins", "on_terminal", "run", "site", "start"]
