"""Plans a step by the provider."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import frozen

from attnplug.contract import PAD_SLOT_ID, Metadata, MetadataBuilder

if TYPE_CHECKING:
    from attnplug.contract import Batch, BatchSplit, GraphBuffers
    from attnplug_int8_ixformer.backend import Int8Backend


@frozen(eq=False, kw_only=True)
class Int8Metadata(Metadata):
    """
    The metadata of a step, with the plans of the provider.

    Attributes:
        decode_plan: The plan of the decodes, or None.
        prefill_plan: The plan of the prefills, or None.
        skips_rows: Whether decodes have rows without a slot, by the CPU slot mapping. A kernel that derives slots from
            lengths and block tables would write them.
    """

    decode_plan: Any = None
    prefill_plan: Any = None
    skips_rows: bool = False


class Int8Builder(MetadataBuilder):
    """Makes one plan per phase and step, for all layers. Graphs support batches of decodes only."""

    supports_graphs = True
    backend: Int8Backend

    def plan_batch(self, batch: Batch, split: BatchSplit, *, fast: bool, graph: GraphBuffers | None) -> dict[str, Any]:
        """Return the provider's plan of each phase."""
        del fast
        decodes, prefills, provider = split.decodes, split.prefills, self.backend.provider
        fields: dict[str, Any] = {}
        if decodes is not None:
            fields["skips_rows"] = graph is None and self._skips_rows(batch, split.num_decode_tokens)
            fields["decode_plan"] = provider.plan_decodes(decodes, self, graph, mixed=prefills is not None)
        if prefills is not None:
            fields["prefill_plan"] = provider.plan_prefills(prefills, self)
        return fields

    def can_capture(self, batch: Batch) -> bool:
        """Return whether the batch has decodes only, and a slot for every token that forward writes."""
        fits = batch.max_query_len <= self.agreement.requirements.decode_query_len
        return fits and not self._skips_rows(batch, batch.num_actual_tokens)

    def _skips_rows(self, batch: Batch, count: int) -> bool:
        """Return whether one of the first `count` tokens has no slot, and a layer writes decodes in forward."""
        slots = batch.slot_mapping_cpu
        if batch.dummy or not any("decode" in impl.forward_writes for impl in self.impls):
            return False
        if slots is None:
            return batch.slot_mapping is None  # nothing is written, and a captured call may have been with K/V
        return bool((slots[:count] == PAD_SLOT_ID).any())
