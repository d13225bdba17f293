"""One backend bound to an agreement: where a host gets its cache, implementations, builders and state."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING, ClassVar, final

import torch

from attnplug.contract.builder import MetadataBuilder
from attnplug.contract.dtypes import torch_dtype
from attnplug.contract.kv_cache import Cache, CacheTensor
from attnplug.contract.metadata import Metadata
from attnplug.contract.state import GraphKey, State

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from attnplug.contract.impl import AttentionImpl
    from attnplug.contract.layer import Layer
    from attnplug.contract.limits import Limits, Parallel
    from attnplug.negotiation.agreement import Agreement
    from attnplug.selection.selection import Selection


class Backend(ABC):
    """
    A backend, bound to what was negotiated. A plugin sets `impl_class`, and the other classes where the defaults do not suit.

    Attributes:
        impl_class: One layer's attention.
        builder_class: What turns a batch into metadata.
        metadata_class: What it returns.
        state_class: What owns workspaces.
        selection: The decision that this backend carries out.
    """

    impl_class: ClassVar[type[AttentionImpl]]
    builder_class: ClassVar[type[MetadataBuilder]] = MetadataBuilder
    metadata_class: ClassVar[type[Metadata]] = Metadata
    state_class: ClassVar[type[State]] = State

    def __init__(self, selection: Selection) -> None:
        self.selection = selection

    @property
    def agreement(self) -> Agreement:
        """What was negotiated."""
        return self.selection.agreement

    @property
    def name(self) -> str:
        """The backend's name, such as ``"flash_attn"``."""
        return self.agreement.backend

    @property
    def variant(self) -> str:
        """The variant's name, such as ``"fa3"``."""
        return self.agreement.variant

    @property
    def id(self) -> str:
        """``"backend/variant"``, the same in every process."""
        return self.agreement.id

    @property
    def device(self) -> torch.device:
        """The device type that was selected for."""
        return torch.device(self.selection.device.type)

    def cache_tensors(self, num_blocks: int) -> dict[str, CacheTensor]:
        """
        Describe one layer's cache.

        The default is one role, ``"kv"``, of logical shape ``(2, num_blocks, block_size, num_kv_heads, head_size)``, keys first; where values have another head size,
        the roles ``"k"`` and ``"v"`` without the leading axis. The agreed layout sets the order in memory. Dense agreements have no cache.

        Args:
            num_blocks: Blocks of the cache, the null block 0 included.
        """
        raise NotImplementedError

    @property
    def bytes_per_block(self) -> int:
        """Bytes that one block adds to one layer's cache; 0 without a cache."""
        raise NotImplementedError

    def workspace_bytes(self, limits: Limits) -> int:
        """Return the size of the workspace that batches within these limits need."""
        del limits
        return 0

    @final
    def make_cache(self, num_blocks: int, device: torch.device | str | None = None) -> Cache:
        """
        Return a fresh cache of one layer: a tensor, or a mapping of roles to tensors where there are several.

        Args:
            num_blocks: Blocks, the null block 0 included.
            device: Where it lives; None is the backend's device.

        Raises:
            CacheError: The agreement has no cache, or there are too few blocks.
        """
        raise NotImplementedError

    @final
    def make_impl(self, layer: Layer) -> AttentionImpl:
        """
        Return the implementation of one layer, which is first completed from the agreement.

        Raises:
            NotNegotiatedError: The layer brings what was not asked for, or lacks what was.
            LayerError: A value of the layer is wrong in itself.
            TensorError: A tensor has the wrong shape, dtype or device.
        """
        raise NotImplementedError

    @final
    def make_state(self, limits: Limits, parallel: Parallel | None = None) -> State:
        """
        Return the state that the builders of this backend share.

        Raises:
            LimitsError: The limits contradict the agreement.
        """
        raise NotImplementedError

    @final
    def make_builder(self, impls: Sequence[AttentionImpl], state: State) -> MetadataBuilder:
        """
        Return the builder for layers that share a block table.

        Raises:
            LayerError: There are none, or one was not made by this backend's agreement.
        """
        raise NotImplementedError

    def swap_blocks(self, src: Cache, dst: Cache, src_to_dst: Tensor | Sequence[tuple[int, int]]) -> None:
        """
        Copy whole blocks of one layer from one cache to another, between devices too.

        Every role that has a block axis moves. All sources are read before any block is written, so that overlapping pairs mean what they say.

        Args:
            src: The cache that is read.
            dst: The cache that is written; may be `src`.
            src_to_dst: ``(n, 2)`` pairs of source and destination block.

        Raises:
            CacheError: A block is outside its cache, or is the destination of two sources.
        """
        raise NotImplementedError

    def copy_blocks(
        self, caches: Iterable[Cache], src_to_dsts: Mapping[int, Sequence[int]] | Tensor | Sequence[tuple[int, int]]
    ) -> None:
        """
        Copy whole blocks inside each layer's cache.

        Args:
            caches: One cache per layer.
            src_to_dsts: Destinations of each source, or ``(n, 2)`` pairs; one source may have several destinations.

        Raises:
            CacheError: As for `swap_blocks`; the null block neither gives nor takes here.
        """
        raise NotImplementedError

    def warmup(self, shapes: Sequence[GraphKey]) -> None:
        """Compile and load what the first use of these batch shapes would. The default has nothing to prepare."""
        del shapes
