"""What a builder is given beside a batch, and what its plugin returns."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import attrs

from attnplug.contract.graphs.buffers import GraphBuffers
from attnplug.contract.inputs.batch import Batch
from attnplug.contract.metadata import Metadata
from attnplug.errors import BatchError, NotNegotiatedError, PluginContractError

if TYPE_CHECKING:
    from attnplug.contract.builder import MetadataBuilder

# In the order in which they are found: plans are a dict, and only now and then something else.
_MAPPINGS: Final = (dict, MappingProxyType, Mapping)


def complete(builder: MetadataBuilder, metadata: Metadata) -> Metadata:
    """
    Return metadata, if it has a plan for every plan key, or none at all.

    Raises:
        PluginContractError: The plugin forgot a key, or returned something else.
    """
    if not isinstance(metadata, builder.backend.metadata_class):
        _refuse_metadata(builder, metadata)
    if not isinstance(metadata.plans, _MAPPINGS):
        _refuse_plans(builder, metadata.plans)
    if metadata.plans and not metadata.plans.keys() >= builder.plan_groups.keys():
        lacking = [impls[0].layer.name for key, impls in builder.plan_groups.items() if key not in metadata.plans]
        raise PluginContractError(
            f"{type(builder).__name__} made no plan for layer {', '.join(map(repr, lacking))}",
            "where there are plans, there is one for each plan key of the builder's layers",
            "plan for every key of self.plan_groups",
        )
    return metadata


def check_batch(batch: object, where: str) -> None:
    """
    Check that what should be a batch is one.

    Raises:
        BatchError: It is something else.
    """
    if not isinstance(batch, Batch):
        raise BatchError(
            f"{reprlib.repr(batch)} was given to {where}",
            "it takes a Batch: this step's requests",
            "pass what BatchAssembler.finish, or Batch.from_lengths, returns",
        )


def check_batches(batches: object) -> None:
    """
    Check that what should be a step's batches is a mapping of builders to them.

    Raises:
        BatchError: It is something else.
    """
    if not isinstance(batches, Mapping):
        raise BatchError(
            f"a {type(batches).__name__} was given to begin_forward",
            "a step has a batch for each builder: layers that share a block table share a builder",
            "pass {builder: batch}",
        )
    for batch in batches.values():
        check_batch(batch, "begin_forward")


def check_fields(builder: MetadataBuilder, more: Mapping[str, Any]) -> None:
    """
    Check what a plugin passes to `MetadataBuilder.describe` against its metadata class.

    Raises:
        PluginContractError: The class has no such fields, or needs others.
    """
    metadata_class = builder.backend.metadata_class
    general = {field.name for field in attrs.fields(Metadata)}
    own = {field.alias: field.default for field in attrs.fields(metadata_class) if field.name not in general}
    wrong = [name for name in more if name not in own]
    lacking = [name for name, default in own.items() if default is attrs.NOTHING and name not in more]
    if wrong or lacking:
        raise PluginContractError(
            f"{type(builder).__name__}.describe was given {', '.join(more) or 'no field'}",
            f"{metadata_class.__name__} has of its own {', '.join(own) or 'no field'}"
            + (f", and needs {', '.join(lacking)}" if lacking else ""),
            "declare each field in a Metadata subclass (attrs.frozen(eq=False, kw_only=True)), which the backend names "
            "as metadata_class",
        )


def _refuse_metadata(builder: MetadataBuilder, found: object) -> NoReturn:
    name = type(builder).__name__
    raise PluginContractError(
        f"{name} built {'None' if found is None else f'a {type(found).__name__}'}",
        f"it builds a {builder.backend.metadata_class.__name__}, the backend's metadata_class",
        f"return self.describe(batch, ...) from {name}",
    )


def _refuse_plans(builder: MetadataBuilder, plans: object) -> NoReturn:
    raise PluginContractError(
        f"{type(builder).__name__} built metadata with the plans {reprlib.repr(plans)}",
        "plans are a mapping: one of each plan key of the builder's layers",
        "pass plans={key: plan for key in self.plan_groups}",
    )


def check_slot(builder: MetadataBuilder, graph: GraphBuffers) -> None:
    """
    Check that a builder may build into a slot.

    Raises:
        NotNegotiatedError: No graph level was agreed on, or the plugin takes no slots.
        BatchError: The slot is another state's.
    """
    agreement = builder.agreement
    if builder.graph_level == "never":
        raise NotNegotiatedError(
            "a graph slot was given to build",
            f"{agreement.id} builds eagerly here: its builder takes no slots in this agreement",
            "build with slot=None, or select again with the cudagraph level that the batch needs",
        )
    if not isinstance(graph, GraphBuffers) or builder.state.graphs.get(graph.key) is not graph:
        raise BatchError(
            f"the slot {graph!r} was given to a builder of {agreement.id}",
            "a slot belongs to the state that the builder was made with, until it is released",
            "pass a slot of builder.state",
        )


def check_covered(builder: MetadataBuilder, graph: GraphBuffers, batch: Batch) -> None:
    """
    Check that a builder may build a batch into a slot of its own. The plugin is asked: the batch has been checked.

    Raises:
        BatchError: No graph covers such a batch.
    """
    if not builder.can_run_in_cudagraph(batch):
        raise BatchError(
            f"a batch with queries of up to {batch.max_query_len} tokens was given for the slot {graph.key}",
            f"{builder.agreement.id} replays batches of the level {builder.graph_level!r} here, and not every one",
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
