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

Pattern: TypeAlias = Callable[["Fields", int], Sequence[str]]
"""Fields and number of layers -> the kind of each layer, in transformers' words."""


def full(fields: Fields, count: int) -> Sequence[str]:
    """Every token attends to every earlier one. A window, which such a model would ignore, is refused."""
    if fields.get("sliding_window") is not None and fields.data.get("use_sliding_window") is not False:
        raise RequirementsError(
            f"{fields.origin} has sliding_window={fields.get('sliding_window')}",
            f"transformers' {fields.model_type!r} has no windowed layers and would ignore it",
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
