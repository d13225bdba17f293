"""The backend."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Final

from attnplug.contract import Backend
from attnplug_blocksparse.builder import BlocksparseBuilder
from attnplug_blocksparse.decode import scratch_bytes
from attnplug_blocksparse.impl import BlocksparseImpl
from attnplug_blocksparse.launching import INTERPRETED
from attnplug_blocksparse.state import BlocksparseState
from attnplug_blocksparse.tiles import DecodeTiles, PrefillTiles
from attnplug_blocksparse.warmup import run_each_kernel

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.contract import GraphKey, Limits

_MUCH_SHARED_MEMORY: Final = ((8, 0), (9, 0), (10, 0), (10, 3))
"""Compute capabilities whose multiprocessors lend a program 160 KiB or more."""

_MULTIPROCESSORS: Final = 132
"""Of an H100 or H200, where a device does not say."""


class BlocksparseBackend(Backend):
    """Local blocks and vertical strides, over a paged cache, or over keys and values that come with the call."""

    impl_class = BlocksparseImpl
    builder_class = BlocksparseBuilder
    state_class = BlocksparseState

    @cached_property
    def prefill_tiles(self) -> PrefillTiles:
        """How chunks are computed, and prompts that are short."""
        capability = self.selection.device.compute_capability
        is_small = capability is not None and capability.number not in _MUCH_SHARED_MEMORY
        return PrefillTiles.of(self.agreement.requirements.head_size, has_much_shared_memory=not is_small)

    @cached_property
    def prompt_tiles(self) -> PrefillTiles:
        """How long prompts in one piece are computed, by descriptors."""
        return PrefillTiles.by_descriptors(self.agreement.requirements.head_size)

    @cached_property
    def decode_tiles(self) -> DecodeTiles:
        """How decodes are computed."""
        return DecodeTiles.of(self.agreement.requirements.head_size)

    @property
    def has_descriptors(self) -> bool:
        """Whether the device loads tiles by descriptors, or whoever interprets the kernels does."""
        capability = self.selection.device.compute_capability
        return INTERPRETED if capability is None else capability.number in _MUCH_SHARED_MEMORY[1:]

    @property
    def multiprocessors(self) -> int:
        """Of the device that was selected for."""
        return self.selection.device.num_multiprocessors or _MULTIPROCESSORS

    def workspace_bytes(self, limits: Limits) -> int:
        """Return the size of the partial results of the decodes: as many as programs are wanted, and one a request."""
        asked = self.agreement.requirements
        if not asked.paged or "decode" not in asked.phases:
            return 0
        parts = self.decode_tiles.most_parts(limits.max_num_reqs, asked.num_kv_heads, self.multiprocessors)
        return scratch_bytes(parts, asked.num_q_heads, asked.head_size)

    def warmup(self, shapes: Sequence[GraphKey]) -> None:
        """Compile the kernels: a tiny step of each kind is run."""
        if shapes:
            run_each_kernel(self)
