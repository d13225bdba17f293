"""Level 0: another backend computes, and the largest values of each channel are noted."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from attrs import frozen

from attnplug.contract import AttentionImpl, Backend, CacheTensor, Metadata, MetadataBuilder
from attnplug_int8_ixformer import inner

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor

    from attnplug.contract import Batch, BatchSplit, GraphBuffers, GraphShape, Layer, Limits, State


@frozen(eq=False, kw_only=True)
class ObservedMetadata(Metadata):
    """
    A step.

    Attributes:
        inner: What the inner builder made of it.
    """

    inner: Metadata | None = None


class ObserverImpl(AttentionImpl):
    """
    One layer, observed.

    Attributes:
        inner: The layer of the backend that computes.
        largest: ``(num_kv_heads, head_size)`` float32: the largest absolute value of each channel so far. A NaN stays.
    """

    cache_write = "forward"
    backend: ObserverBackend

    def __init__(self, layer: Layer, backend: ObserverBackend) -> None:
        super().__init__(layer, backend)
        self.inner = backend.inner.make_impl(layer)
        self.largest = torch.zeros(self.num_kv_heads, self.head_size_v, device=self.device)

    @property
    def plan_key(self) -> Hashable:
        """The inner layer's."""
        return self.inner.plan_key

    def init_cache(self, kv_cache: Any) -> None:
        """Let the inner layer write what is its own."""
        self.inner.init_cache(kv_cache)

    def run(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Any,
        metadata: ObservedMetadata,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Record the largest values of each channel, then let the inner layer compute."""
        batch = metadata.batch
        if key is not None and value is not None:
            if not batch.dummy:
                rows = value[: batch.num_actual_tokens]
                torch.maximum(self.largest, rows.abs().amax(0).float(), out=self.largest)
            if self.inner.host_writes:
                self.inner.write_kv(key, value, kv_cache, cast("Tensor", batch.slot_mapping))
        self.inner.forward(query, key, value, kv_cache, metadata.inner, output, lse=lse)


class ObserverBuilder(MetadataBuilder):
    """Builds for the inner backend."""

    def __init__(self, backend: ObserverBackend, impls: Sequence[ObserverImpl], state: State) -> None:
        super().__init__(backend, impls, state)
        own = backend.inner.make_state(state.limits, state.parallel)
        self._inner = backend.inner.make_builder([impl.inner for impl in impls], own)

    def plan_batch(self, batch: Batch, split: BatchSplit, *, fast: bool, graph: GraphBuffers | None) -> dict[str, Any]:
        """Return the inner builder's metadata."""
        del split, graph
        return {"inner": self._inner.build(batch, fast=fast)}


class ObserverBackend(Backend):
    """An inner backend that the selector chooses, with an observer around each layer."""

    impl_class = ObserverImpl
    builder_class = ObserverBuilder
    metadata_class = ObservedMetadata

    @cached_property
    def inner(self) -> Backend:
        """The backend that computes."""
        return inner.load(self.agreement, self.device_properties)

    @property
    def supports_max_num_splits(self) -> bool:
        """What the inner backend says."""
        return self.inner.supports_max_num_splits

    def cache_tensors(self, num_blocks: int) -> dict[str, CacheTensor]:
        """Return those of the inner backend."""
        return self.inner.cache_tensors(num_blocks)

    def workspace_bytes(self, limits: Limits) -> int:
        """Return what the inner backend needs: a host that counts its memory counts that too."""
        return self.inner.workspace_bytes(limits)

    def warmup(self, shapes: Sequence[GraphShape]) -> None:
        """Warm the inner backend up."""
        self.inner.warmup(shapes)
