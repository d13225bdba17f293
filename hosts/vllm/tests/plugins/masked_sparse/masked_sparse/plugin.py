"""The entry point."""

from __future__ import annotations

from attnplug.contract import hookimpl


@hookimpl
def attnplug_backend(variant, agreement):
    """Return the backend class."""
    from masked_sparse.backend import MaskedBackend  # noqa: PLC0415 - selection imports no backend

    del variant, agreement
    return MaskedBackend
