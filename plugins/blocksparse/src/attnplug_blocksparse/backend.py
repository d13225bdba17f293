"""The backend."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

from attnplug.contract import Backend
from attnplug_blocksparse import hopper
from attnplug_blocksparse.builder import BlocksparseBuilder
from attnplug_blocksparse.decode import scratch_bytes
from attnplug_blocksparse.impl import BlocksparseImpl
from attnplug_blocksparse.state import BlocksparseState
from attnplug_blocksparse.tiles import HOPPER_SHARED_MEMORY, DecodeTiles, HopperTiles, PrefillTiles
from attnplug_blocksparse.triton_softmax import INTERPRETED
from attnplug_blocksparse.warmup import run_each_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.contract import GraphShape, Limits

_HOPPER: Final = (9, 0)
"""The compute capability that has warpgroups' products, which later ones have not."""

_WITH_DESCRIPTORS: Final = (_HOPPER, (10, 0), (10, 3))
"""Compute capabilities that load tiles by descriptors, and have Hopper's shared memory."""

_SHARED_MEMORY: Final = {(8, 0): 163 * 1024} | dict.fromkeys(_WITH_DESCRIPTORS, HOPPER_SHARED_MEMORY)
"""Bytes that a program may have, by compute capability (CUDA C++ Programming Guide, Compute Capabilities)."""

_LEAST_SHARED_MEMORY: Final = 99 * 1024
"""Of the others from 8.0 on."""

_MULTIPROCESSORS: Final = 132
"""Of an H100 or H200, where a device does not say."""


class BlocksparseBackend(Backend):
    """Local blocks and vertical strides, over a paged cache, or over keys and values that come with the call."""

    impl_class = BlocksparseImpl
    builder_class = BlocksparseBuilder
    state_class = BlocksparseState
    supports_max_num_splits = True

    @cached_property
    def row_tiles(self) -> PrefillTiles:
        """How prompts in one piece are computed, whose keys come with the call."""
        return PrefillTiles.of(self.agreement.requirements.head_size, shared_memory=self._shared_memory)

    @cached_property
    def page_tiles(self) -> PrefillTiles:
        """How chunks are computed, whose keys are in pages."""
        return PrefillTiles.of(self.agreement.requirements.head_size, paged=True, shared_memory=self._shared_memory)

    @property
    def _shared_memory(self) -> int:
        capability = self.device_properties.compute_capability
        if capability is None:
            return HOPPER_SHARED_MEMORY
        return _SHARED_MEMORY.get(capability.number, _LEAST_SHARED_MEMORY)

    @cached_property
    def decode_tiles(self) -> DecodeTiles:
        """How decodes are computed."""
        return DecodeTiles.of(self.agreement.requirements.head_size)

    @property
    def has_descriptors(self) -> bool:
        """Whether the device loads tiles by descriptors, or whoever interprets the kernels does."""
        capability = self.device_properties.compute_capability
        return INTERPRETED if capability is None else capability.number in _WITH_DESCRIPTORS

    @cached_property
    def hopper_tiles(self) -> HopperTiles | None:
        """How long prompts and chunks are computed by warps with roles, where the device and Triton allow that."""
        capability = self.device_properties.compute_capability
        if capability is None or capability.number != _HOPPER or not hopper.is_there():
            return None
        return HopperTiles(self.multiprocessors)

    @property
    def multiprocessors(self) -> int:
        """Of the device that was selected for."""
        return self.device_properties.num_multiprocessors or _MULTIPROCESSORS

    def workspace_bytes(self, limits: Limits) -> int:
        """Return the size of the partial results of the decodes: as many as programs are wanted, and one a request."""
        asked = self.agreement.requirements
        if not asked.paged or "decode" not in asked.phases:
            return 0
        parts = self.decode_tiles.most_parts(limits.max_num_reqs, asked.num_kv_heads, self.multiprocessors)
        return scratch_bytes(parts, asked.num_q_heads, asked.head_size)

    def warmup(self, shapes: Sequence[GraphShape]) -> None:
        """Compile the kernels: a tiny step of each kind is run."""
        if shapes:
            run_each_kernel(self)
