"""Fields of single layers, where the architecture says more than `per_layer_config`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

from attrs import evolve

from attnplug.errors import RequirementsError
from attnplug.models.patterns import FULL, SLIDING

if TYPE_CHECKING:
    from attnplug.models.fields import Fields

LayerFields: TypeAlias = Callable[["Fields", int, str], "Fields"]
"""Fields, number of the layer and its kind -> the fields of that layer."""


def own(fields: Fields, index: int, _: str) -> Fields:
    """`per_layer_config` overrides the model's fields."""
    return fields.layer(index)


def gemma4(fields: Fields, index: int, kind: str) -> Fields:
    """Full layers differ in the size of heads and, with `attention_k_eq_v`, in the number of KV heads."""
    if kind != FULL or fields.get("per_layer_config") is not None:
        return fields.layer(index)
    changes = {"head_dim": fields.integer("global_head_dim") or 512}
    heads = fields.integer("num_global_key_value_heads")
    if heads is not None and fields.get("attention_k_eq_v"):
        changes["num_key_value_heads"] = heads
    return evolve(fields, data={**fields.data, **changes})


def zamba_heads(fields: Fields, index: int, _: str) -> Fields:
    """Its attention reads the hidden state beside the embeddings: heads are made of twice the hidden size."""
    if fields.get("head_dim", "attention_head_dim") is not None:
        return fields.layer(index)
    size = 2 * fields.need_integer("hidden_size") // fields.need_integer("num_attention_heads")
    return evolve(fields, data={**fields.data, "head_dim": size})


def heads_per_layer(fields: Fields, index: int, _: str) -> Fields:
    """`num_attention_heads_per_layer` lists the query heads of each layer."""
    counts = fields.get("num_attention_heads_per_layer")
    if counts is None:
        return fields.layer(index)
    if index >= len(counts):
        raise RequirementsError(
            f"{fields.origin} lists {len(counts)} num_attention_heads_per_layer, and none for layer {index}",
            "every layer has a number of query heads",
            "list one number per layer",
        )
    return evolve(fields, data={**fields.data, "num_attention_heads": counts[index]})


def windowed_heads(fields: Fields, index: int, kind: str) -> Fields:
    """Windowed layers may have query heads of their own number: `num_sliding_attention_heads`, or as older files."""
    older = fields.get("attention_other_setting") or {}
    count = fields.integer("num_sliding_attention_heads") or older.get("num_attention_heads")
    if kind != SLIDING or count is None or fields.get("per_layer_config"):
        return fields.layer(index)
    return evolve(fields, data={**fields.data, "num_attention_heads": count})


def mimo_heads(fields: Fields, index: int, kind: str) -> Fields:
    """Windowed layers have twice the KV heads, and a window that counts the tokens before each token."""
    if kind != SLIDING:
        return fields.layer(index)
    changes = {"num_key_value_heads": 2 * fields.need_integer("num_key_value_heads")}
    before = fields.integer("sliding_window_size")
    if before is not None:
        changes["sliding_window"] = before + 1
    return evolve(fields, data={**fields.data, **changes})


def nas(fields: Fields, index: int, _: str) -> Fields:
    """In a searched architecture the query heads per KV head differ by layer."""
    group = fields.need("block_configs")[index]["attention"]["n_heads_in_group"]
    return evolve(
        fields,
        data={**fields.data, "num_key_value_heads": fields.need_integer("num_attention_heads") // group},
    )
