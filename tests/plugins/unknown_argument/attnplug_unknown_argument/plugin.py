"""The hook."""

from __future__ import annotations

from attnplug.contract.hooks import hookimpl


@hookimpl
def attnplug_backend(variant, colour):
    raise AssertionError
