"""The hooks. Nothing is imported here that selection could do without."""

from __future__ import annotations

from attnplug.contract import hookimpl

CALLS: list[str] = []
"""Which hooks were called, for tests that count."""


@hookimpl
def attnplug_backend(variant, agreement):
    from attnplug_good.toy import ToyBackend  # noqa: PLC0415 - torch is imported when the backend is

    CALLS.append("backend")
    return ToyBackend


@hookimpl
def attnplug_probe(device):
    CALLS.append("probe")
