"""The hook."""

from __future__ import annotations

from attnplug.contract import hookimpl


@hookimpl
def attnplug_backend(variant, colour):
    raise AssertionError
