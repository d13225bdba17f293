"""What a builder is given beside a batch, and what its plugin returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.contract.slot import GraphSlot
from attnplug.errors import BatchError, NotNegotiatedError, PluginContractError

if TYPE_CHECKING:
    from attnplug.contract.batch import Batch
    from attnplug.contract.builder import MetadataBuilder
    from attnplug.contract.metadata import Metadata


def complete(builder: MetadataBuilder, metadata: Metadata) -> Metadata:
    """
    Return metadata, if it has a plan for every plan key, or none at all.

    Raises:
        PluginContractError: The plugin forgot a key.
    """
    if metadata.plans and not metadata.plans.keys() >= builder.plan_groups.keys():
        lacking = [impls[0].layer.name for key, impls in builder.plan_groups.items() if key not in metadata.plans]
        raise PluginContractError(
            f"{type(builder).__name__} made no plan for layer {', '.join(map(repr, lacking))}",
            "where there are plans, there is one for each plan key of the builder's layers",
            "plan for every key of self.plan_groups",
        )
    return metadata


def check_slot(builder: MetadataBuilder, slot: GraphSlot, batch: Batch) -> None:
    """
    Check that a builder may build a batch into a slot.

    Raises:
        NotNegotiatedError: No graph level was agreed on, or the plugin takes no slots.
        BatchError: The slot is another state's, or no graph covers such a batch.
    """
    agreement = builder.agreement
    if builder.graph_level == "never":
        raise NotNegotiatedError(
            "a graph slot was given to build",
            f"{agreement.id} builds eagerly here: its builder takes no slots in this agreement",
            "build with slot=None, or select again with the cudagraph level that the batch needs",
        )
    if not isinstance(slot, GraphSlot) or builder.state.slots.get(slot.key) is not slot:
        raise BatchError(
            f"the slot {slot!r} was given to a builder of {agreement.id}",
            "a slot belongs to the state that the builder was made with, until it is released",
            "pass a slot of builder.state",
        )
    if not builder.can_run_in_cudagraph(batch):
        raise BatchError(
            f"a batch with queries of up to {batch.max_query_len} tokens was given for the slot {slot.key}",
            f"{agreement.id} replays batches of the level {builder.graph_level!r} here, and not every one",
            "build with slot=None where can_run_in_cudagraph(batch) is False",
        )


def check_own(builder: MetadataBuilder, metadata: Metadata) -> None:
    """
    Check that metadata is of the builder's agreement.

    Raises:
        BatchError: It is another's.
    """
    metadata_class = builder.backend.metadata_class
    if not isinstance(metadata, metadata_class) or metadata.agreement != builder.agreement:
        raise BatchError(
            f"metadata ({type(metadata).__name__}) of another builder was given",
            f"it is a {metadata_class.__name__} built for the same agreement, {builder.agreement.id}",
            "pass what a builder of this backend returned",
        )
