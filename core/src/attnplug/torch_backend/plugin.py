"""The entry point of the embedded backend: the same two hooks as any plugin's. torch is imported inside them."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from attnplug.contract.hooks import hookimpl
from attnplug.negotiation.reason import Reason

if TYPE_CHECKING:
    from attnplug.contract.backend import Backend
    from attnplug.negotiation.agreement import Agreement
    from attnplug.request.device import Device


@hookimpl
def attnplug_backend(variant: str, agreement: Agreement) -> type[Backend]:
    """Return the backend class of a variant."""
    del agreement
    from attnplug.torch_backend.backend import FlexBackend, TorchBackend  # noqa: PLC0415 - torch loads with the choice

    return FlexBackend if variant == "flex" else TorchBackend


@hookimpl
def attnplug_probe(variant: str, agreement: Agreement, device: Device) -> Reason | None:
    """Triton compiles a launcher for its kernels with a C compiler, which no wheel brings."""
    del agreement, device
    compilers = (os.environ.get("CC", ""), "gcc", "clang", "cc")
    if variant != "flex" or any(shutil.which(compiler) for compiler in compilers):
        return None
    because = "install gcc or clang, or set CC to a C compiler"
    return Reason("probe", variant, None, "Triton needs a C compiler, and none is on the PATH", because)
