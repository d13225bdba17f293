"""What one build hands to every forward of the step."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from attnplug.contract.inputs.phase import Phase, phase_of

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from attnplug.contract.graphs.buffers import GraphBuffers
    from attnplug.contract.inputs.batch import Batch
    from attnplug.contract.state import State
    from attnplug.negotiation.agreement import Agreement


@frozen(eq=False, kw_only=True)
class Metadata:
    """
    A validated batch, its split, and the plans that were made for it. Plugins subclass it for what else their kernels
    read, decorated with ``attrs.frozen(eq=False, kw_only=True)`` as this class is.

    Any Python value in here is frozen when a graph is captured; what changes between replays is a tensor updated in
    place.

    Attributes:
        agreement: What was negotiated; a layer of another agreement refuses the metadata.
        batch: The batch.
        num_decodes: Requests at the front whose query is at most the agreed decode query length; with
            `MetadataBuilder.requires_uniform_decodes`, those of them that are as long as the first.
        num_prefills: The other requests, padding included.
        num_decode_tokens: Query tokens of the decodes: the first rows.
        num_prefill_tokens: Query tokens of the prefills: the rows after them.
        num_key_rows: K/V rows that a call brings.
        highest_block: An upper bound of the block numbers that this step touches; -1 where no host copy tells.
        plans: A plan per plan key, for libraries that plan.
        slot: The graph slot whose tensors it is made of; None runs eagerly.
        state: The state of the builder that made it: workspace, limits and ranks.
    """

    agreement: Agreement = field(repr=lambda agreement: repr(agreement.id))
    batch: Batch = field(repr=lambda batch: f"<{batch.num_reqs} requests, {batch.num_actual_tokens} tokens>")
    num_decodes: int
    num_prefills: int
    num_decode_tokens: int
    num_prefill_tokens: int
    num_key_rows: int
    highest_block: int = -1
    plans: Mapping[Hashable, Any] = field(factory=lambda: MappingProxyType({}), repr=lambda plans: f"<{len(plans)}>")
    graph: GraphBuffers | None = None
    state: State | None = None

    @property
    def decodes(self) -> Phase | None:
        """The decodes, None where there are none. In a graph slot of decodes, all requests."""
        return phase_of(self.batch, 0, self.num_decodes, 0, self.num_decode_tokens)

    @property
    def prefills(self) -> Phase | None:
        """The prefills, with their query rows counted from 0; None where there are none."""
        return phase_of(
            self.batch, self.num_decodes, self.num_prefills, self.num_decode_tokens, self.num_prefill_tokens
        )
