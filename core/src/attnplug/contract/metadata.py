"""Assembles the metadata of a step: the batch, its split, and the fields that a plugin planned."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import attrs

from attnplug.contract.vendor import Metadata
from attnplug.errors import PluginContractError

if TYPE_CHECKING:
    from attnplug.contract.graphs.buffers import GraphBuffers
    from attnplug.contract.inputs.phase import BatchSplit
    from attnplug.contract.vendor import MetadataBuilder

# isinstance tries them in this order: dict first, since plans hardly ever are anything else and Mapping is slow.
_MAPPINGS: Final = (dict, MappingProxyType, Mapping)


def assemble(
    builder: MetadataBuilder, split: BatchSplit, fields: Mapping[str, Any], graph: GraphBuffers | None = None
) -> Metadata:
    """
    Return the metadata of a checked batch: the split, and the fields that the plugin planned.

    Args:
        builder: The builder whose plugin planned.
        split: The batch and its split; with a graph, as the graph reads it.
        fields: What `MetadataBuilder.plan_batch` returned.
        graph: The graph buffers that the fields are made of.

    Raises:
        PluginContractError: The plugin returned something else, fields that its metadata class lacks, or plans that
            leave out a plan key.
    """
    if not isinstance(fields, _MAPPINGS):
        _refuse_fields(builder, fields)
    try:
        metadata = builder.backend.metadata_class(
            agreement=builder.agreement,
            batch=split.batch,
            num_decodes=split.num_decodes,
            num_prefills=split.num_prefills,
            num_decode_tokens=split.num_decode_tokens,
            num_prefill_tokens=split.num_prefill_tokens,
            num_key_rows=split.num_key_rows,
            highest_block=split.highest_block,
            graph=graph,
            state=builder.state,
            **fields,
        )
    except TypeError:
        # Fields are compared only now, since this runs in every step; an error of the plugin itself is raised as it is.
        _check_fields(builder, fields)
        raise
    if fields:
        _check_plans(builder, metadata.plans)
    return metadata


def _check_plans(builder: MetadataBuilder, plans: object) -> None:
    """Check that there is a plan for every plan key, or none at all."""
    if not isinstance(plans, _MAPPINGS):
        raise PluginContractError(
            f"{type(builder).__name__} returned the plans {reprlib.repr(plans)}",
            "plans are a mapping: one of each plan key of the builder's layers",
            "return {'plans': {key: plan for key in self.plan_groups}}",
        )
    if plans and not plans.keys() >= builder.plan_groups.keys():
        lacking = [impls[0].layer.name for key, impls in builder.plan_groups.items() if key not in plans]
        raise PluginContractError(
            f"{type(builder).__name__} made no plan for layer {', '.join(map(repr, lacking))}",
            "where there are plans, there is one for each plan key of the builder's layers",
            "plan for every key of self.plan_groups",
        )


def _check_fields(builder: MetadataBuilder, fields: Mapping[str, Any]) -> None:
    """Check what a plugin planned against its metadata class."""
    metadata_class = builder.backend.metadata_class
    general = {field.name for field in attrs.fields(Metadata)}
    own = {field.alias: field.default for field in attrs.fields(metadata_class) if field.name not in general}
    wrong = [name for name in fields if name not in own and name != "plans"]
    lacking = [name for name, default in own.items() if default is attrs.NOTHING and name not in fields]
    if wrong or lacking:
        raise PluginContractError(
            f"{type(builder).__name__} returned {', '.join(map(_name, fields)) or 'no field'}",
            f"beside plans, {metadata_class.__name__} has {', '.join(own) or 'no field'}"
            + (f", and needs {', '.join(lacking)}" if lacking else ""),
            "declare each field in a Metadata subclass (attrs.frozen(eq=False, kw_only=True)), which the backend names "
            "as metadata_class; core fills in the fields of Metadata itself",
        )


def _name(field: object) -> str:
    return field if isinstance(field, str) else reprlib.repr(field)


def _refuse_fields(builder: MetadataBuilder, found: object) -> NoReturn:
    name = type(builder).__name__
    raise PluginContractError(
        f"{name} returned {'None' if found is None else f'a {type(found).__name__}'} from planning",
        f"it returns a mapping: plans, and the fields of {builder.backend.metadata_class.__name__} that it adds",
        f"return {{'plans': {{...}}}} from {name}, or {{}} where nothing is planned",
    )
