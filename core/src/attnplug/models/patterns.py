"""The kind of attention of each layer: how transformers' configurations distribute windows and chunks over layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from attnplug.errors import RequirementsError

if TYPE_CHECKING:
    from attnplug.models.fields import Fields

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
CHUNKED: Final = "chunked_attention"
BLOCK_SPARSE: Final = "block_sparse_attention"
LINEAR: Final = "linear_attention"

_IGNORED_BY_MPT: Final[dict[str, object]] = {
    "alibi": True,
    "alibi_bias_max": 8,
    "prefix_lm": False,
    "qk_ln": False,
    "attn_type": "multihead_attention",
}
"""Field of MPT's `attn_config` -> the only value that transformers computes."""

Pattern: TypeAlias = Callable[["Fields", int], Sequence[str]]
"""Fields and number of layers -> the kind of each layer, in transformers' words."""

KvHeads: TypeAlias = Callable[["Fields", int], int]
"""Fields and number of query heads -> the number of key and value heads."""


def full(fields: Fields, count: int) -> Sequence[str]:
    """Every token attends to every earlier one. A window, which such a model would ignore, is refused."""
    if fields.get("sliding_window") is not None and fields.data.get("use_sliding_window") is not False:
        raise RequirementsError(
            f"{fields.origin} has sliding_window={fields.get('sliding_window')}",
            f"{fields.model_type!r} is read as a model without windowed layers, which would ignore it",
            "leave sliding_window out, or name the model type whose layers are windowed",
        )
    return [FULL] * count


def uniform(fields: Fields, count: int) -> Sequence[str]:
    """All layers are windowed, where there is a window."""
    windowed = fields.get("sliding_window") is not None and fields.data.get("use_sliding_window") is not False
    return [SLIDING if windowed else FULL] * count


def block_sparse(fields: Fields, count: int) -> Sequence[str]:
    """All layers are block-sparse, but every so many-th one where the configuration says so."""
    period = fields.integer("dense_attention_every_n_layers", least=0) or 0
    return [FULL if period and (layer + 1) % period == 0 else BLOCK_SPARSE for layer in range(count)]


def mpt(fields: Fields, count: int) -> Sequence[str]:
    """Every layer is full, and has ALiBi. What transformers' MPT ignores, and MPT's own code does not, is refused."""
    attention = fields.get("attn_config") or {}
    for name, only in _IGNORED_BY_MPT.items():
        if attention.get(name, only) != only:
            raise RequirementsError(
                f"{fields.origin} has attn_config.{name}={attention[name]!r}",
                f"transformers' 'mpt' ignores it, and computes {name}={only!r}",
                "run the model from the code that it is published with",
            )
    return [FULL] * count


def jamba(fields: Fields, count: int) -> Sequence[str]:
    """Every `attn_layer_period`-th layer is attention, from `attn_layer_offset` on; the others are recurrences."""
    period = fields.need_integer("attn_layer_period")
    offset = fields.need_integer("attn_layer_offset", least=0)
    return [FULL if index % period == offset else LINEAR for index in range(count)]


def listed(default: Pattern | None = None) -> Pattern:
    """The configuration lists the kinds in `layer_types`; files from before that field follow `default`."""

    def pattern(fields: Fields, count: int) -> Sequence[str]:
        given = fields.get("layer_types")
        if given is None and default is None:
            raise fields.missing("layer_types")
        kinds = list(given) if given is not None else list(default(fields, count)) if default else []
        if len(kinds) < count:
            raise RequirementsError(
                f"{fields.origin} lists {len(kinds)} layer_types for {count} layers",
                "every layer has a type",
                "list one type per layer",
            )
        return kinds[:count]

    return pattern


def every(period: int, *, field: str = "") -> Pattern:
    """Every `period`-th layer is full and the others are windowed; `field` overrides the period."""

    def pattern(fields: Fields, count: int) -> Sequence[str]:
        step = (fields.integer(field) if field else None) or period
        return [SLIDING if (index + 1) % step else FULL for index in range(count)]

    return pattern


def first_of(period: int, *, field: str = "") -> Pattern:
    """The first of every `period` layers is full and the others are windowed; `field` overrides the period."""

    def pattern(fields: Fields, count: int) -> Sequence[str]:
        step = (fields.integer(field) if field else None) or period
        return [SLIDING if index % step else FULL for index in range(count)]

    return pattern


def late(fields: Fields, count: int) -> Sequence[str]:
    """Layers from `max_window_layers` on are windowed, if the model uses its window at all."""
    if not fields.get("use_sliding_window") or fields.get("sliding_window") is None:
        return [FULL] * count
    first = fields.need_integer("max_window_layers", least=0)
    return [SLIDING if index >= first else FULL for index in range(count)]


def chunked_with_rope(fields: Fields, count: int) -> Sequence[str]:
    """Layers with rotary positions are chunked, the others are full."""
    return [CHUNKED if has_rope else FULL for has_rope in _rope_layers(fields, count)]


def sliding_without_rope(fields: Fields, count: int) -> Sequence[str]:
    """Layers without rotary positions are windowed, if the model uses its window at all."""
    used = fields.get("use_sliding_window") and fields.get("sliding_window") is not None
    return [SLIDING if used and not has_rope else FULL for has_rope in _rope_layers(fields, count)]


def _rope_layers(fields: Fields, count: int) -> Sequence[object]:
    """`no_rope_layers` has a 1 for each layer *with* rotary positions, despite its name."""
    given = fields.get("no_rope_layers")
    if given:
        return list(given)
    interval = fields.integer("no_rope_layer_interval") or 4
    return [(index + 1) % interval != 0 for index in range(count)]


def falcon_kv_heads(fields: Fields, count: int) -> int:
    """The new architecture groups queries; the old one has one key and value head, or one for each query head."""
    if fields.get("new_decoder_architecture"):
        return fields.integer("num_kv_heads") or count
    return 1 if fields.get("multi_query") else count


def dbrx_kv_heads(fields: Fields, _: int) -> int:
    """The number is in `attn_config`."""
    return fields.part("attn_config").need_integer("kv_n_heads")
