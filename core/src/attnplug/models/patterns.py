"""The kind of attention of each layer: how transformers' configurations distribute windows and chunks over layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Final, TypeAlias

from attnplug.errors import RequirementsError

if TYPE_CHECKING:
    from attnplug.models.fields import Fields

FULL: Final = "full_attention"
SLIDING: Final = "sliding_attention"
CHUNKED: Final = "chunked_attention"
BLOCK_SPARSE: Final = "block_sparse_attention"
LINEAR: Final = "linear_attention"
CROSS: Final = "cross_attention"
INDEXED: Final = "indexed_attention"

_OTHER_NAMES: Final = {"mamba": LINEAR, "attention": FULL, "deepseek_sparse_attention": INDEXED}
"""Names of layer kinds in older files -> today's, as transformers replaces them."""

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
    """Every token attends to all earlier tokens. A window, which such a model would ignore, is refused."""
    if fields.get("sliding_window") is not None and not fields.is_off("use_sliding_window"):
        raise RequirementsError(
            f"{fields.origin} has sliding_window={fields.get('sliding_window')}",
            f"{fields.model_type!r} is read as a model without windowed layers, which would ignore it",
            "leave sliding_window out, or name the model type whose layers are windowed",
        )
    return [FULL] * count


def two_per_layer(fields: Fields, _: int) -> Sequence[str]:
    """LongCat: each of `num_layers` has two attention modules, all of them full."""
    return [FULL] * (2 * fields.need_integer("num_layers"))


def every_layer(_: Fields, count: int) -> Sequence[str]:
    """Every layer is full, whatever window the configuration has: none of its layers is windowed unless it says so."""
    return [FULL] * count


def flint(_: Fields, count: int) -> Sequence[str]:
    """The first two layers, the last, and every fourth are full; the others are windowed."""
    return [FULL if i < 2 or i % 4 == 1 or i == count - 1 else SLIDING for i in range(count)]


def cohere2_moe(fields: Fields, count: int) -> Sequence[str]:
    """The first layers, which are dense, have a period of their own."""
    dense = fields.integer("first_k_dense_replace", least=0) or 0
    first = fields.integer("prefix_dense_sliding_window_pattern") or 1
    period = fields.integer("sliding_window_pattern") or 4
    places = [(index + 1) % first if index < dense else (index - dense + 1) % period for index in range(count)]
    return [SLIDING if place else FULL for place in places]


def uniform(fields: Fields, count: int) -> Sequence[str]:
    """All layers are windowed, where there is a window."""
    windowed = fields.get("sliding_window") is not None and not fields.is_off("use_sliding_window")
    return [SLIDING if windowed else FULL] * count


def block_sparse(fields: Fields, count: int) -> Sequence[str]:
    """All layers are block-sparse, except every n-th (`dense_attention_every_n_layers`)."""
    period = fields.integer("dense_attention_every_n_layers", least=0) or 0
    return [FULL if period and (layer + 1) % period == 0 else BLOCK_SPARSE for layer in range(count)]


def mpt(fields: Fields, count: int) -> Sequence[str]:
    """Every layer is full, and has ALiBi. Fields that MPT's own code reads and transformers ignores are refused."""
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


def at(field: str, kind: str = FULL, other: str = LINEAR, *, default: Sequence[int] | None = None) -> Pattern:
    """A field lists the layers of `kind`, the others are of `other`; without it, `default` or all."""

    def pattern(fields: Fields, count: int) -> Sequence[str]:
        found = fields.get(field)
        chosen = set((range(count) if default is None else default) if found is None else found)
        return [kind if index in chosen else other for index in range(count)]

    return pattern


def listed(default: Pattern | None = None) -> Pattern:
    """The configuration lists the kinds in `layer_types`; files from before that field follow `default`."""

    def pattern(fields: Fields, count: int) -> Sequence[str]:
        given = fields.get("layer_types", "layers_block_type")
        if given is None and default is None:
            raise fields.missing("layer_types")
        kinds = list(given) if given is not None else list(default(fields, count)) if default else []
        kinds = [_OTHER_NAMES.get(kind, kind) for kind in kinds]
        if len(kinds) < count:
            raise RequirementsError(
                f"{fields.origin} lists {len(kinds)} layer_types for {count} layers",
                "every layer has a type",
                "list one type per layer",
            )
        return kinds[:count]

    return pattern


