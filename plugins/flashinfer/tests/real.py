"""The plugin on FlashInfer itself, installed or offered by hand, for tests on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
import torch

import attnplug
import attnplug_flashinfer
from attnplug.errors import DuplicateBackendError
from attnplug.selection import state

if TYPE_CHECKING:
    from attnplug.contract import Backend

VARIANTS: Final = ("fa2", "fa3")


def offer() -> None:
    """Offer the plugin to this process, where its library is."""
    pytest.importorskip("flashinfer", reason="pip install 'flashinfer-python>=0.6.8,<0.7.3'")
    manifest = Path(attnplug_flashinfer.__file__).with_name("attnplug.toml")
    try:
        attnplug.register("attnplug_flashinfer.plugin", manifest=manifest)
    except DuplicateBackendError:  # it is installed
        assert "flashinfer" in {plugin.name for plugin in state.registry().plugins}


def load(requirements: attnplug.Requirements, variant: str = "fa2", **options: Any) -> Backend:
    """Return the backend for a variant, with options, or skip the test where this GPU does not run it."""
    if variant == "fa3" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the kernels of fa3 are for compute capability 9.0")
    return attnplug.load(requirements, backend=f"flashinfer/{variant}", options={"flashinfer": options})
