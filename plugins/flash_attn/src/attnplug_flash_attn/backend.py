"""The backend: one class for all variants, which differ in their kernel library."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from attnplug.contract import Backend
from attnplug_flash_attn.builder import FlashAttentionBuilder
from attnplug_flash_attn.impl import FlashAttentionImpl
from attnplug_flash_attn.kernels import kernels_of
from attnplug_flash_attn.packing import workspace_bytes
from attnplug_flash_attn.warmup import run_each_pass

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.contract import GraphShape, Limits, LoadedBackend
    from attnplug_flash_attn.kernels.interface import Kernels


class FlashAttentionBackend(Backend):
    """FlashAttention with a paged KV cache, or with contiguous (non-paged) K/V."""

    impl_class = FlashAttentionImpl
    builder_class = FlashAttentionBuilder
    supports_max_num_splits = True
    cache_alignment = 16  # the kernels load 16 bytes at a time

    @cached_property
    def kernels(self) -> Kernels:
        """The kernel library of the variant, imported at its first use."""
        return kernels_of(self.variant)(self.agreement)

    def workspace_bytes(self, limits: Limits) -> int:
        """Return the size of the buffer into which pages are packed for a library without paged kernels."""
        if not self.agreement.requirements.paged or self.kernels.paged:
            return 0
        return workspace_bytes(self.agreement, limits)

    def warmup(self, loaded: LoadedBackend, shapes: Sequence[GraphShape]) -> None:
        """Run a small step of each kind, which compiles the kernels that are compiled at first use."""
        if shapes:
            run_each_pass(self, loaded)