def every(period: int, *, field: str = "", other: str = SLIDING) -> Pattern:
    """Every `period`-th layer is full and the others are windowed, or of `other`; `field` overrides the period."""

    def pattern(fields: Fields, count: int) -> Sequence[str]:
        step = (fields.integer(field) if field else None) or period
        return [other if (index + 1) % step else FULL for index in range(count)]

    return pattern


def first_of(period: int, *, field: str = "", other: str = SLIDING) -> Pattern:
    """The first of every `period` layers is full and the others are windowed, or of `other`; `field` as above."""

    def pattern(fields: Fields, count: int) -> Sequence[str]:
        step = (fields.integer(field) if field else None) or period
        return [other if index % step else FULL for index in range(count)]

    return pattern


def late(fields: Fields, count: int) -> Sequence[str]:
    """Layers from `max_window_layers` on are windowed, if the model uses its window at all."""
    if not fields.get("use_sliding_window"):
        return [FULL] * count
    return late_windows(fields, count)


def late_windows(fields: Fields, count: int) -> Sequence[str]:
    """Layers from `max_window_layers` on are windowed, where there is a window."""
    if fields.get("sliding_window") is None:
        return [FULL] * count
    first = fields.need_integer("max_window_layers", least=0)
    return [SLIDING if index >= first else FULL for index in range(count)]


def early_alternating(fields: Fields, count: int) -> Sequence[str]:
    """Every second layer below `max_window_layers` is windowed, from the first on, if the model uses its window."""
    if not fields.get("use_sliding_window"):
        return [FULL] * count
    last = fields.need_integer("max_window_layers", least=0)
    return [SLIDING if index % 2 == 0 and index < last else FULL for index in range(count)]


def windowed_or_full(pattern: Pattern) -> Pattern:
    """The pattern where there is a window; without it, every layer is full."""

    def found(fields: Fields, count: int) -> Sequence[str]:
        return pattern(fields, count) if fields.get("sliding_window") is not None else [FULL] * count

    return found


def windowed_if_set(pattern: Pattern) -> Pattern:
    """The pattern with its full layers windowed where there is a window."""

    def found(fields: Fields, count: int) -> Sequence[str]:
        windowed = {FULL: SLIDING} if fields.get("sliding_window") is not None else {}
        return [windowed.get(kind, kind) for kind in pattern(fields, count)]

    return found


def last_full(pattern: Pattern) -> Pattern:
    """The pattern, except that the last layer is full."""

    def found(fields: Fields, count: int) -> Sequence[str]:
        return [*pattern(fields, count)[: count - 1], FULL]

    return found


def last_group_full(pattern: Pattern) -> Pattern:
    """The pattern, except that layers after the last whole group of `layer_group_size` are full."""

    def found(fields: Fields, count: int) -> Sequence[str]:
        whole = count // (size := fields.need_integer("layer_group_size")) * size
        return [*pattern(fields, count)[:whole], *[FULL] * (count - whole)]

    return found


def indexed(pattern: Pattern) -> Pattern:
    """The pattern, whose full layers have an indexer."""

    def found(fields: Fields, count: int) -> Sequence[str]:
        return [INDEXED if kind == FULL else kind for kind in pattern(fields, count)]

    return found


def glm_indexers(fields: Fields, count: int) -> Sequence[str]:
    """`indexer_types`, or a pattern of letters, or after a few layers with an indexer every so many-th one has it."""
    pattern = fields.get("indexer_types", "index_topk_pattern")
    if pattern is not None:
        return [{"F": "full", "S": "shared"}.get(one, one) for one in pattern]
    every = fields.integer("index_topk_freq", least=0) or 1
    offset = fields.integer("index_skip_topk_offset", least=0)
    offset = 2 if offset is None else offset
    return ["shared" if max(index - offset + 1, 0) % every else "full" for index in range(count)]


def hy_indexers(fields: Fields, count: int) -> Sequence[str]:
    """`indexer_types`; by default the first layer has an indexer, and the second and each fourth one after it."""
    found = fields.get("indexer_types")
    return found or ["shared" if index and (index - 1) % 4 else "full" for index in range(count)]


def repeated(field: str, kinds: Mapping[str, str], default: Sequence[str]) -> Pattern:
    """A field lists the kinds of the first layers in words of its own, and the list repeats."""

    def pattern(fields: Fields, count: int) -> Sequence[str]:
        words = fields.get(field) or default
        return [kinds.get(words[index % len(words)], str(words[index % len(words)])) for index in range(count)]

    return pattern


