"""Turns a batch into what the kernels need."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnplug.contract import PAD_SLOT_ID, MetadataBuilder

if TYPE_CHECKING:
    from attnplug.contract import Batch, BatchSplit, GraphBuffers
    from attnplug_int8_ixformer.backend import Int8Backend


class Int8Builder(MetadataBuilder):
    """Asks the provider for its plans, once per step: they depend on no layer. Graphs hold decodes alone."""

    supports_graphs = True
    backend: Int8Backend

    def plan_batch(self, batch: Batch, split: BatchSplit, *, fast: bool, graph: GraphBuffers | None) -> dict[str, Any]:
        """Return the provider's plan of each phase that the batch has."""
        del fast
        decodes, prefills, provider = split.decodes, split.prefills, self.backend.provider
        fields: dict[str, Any] = {}
        if decodes is not None:
            fields["skips"] = graph is None and self._skips(batch, split.num_decode_tokens)
            fields["decode_plan"] = provider.plan_decodes(decodes, self, graph, mixed=prefills is not None)
        if prefills is not None:
            fields["prefill_plan"] = provider.plan_prefills(prefills, self)
        return fields

    def can_capture(self, batch: Batch) -> bool:
        """Capture batches of decodes alone, if every token has a slot where a layer writes the cache."""
        fits = batch.max_query_len <= self.agreement.requirements.decode_query_len
        return fits and not self._skips(batch, batch.num_actual_tokens)

    def _skips(self, batch: Batch, count: int) -> bool:
        """Whether one of the first so many tokens has no slot, and a layer would write it."""
        slots = batch.slot_mapping_cpu
        if batch.dummy or slots is None or not any("decode" in impl.forward_writes for impl in self.impls):
            return False
        return bool((slots[:count] == PAD_SLOT_ID).any())
