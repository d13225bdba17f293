"""The hook."""

from __future__ import annotations

from attnplug.contract import hookimpl


@hookimpl
def attnplug_backend(variant, agreement):
    from attnplug_drops_features.backend import DroppingBackend  # noqa: PLC0415 - torch is imported when the backend is

    return DroppingBackend