def spelled_out(field: str, letters: Mapping[str, str]) -> Pattern:
    """A text has a letter for each layer."""

    def pattern(fields: Fields, count: int) -> Sequence[str]:
        text = str(fields.need(field))
        if len(text) < count or not set(text) <= set(letters):
            raise RequirementsError(
                f"{fields.origin} has {field}={text!r} for {count} layers",
                f"it has one of the letters {', '.join(map(repr, letters))} for each layer",
                f"correct {field!r} in the configuration",
            )
        return [letters[letter] for letter in text[:count]]

    return pattern


def kimi_linear(fields: Fields, count: int) -> Sequence[str]:
    """`linear_attn_config` lists the full layers, counted from 1; without it, every fourth is full, but the first."""
    found = fields.get("linear_attn_config") or {}
    numbers = found.get("full_attn_layers")
    if numbers is None:
        return [FULL if index and index % 4 == 0 else LINEAR for index in range(count)]
    return [FULL if index + 1 in set(numbers) else LINEAR for index in range(count)]


def minimax_m1(fields: Fields, count: int) -> Sequence[str]:
    """`attn_type_list` has a 1 for each layer of softmax attention and a 0 for each of linear attention."""
    found = fields.need("attn_type_list")
    if len(found) < count:
        raise RequirementsError(
            f"{fields.origin} lists {len(found)} attn_type_list for {count} layers",
            "every layer has a type",
            "list one type per layer",
        )
    return [FULL if each else LINEAR for each in found[:count]]


def lfm3(_: Fields, count: int) -> Sequence[str]:
    """In each group of four the third layer is full and the first is windowed, but the model's first; else conv."""
    return [FULL if i % 4 == 2 else SLIDING if i and i % 4 == 0 else "conv" for i in range(count)]


def lara_mini(_: Fields, count: int) -> Sequence[str]:
    """Five kinds repeat."""
    period = (LINEAR, SLIDING, LINEAR, FULL, SLIDING)
    return [period[index % len(period)] for index in range(count)]


def zaya(fields: Fields, count: int) -> Sequence[str]:
    """Layers are full unless `layer_types` has them windowed; each has a convolution too, hence its own words."""
    words = {"hybrid": FULL, "hybrid_sliding": SLIDING}
    return [words.get(kind, kind) for kind in listed(every_layer)(fields, count)]


def zamba_hybrid(fields: Fields, count: int) -> Sequence[str]:
    """The third layer has attention, and of those after it every `attn_layer_period`-th, from an offset on."""
    period = fields.need_integer("attn_layer_period")
    offset = fields.need_integer("attn_layer_offset", least=0)
    return ["hybrid" if i == 2 or (i > 2 and (i - 3) % period == offset) else LINEAR for i in range(count)]


def mimo(fields: Fields, count: int) -> Sequence[str]:
    """`hybrid_layer_pattern` has a 1 for each windowed layer; without it the first and every sixth layer are full."""
    found = fields.get("hybrid_layer_pattern")
    windowed = found if found is not None else [bool(index and (index + 1) % 6) for index in range(count)]
    return [SLIDING if each else FULL for each in windowed[:count]]


def nas_blocks(fields: Fields, count: int) -> Sequence[str]:
    """`block_configs` says for each layer whether it has attention: searched architectures replace or leave it out."""
    kinds = []
    for block in fields.need("block_configs")[:count]:
        attention = block.get("attention") or {}
        replaced = "linear_layer" if attention.get("replace_with_linear") else "no_attention"
        kinds.append(FULL if attention.get("n_heads_in_group") else replaced)
    return kinds


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


def falcon_has_alibi(fields: Fields) -> bool:
    """A switch, beside rotary positions."""
    return bool(fields.get("alibi"))


def baichuan_has_alibi(fields: Fields) -> bool:
    """The models of 13 billion parameters have ALiBi, those of 7 have rotary positions and a hidden size of 4096."""
    return fields.need_integer("hidden_size") != 4096


def falcon_kv_heads(fields: Fields, count: int) -> int:
    """The new architecture groups queries; before, there is a single KV head, or as many as query heads."""
    if fields.get("new_decoder_architecture"):
        return fields.integer("num_kv_heads") or count
    return 1 if fields.get("multi_query") else count


def dbrx_kv_heads(fields: Fields, _: int) -> int:
    """The number is in `attn_config`."""
    return fields.part("attn_config").need_integer("kv_n_heads")


def chatglm_kv_heads(fields: Fields, count: int) -> int:
    """The number of groups, where the queries are grouped."""
    return fields.need_integer("multi_query_group_num") if fields.get("multi_query_attention") else count
