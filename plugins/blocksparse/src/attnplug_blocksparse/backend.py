"""The backend."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

from attnplug.contract import Backend
from attnplug.ops import split_bytes
from attnplug_blocksparse.builder import BlocksparseBuilder
from attnplug_blocksparse.impl import BlocksparseImpl
from attnplug_blocksparse.prefill_single import has_specialized_kernel
from attnplug_blocksparse.state import BlocksparseState
from attnplug_blocksparse.tiles import HOPPER_SHARED_MEMORY, DecodeTiles, HopperTiles, PrefillTiles
from attnplug_blocksparse.triton_ops import INTERPRETED
from attnplug_blocksparse.warmup import run_warmup

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.contract import GraphShape, Limits, LoadedBackend

_HOPPER: Final = (9, 0)
"""The compute capability with warpgroup MMA (wgmma); later ones lack it."""

_TMA: Final = (_HOPPER, (10, 0), (10, 3))
"""Compute capabilities with TMA descriptors for these tiles, and Hopper's shared memory."""

_SHARED_MEMORY: Final = {(8, 0): 163 * 1024} | dict.fromkeys(_TMA, HOPPER_SHARED_MEMORY)
"""Bytes of shared memory per program (CUDA C++ Programming Guide, Compute Capabilities)."""

_MIN_SHARED_MEMORY: Final = 99 * 1024
"""Bytes of shared memory per program on the other compute capabilities from 8.0 on."""

_MULTIPROCESSORS: Final = 132
"""Multiprocessors of an H100 or H200, for devices that do not report theirs."""


class BlocksparseBackend(Backend):
    """Attention over local blocks and vertical strides, with a paged KV cache or contiguous K/V."""

    impl_class = BlocksparseImpl
    builder_class = BlocksparseBuilder
    state_class = BlocksparseState
    supports_max_num_splits = True

    @cached_property
    def contiguous_tiles(self) -> PrefillTiles:
        """Tile sizes of prefills with contiguous K/V."""
        return PrefillTiles.of(self.agreement.requirements.head_size, shared_memory=self._shared_memory)

    @cached_property
    def paged_tiles(self) -> PrefillTiles:
        """Tile sizes of prefills with paged K/V."""
        return PrefillTiles.of(self.agreement.requirements.head_size, paged=True, shared_memory=self._shared_memory)

    @property
    def _shared_memory(self) -> int:
        capability = self.device_properties.compute_capability
        if capability is None:
            return HOPPER_SHARED_MEMORY
        return _SHARED_MEMORY.get(capability.number, _MIN_SHARED_MEMORY)

    @cached_property
    def decode_tiles(self) -> DecodeTiles:
        """Tile sizes of decodes."""
        return DecodeTiles.of(self.agreement.requirements.head_size)

    @property
    def has_tma(self) -> bool:
        """Whether the device, or the interpreter, loads tiles through TMA descriptors."""
        capability = self.device_properties.compute_capability
        return INTERPRETED if capability is None else capability.number in _TMA

    @cached_property
    def hopper_tiles(self) -> HopperTiles | None:
        """Tile sizes of the warp-specialized kernel, or None where the device or Triton does not support it."""
        capability = self.device_properties.compute_capability
        if capability is None or capability.number != _HOPPER or not has_specialized_kernel():
            return None
        return HopperTiles(self.multiprocessors)

    @property
    def multiprocessors(self) -> int:
        """Multiprocessors of the device."""
        return self.device_properties.num_multiprocessors or _MULTIPROCESSORS

    def workspace_bytes(self, limits: Limits) -> int:
        """Return the bytes of the partial outputs of split decodes."""
        requested = self.agreement.requirements
        if not requested.paged or "decode" not in requested.phases:
            return 0
        splits = self.decode_tiles.max_parts(limits.max_num_reqs, requested.num_kv_heads, self.multiprocessors)
        return split_bytes(splits, requested.num_q_heads, requested.head_size)

    def warmup(self, loaded: LoadedBackend, shapes: Sequence[GraphShape]) -> None:
        """Compile the kernels by a tiny step of each kind."""
        if shapes:
            run_warmup(self, loaded)
