"""The backend, the same for both variants: they differ in the arguments of their wrappers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.contract import Backend
from attnplug_flashinfer.builder import FlashInferBuilder
from attnplug_flashinfer.impl import FlashInferImpl
from attnplug_flashinfer.warmup import run_each_kind
from attnplug_flashinfer.workspace import workspace_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.contract import GraphShape, Limits, LoadedBackend


class FlashInferBackend(Backend):
    """FlashInfer's wrappers over a paged KV cache, or over contiguous (non-paged) K/V."""

    impl_class = FlashInferImpl
    builder_class = FlashInferBuilder
    cache_alignment = 16  # the kernels load 16 bytes at a time

    def workspace_bytes(self, limits: Limits) -> int:
        """Return the size of the library's float workspace in bytes."""
        return workspace_bytes(self.agreement, self.device_properties, limits)

    def warmup(self, loaded: LoadedBackend, shapes: Sequence[GraphShape]) -> None:
        """Compile every kernel that the agreement can use. None depends on the shape of a batch."""
        if shapes:
            run_each_kind(loaded)
