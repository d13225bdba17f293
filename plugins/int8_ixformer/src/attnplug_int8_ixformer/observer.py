"""Level 0, calibration: an inner backend computes, and an observer records per-channel absmax of the values."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import torch
from attrs import frozen

from attnplug.contract import PAD_SLOT_ID, AttentionImpl, Backend, CacheTensor, Metadata, MetadataBuilder
from attnplug_int8_ixformer import inner

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from torch import Tensor

    from attnplug.contract import Batch, BatchSplit, GraphBuffers, GraphShape, Layer, Limits, LoadedBackend, State


@frozen(eq=False, kw_only=True)
class ObservedMetadata(Metadata):
    """
    The metadata of a step.

    Attributes:
        inner: The metadata of the inner builder.
    """

    inner: Metadata | None = None


class ObserverImpl(AttentionImpl):
    """
    One layer, which records calibration statistics.

    Attributes:
        inner: The layer of the inner backend.
        absmax: ``(num_kv_heads, head_size)`` float32: the largest absolute value of each channel so far. NaN persists.
    """

    cache_write = "forward"
    backend: ObserverBackend

    def __init__(self, layer: Layer, backend: ObserverBackend) -> None:
        super().__init__(layer, backend)
        self.inner = backend.inner.make_impl(layer)
        self.absmax = torch.zeros(self.num_kv_heads, self.head_size_v, dtype=torch.float32, device=self.device)

    @property
    def plan_key(self) -> Hashable:
        """The plan key of the inner layer."""
        return self.inner.plan_key

    def init_cache(self, kv_cache: Any) -> None:
        """Initialize the cache by the inner layer."""
        self.inner.wrapped.init_cache(kv_cache)

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
        """Record the absmax of new values, then run the inner layer."""
        batch = metadata.batch
        if key is not None and value is not None:
            if not batch.dummy:  # warm-up and capture run on zeros
                torch.maximum(self.absmax, _written(value, batch).abs().amax(0).float(), out=self.absmax)
            if self.inner.host_writes:
                self.inner.write_kv(key, value, kv_cache, cast("Tensor", batch.slot_mapping))
        self.inner.forward(query, key, value, kv_cache, metadata.inner, output, lse=lse)


def _written(value: Tensor, batch: Batch) -> Tensor:
    """Return the values of a step, zero where a row goes to no slot."""
    # On a GPU a host may count padded rows as tokens, and runs dummy steps that look like others: their slots tell.
    rows, slots = value[: batch.num_actual_tokens], batch.slot_mapping
    return rows if slots is None else rows.masked_fill((slots[: len(rows)] == PAD_SLOT_ID).view(-1, 1, 1), 0)


class ObserverBuilder(MetadataBuilder):
    """Builds the metadata of the inner backend."""

    def __init__(self, backend: ObserverBackend, impls: Sequence[ObserverImpl], state: State) -> None:
        super().__init__(backend, impls, state)
        own = backend.inner.make_state(state.limits, state.parallel)
        self._inner = backend.inner.make_builder([impl.inner for impl in impls], own)

    def plan_batch(self, batch: Batch, split: BatchSplit, *, fast: bool, graph: GraphBuffers | None) -> dict[str, Any]:
        """Return the metadata of the inner builder."""
        del split, graph
        return {"inner": self._inner.build(batch, fast=fast)}


class ObserverBackend(Backend):
    """An inner backend, chosen by selection, with an observer around each layer."""

    impl_class = ObserverImpl
    builder_class = ObserverBuilder
    metadata_class = ObservedMetadata

    @cached_property
    def inner(self) -> LoadedBackend:
        """The inner backend."""
        return inner.load(self.agreement, self.device_properties)

    @property
    def supports_max_num_splits(self) -> bool:
        """Whether the inner backend supports it."""
        return self.inner.supports_max_num_splits

    def cache_tensors(self, num_blocks: int) -> dict[str, CacheTensor]:
        """Return the tensors of the inner backend."""
        return self.inner.cache_tensors(num_blocks)

    def workspace_bytes(self, limits: Limits) -> int:
        """Return the bytes that the inner backend needs, which a host counts as this backend's."""
        return self.inner.workspace_bytes(limits)

    def warmup(self, loaded: LoadedBackend, shapes: Sequence[GraphShape]) -> None:
        """Warm up the inner backend."""
        del loaded
        self.inner.warmup(shapes)
