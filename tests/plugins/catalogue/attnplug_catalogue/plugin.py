"""The hook; its kernel library exists nowhere."""

from __future__ import annotations

from attnplug.contract import hookimpl


@hookimpl
def attnplug_backend(variant, agreement):
    import acme_flash_kernels  # noqa: PLC0415 - imported when the backend is

    return acme_flash_kernels.BACKENDS[variant]
