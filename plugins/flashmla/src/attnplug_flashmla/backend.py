"""The backend."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

from attnplug.contract import Backend, dummy_batch_of, warm_up
from attnplug_flashmla.builder import FlashMLABuilder, FlashMLAMetadata
from attnplug_flashmla.impl import FlashMLAImpl
from attnplug_flashmla.kernels import Kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.contract import GraphShape, LoadedBackend


class FlashMLABackend(Backend):
    """FlashMLA's dense kernels, over latents in pages of 64 tokens."""

    impl_class = FlashMLAImpl
    builder_class = FlashMLABuilder
    metadata_class = FlashMLAMetadata
    cache_alignment = 16  # the kernels load by TMA, whose strides are multiples of 16 bytes

    @cached_property
    def kernels(self) -> Kernels:
        """The library, imported at its first use."""
        return Kernels(self.agreement)

    def warmup(self, loaded: LoadedBackend, shapes: Sequence[GraphShape]) -> None:
        """Load the kernels, and compile the write into the KV cache."""
        if shapes:
            warm_up(loaded, [dummy_batch_of(self.agreement, self.device, [1])])
