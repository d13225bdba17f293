"""What one build hands to every forward of the step."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen

from attnplug.contract.inputs.phase import BatchSplit

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping

    from attnplug.contract.graphs.buffers import GraphBuffers
    from attnplug.contract.state import State
    from attnplug.negotiation.agreement import Agreement

_NO_PLANS: Final[Mapping[Hashable, Any]] = MappingProxyType({})


@frozen(eq=False, kw_only=True)
class Metadata(BatchSplit):
    """
    A validated batch, its split, and the plans that were made for it. Plugins subclass it for what else their kernels
    read, decorated with ``attrs.frozen(eq=False, kw_only=True)`` as this class is.

    Any Python value in here is frozen when a graph is captured; what changes between replays is a tensor updated in
    place.

    Attributes:
        agreement: What was negotiated; a layer of another agreement refuses the metadata.
        plans: A plan per plan key, for libraries that plan.
        graph: The graph buffers whose tensors it is made of; None runs eagerly.
        state: The state of the builder that made it: workspace, limits and ranks.
    """

    agreement: Agreement = field(repr=lambda agreement: repr(agreement.id))
    plans: Mapping[Hashable, Any] = field(default=_NO_PLANS, repr=lambda plans: f"<{len(plans)}>")
    graph: GraphBuffers | None = None
    state: State | None = None
