"""The backend, the same for all variants: they differ in their kernel library."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from attrs import evolve

from attnplug.contract import Backend, CacheTensor
from attnplug_flash_attn.builder import FlashAttentionBuilder
from attnplug_flash_attn.impl import FlashAttentionImpl
from attnplug_flash_attn.kernels import kernels_of
from attnplug_flash_attn.packing import workspace_bytes
from attnplug_flash_attn.warmup import run_each_pass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.contract import GraphShape, Limits
    from attnplug_flash_attn.kernels.interface import Kernels

_WITH_LAYERS = {"NHD": (2, 0, 1, 3, 4, 5), "HND": (2, 4, 0, 1, 3, 5)}


class FlashAttentionBackend(Backend):
    """FlashAttention over a paged cache, or over keys and values that come with the call."""

    impl_class = FlashAttentionImpl
    builder_class = FlashAttentionBuilder
    supports_max_num_splits = True

    @cached_property
    def kernels(self) -> Kernels:
        """The kernel library of the variant, imported with the first use."""
        return kernels_of(self.variant)(self.agreement)

    def cache_tensors(self, num_blocks: int) -> dict[str, CacheTensor]:
        """Return the contract's tensors. Where a host keeps all layers in one, a block holds those of all layers."""
        order = _WITH_LAYERS[self.agreement.kv_layout or "NHD"]
        tensors = super().cache_tensors(num_blocks)
        return {
            role: evolve(tensor, layer_stride_order=order) if role == "kv" else tensor
            for role, tensor in tensors.items()
        }

    def workspace_bytes(self, limits: Limits) -> int:
        """Return the size of the memory into which pages are packed for a library that reads none."""
        return (
            workspace_bytes(self.agreement, limits)
            if self.agreement.requirements.paged and not self.kernels.paged
            else 0
        )

    def warmup(self, shapes: Sequence[GraphShape]) -> None:
        """Run one tiny step of each kind: what is compiled at first use is compiled then."""
        if shapes:
            run_each_pass(self)
