"""Turns a batch into what the kernels need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import evolve

from attnplug.contract import PAD_SLOT_ID, MetadataBuilder
from attnplug_int8_ixformer.metadata import Int8Metadata

if TYPE_CHECKING:
    from attnplug.contract import Batch, GraphBuffers, Metadata
    from attnplug_int8_ixformer.backend import Int8Backend


class Int8Builder(MetadataBuilder):
    """Asks the provider for its plans, once per step: they depend on no layer. Graphs hold decodes alone."""

    supports_graphs = True
    backend: Int8Backend

    def plan_batch(self, batch: Batch, *, fast: bool, graph: GraphBuffers | None) -> Metadata:
        del fast
        described = self.describe(batch)
        decodes, prefills, provider = described.decodes, described.prefills, self.backend.provider
        found: dict[str, Any] = {}
        if decodes is not None:
            found["skips"] = graph is None and self._skips(batch, described.num_decode_tokens)
            found["decode_plan"] = provider.plan_decodes(decodes, self, graph, mixed=prefills is not None)
        if prefills is not None:
            found["prefill_plan"] = provider.plan_prefills(prefills, self)
        return evolve(described, **found) if isinstance(described, Int8Metadata) else described

    def can_capture(self, batch: Batch) -> bool:
        fits = batch.max_query_len <= self.agreement.requirements.decode_query_len
        return fits and not self._skips(batch, batch.num_actual_tokens)

    def _skips(self, batch: Batch, count: int) -> bool:
        """Whether one of the first so many tokens has no slot, and a layer would write it."""
        slots = batch.slot_mapping_cpu
        if batch.dummy or slots is None or not any("decode" in impl.forward_writes for impl in self.impls):
            return False
        return bool((slots[:count] == PAD_SLOT_ID).any())
