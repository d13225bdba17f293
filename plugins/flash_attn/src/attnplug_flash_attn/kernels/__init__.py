"""Adapters of the kernel libraries to one interface."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from attnplug_flash_attn.kernels.interface import Kernels

ADAPTERS: Final = {
    "fa2": "fa2:Fa2",
    "fa2_vllm": "fa2:Fa2Vllm",
    "fa3": "fa3:Fa3",
    "fa3_vllm": "fa3:Fa3Vllm",
    "fa3_tokenspeed": "fa3:Fa3Tokenspeed",
    "fa4": "fa4:Fa4",
    "torch": "fa2:TorchFlash",
}
"""The module and class of each variant's adapter."""


def kernels_of(variant: str) -> type[Kernels]:
    """Return the adapter of a variant. Its constructor imports the library."""
    module, _, name = ADAPTERS[variant].partition(":")
    adapter: type[Kernels] = getattr(import_module(f"{__name__}.{module}"), name)
    return adapter
