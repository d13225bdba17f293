"""The backend."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.contract import Backend, dummy_batch_of, warm_up
from attnplug_flashmla.builder import FlashMLABuilder, FlashMLAMetadata
from attnplug_flashmla.impl import FlashMLAImpl
from attnplug_flashmla.kernels import Kernels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug import Agreement, Device
    from attnplug.contract import GraphShape, LoadedBackend


class FlashMLABackend(Backend):
    """FlashMLA's kernels, over latents in pages of 64 tokens."""

    impl_class = FlashMLAImpl
    builder_class = FlashMLABuilder
    metadata_class = FlashMLAMetadata
    cache_alignment = 16  # the kernels load by TMA, whose strides are multiples of 16 bytes

    def __init__(self, agreement: Agreement, device: Device) -> None:
        super().__init__(agreement, device)
        self.kernels = Kernels(agreement, self.device)  # if it does not load, the next backend is tried

    def warmup(self, loaded: LoadedBackend, shapes: Sequence[GraphShape]) -> None:
        """Load the kernels, and compile the write into the KV cache."""
        if shapes:
            warm_up(loaded, [dummy_batch_of(self.agreement, self.device, [1])])
