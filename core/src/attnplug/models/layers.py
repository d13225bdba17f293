"""From a model's configuration to the requirements of each of its attention layers: no model, no weights, no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs
from attrs import frozen

from attnplug.errors import RequirementsError
from attnplug.models.architectures import TEXT_TYPES
from attnplug.models.dtypes import find_dtype
from attnplug.models.fields import Fields, defaults_of
from attnplug.models.latent import absorbed_heads, expanded_heads, has_latents, indexing_layers, no_latents
from attnplug.models.patterns import BLOCK_SPARSE, CHUNKED, CROSS, FULL, INDEXED, SLIDING
from attnplug.models.quantization import cache_scheme
from attnplug.models.refusals import inexpressible
from attnplug.request.requirements import Requirements

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from attnplug.models.architectures import Architecture

LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_CACHE_FIELDS: Final = ("block_size", "kv_layout", "kv_cache_form", "kv_cache_dtype")
_OF_PREFILL: Final = ("dtype", "batch_invariant", "seq_lens_cpu_kind", "query_lens_cpu_kind", "features")
_MOST_LAYERS: Final = 10_000  # no published model has a tenth of it
_HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_KV_HEADS: Final = ("num_key_value_heads", "num_attention_groups")
_HIDDEN: Final = ("hidden_size", "n_embd", "d_model", "dim", "emb_dim")
_SIZES: Final = ("head_dim", "attention_head_dim", "kv_channels")
_ATTENTION: Final = (FULL, SLIDING, CHUNKED, BLOCK_SPARSE, CROSS, "hybrid")


@frozen
class ModelLayer:
    """
    An attention layer of a model.

    Attributes:
        name: The end of its module's name.
        index: Its number in its stack, as the module's `layer_idx`.
        requirements: What it requests of a backend.
        scale: Factor of the scores, which `Layer` has; None where it is not known.
        uncompressed: Where keys are latents, what an engine requests that expands them to the keys and values of every
            query head in a prefill: contiguous K/V, with the log-sum-exp, since it merges chunks. Otherwise None, as
            where an indexer selects latents.
        indexer: Where tokens are selected (`topk`), the name of the layer whose indexer selects them: its own, or an
            earlier one whose selection it reuses. Otherwise None.
    """

    name: str
    index: int
    requirements: Requirements
    scale: float | None = None
    uncompressed: Requirements | None = None
    indexer: str | None = None


def decide(
    whole: Fields, fields: Fields, dtype: str | None, engine: Mapping[str, Any], *, paged: bool
) -> tuple[dict[str, Any], str]:
    """Return the fields that the engine or the checkpoint decides, and a note where the dtype is assumed."""
    found, note = find_dtype(fields, dtype)
    wanted = {**engine, "paged": paged, "dtype": found}
    scheme = cache_scheme(whole, fields) if paged else None
    if scheme is not None and scheme.is_of(engine.get("kv_cache_dtype")):
        left_open = {name: value for name, value in scheme.request(whole.origin).items() if wanted.get(name) is None}
        wanted |= left_open
    return wanted, note


def read_text_part(whole: Fields) -> Fields:
    """Return the language model's part of a configuration, with the library's defaults for fields left out."""
    text = whole.text()
    name = TEXT_TYPES.get(text.model_type, text.model_type)
    text = attrs.evolve(text, data={**text.data, "model_type": name}) if name != text.model_type else text
    return attrs.evolve(text, defaults=defaults_of(text.model_type), assumed={}, read=set())


def kinds_of(fields: Fields, architecture: Architecture) -> Sequence[str]:
    """
    Return the kind of each layer of a stack, in transformers' words.

    Raises:
        RequirementsError: A field that decides is missing or invalid.
    """
    listed = fields.get("layer_types", "layers_block_type") if fields.get(*LAYERS) is None else None
    return architecture.pattern(fields, len(listed) if listed is not None else _count(fields, *LAYERS))


def _count(fields: Fields, *names: str) -> int:
    count = fields.need_integer(*names)
    if count > _MOST_LAYERS:
        raise RequirementsError(
            f"{fields.origin} has {count:,} layers", f"at most {_MOST_LAYERS:,} are described", f"correct {names[0]!r}"
        )
    return count


def attention_layers(
    fields: Fields, architecture: Architecture, wanted: Mapping[str, Any], *, is_biased: bool = False
) -> Iterator[ModelLayer]:
    """
    Yield the layers that are attention over keys.

    Args:
        fields: The configuration.
        architecture: How it is read.
        wanted: The fields of `Requirements` that the engine decides, with `paged` and `dtype`.
        is_biased: Whether each call of self-attention has an additive bias.

    Raises:
        RequirementsError: A field that decides is missing or invalid.
    """
    if architecture.family == "encoder_decoder":
        yield from _two_stacks(fields, architecture, wanted, is_biased=is_biased)
        return
    causal = _is_causal(fields, architecture)
    # A layer of another kind, such as a convolution, has no requirements, and keeps its number.
    kinds = kinds_of(fields, architecture)
    # Tokens are selected by their slots: without pages there are none.
    is_sparse = architecture.indexers is not None and wanted["paged"]
    described = (*_ATTENTION, INDEXED) if is_sparse else _ATTENTION
    sources = indexing_layers(fields, architecture, len(kinds)) if is_sparse else ()
    for index, kind in enumerate(kinds):
        if kind in described:
            one = architecture.layer(fields, index, kind)
            is_latent = has_latents(one, architecture)
            shape = expanded_heads(one) if is_latent else _heads(one, architecture)
            masked = _mask(one, architecture, kind, causal=causal)
            shared = _shares_cache(fields, index, len(kinds), wanted)
            path = architecture.cross if kind == CROSS else architecture.path
            name = path.format(*divmod(index, architecture.per_layer))
            scale = architecture.scale(one, shape["head_size"], index)
            # Without pages there is nothing to absorb for: each call has keys and values.
            is_absorbed = is_latent and wanted["paged"] and masked["attn_type"] == "decoder"
            if kind == INDEXED and not is_absorbed:
                raise no_latents(one, masked["attn_type"])
            if is_absorbed:
                own = {**shape, **absorbed_heads(one, is_indexed=kind == INDEXED)}
                uncompressed = None if kind == INDEXED else _uncompressed(wanted, shape)
            else:
                own, uncompressed = shape, None
            request = _require(wanted, {**own, **masked, **shared})
            indexer = None if request.topk is None else path.format(*divmod(sources[index], architecture.per_layer))
            yield ModelLayer(name, index, request, scale, uncompressed, indexer)


def _is_causal(fields: Fields, architecture: Architecture) -> bool:
    if architecture.family == "encoder":
        return bool(fields.get("is_decoder") or fields.get("causal"))
    if _sees_both_sides(fields, architecture):
        return False
    if fields.is_off("is_causal") and fields.get("sliding_window") is not None:
        raise inexpressible(
            fields, "without causality transformers has two meanings of its window (is_causal=False, sliding_window)"
        )
    return not fields.is_off("is_causal")


def _sees_both_sides(fields: Fields, architecture: Architecture) -> bool:
    """Whether every token attends to later ones too; where the class does not compute that, it is refused before."""
    return architecture.both_sides and fields.get("use_bidirectional_attention") is True


def _mask(fields: Fields, architecture: Architecture, kind: str, *, causal: bool) -> dict[str, Any]:
    cap = fields.get(architecture.soft_cap) if architecture.soft_cap else None
    if not architecture.soft_cap and fields.get("attn_logit_softcapping") is not None:
        raise inexpressible(fields, "transformers ignores its attn_logit_softcapping")
    without_alibi = architecture.has_alibi is not None and not architecture.has_alibi(fields)
    if kind == CROSS:
        return {"attn_type": "encoder_decoder"}
    return {
        "attn_type": "decoder" if causal else "encoder_only",
        "logits_soft_cap": cap,
        "sinks": kind in architecture.sinks,
        "alibi": None if without_alibi else architecture.alibi,
        "sliding_window": _window(fields, architecture, causal=causal) if kind == SLIDING else None,
        "attention_chunk": fields.need_integer("attention_chunk_size") if kind == CHUNKED else None,
        "block_sparse": _block_sparse(fields) if kind == BLOCK_SPARSE else None,
    }


def _block_sparse(fields: Fields) -> dict[str, Any]:
    """Return the pattern of Phi-3-small's configuration, as the requirements have it."""
    return {
        "max_seqlen": fields.need_integer("max_position_embeddings"),
        "block_size": fields.need_integer("blocksparse_block_size"),
        "local_blocks": fields.need_integer("blocksparse_num_local_blocks", least=0),
        "vert_stride": fields.need_integer("blocksparse_vert_stride"),
        "homo_head": bool(fields.get("blocksparse_homo_head_pattern")),
    }


def _window(fields: Fields, architecture: Architecture, *, causal: bool) -> int:
    """Return the width of the window to the left, the token included; encoders count without it."""
    width = fields.integer("sliding_window") if fields.data.get("sliding_window") is not None else None
    if width is None:
        width = fields.need_integer(architecture.window)
        if architecture.window == "local_attention":
            width //= 2  # a window over both sides is written as its whole width
    if _sees_both_sides(fields, architecture):
        width //= 2  # likewise
    return width if causal else width + 1


def _heads(fields: Fields, architecture: Architecture, heads: tuple[str, ...] = _HEADS) -> dict[str, Any]:
    count = fields.need_integer(*heads)
    if architecture.kv_heads is not None:
        kv_heads = architecture.kv_heads(fields, count)
    else:
        kv_heads = 1 if fields.get("multi_query") else fields.integer(*_KV_HEADS) or count
    size = fields.integer(*_SIZES) or _divided(fields, architecture, count)
    values = {"head_size_v": fields.need_integer(architecture.value_size)} if architecture.value_size else {}
    return {"num_q_heads": count, "num_kv_heads": kv_heads, "head_size": size, **values}


def _divided(fields: Fields, architecture: Architecture, count: int) -> int:
    """Return the size of a head where the configuration names none."""
    hidden = fields.need_integer(*_HIDDEN)
    if hidden < count or (hidden % count and not architecture.floors):
        raise RequirementsError(
            f"{fields.origin} has a hidden size of {hidden} and {count} attention heads",
            f"{hidden} is no multiple of {count}, which transformers' {fields.model_type!r} requires",
            "correct the hidden size or the number of heads, or name the size of a head in 'head_dim'",
        )
    return hidden // count


def _shares_cache(fields: Fields, index: int, count: int, wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The last `num_kv_shared_layers` read the KV cache of an earlier layer; with contiguous K/V there is none."""
    shared = fields.integer("num_kv_shared_layers", least=0) or 0
    return {"kv_sharing": bool(wanted["paged"]) and index >= count - shared}


def _two_stacks(
    fields: Fields, architecture: Architecture, wanted: Mapping[str, Any], *, is_biased: bool
) -> Iterator[ModelLayer]:
    encoder = _stack_heads(fields, architecture, "encoder")
    decoder = _stack_heads(fields, architecture, "decoder")
    stacks = [("decoder", "decoder", decoder)]
    # Such as BartForCausalLM: a decoder alone, whose cross attention runs where a caller passes hidden states.
    if not fields.is_off("is_encoder_decoder"):
        stacks.insert(0, ("encoder", "encoder", encoder))
    # A bias on the scores is an additive mask, which the contract has for contiguous K/V only.
    biased = {**_contiguous(wanted), "attn_bias": True} if is_biased else wanted
    for stack, attn_type, shape in stacks:
        for index in range(_stack_size(fields, stack)):
            name = architecture.path.replace("{stack}", stack).format(index)
            scale = architecture.scale(fields, shape["head_size"], index)
            yield ModelLayer(name, index, _require(biased, {**shape, "attn_type": attn_type}), scale)
    for index in range(_stack_size(fields, "decoder")):
        scale = architecture.scale(fields, decoder["head_size"], index)
        request = _require(wanted, {**decoder, "attn_type": "encoder_decoder"})
        yield ModelLayer(architecture.cross.format(index), index, request, scale)


def _stack_size(fields: Fields, stack: str) -> int:
    """T5 counts its encoder's layers in `num_layers`, and its decoder's too where `num_decoder_layers` is left out."""
    own = f"{stack}_layers"
    return _count(fields, *((own, "num_decoder_layers", "num_layers") if stack == "decoder" else (own, "num_layers")))


def _stack_heads(fields: Fields, architecture: Architecture, stack: str) -> dict[str, Any]:
    own = f"{stack}_attention_heads"
    if fields.get("d_kv") is None:
        return _heads(fields, architecture, (own, "num_heads"))
    count = fields.need_integer(own, "num_heads")
    return {"num_q_heads": count, "num_kv_heads": count, "head_size": fields.need_integer("d_kv")}


def _contiguous(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields for a layer without a KV cache."""
    # Scales per head are those of the KV cache, where its dtype is requested.
    left_out = (*_CACHE_FIELDS, "per_head_scales") if "kv_cache_dtype" in wanted else _CACHE_FIELDS
    fields = {name: value for name, value in wanted.items() if name not in left_out} | {"paged": False}
    if isinstance(fields.get("late"), (list, tuple)):
        fields["late"] = [name for name in fields["late"] if name not in _CACHE_FIELDS]
    return fields


def _uncompressed(wanted: Mapping[str, Any], shape: Mapping[str, Any]) -> Requirements:
    """Return the request of a prefill whose latents are expanded; graphs and the KV cache are not its concern."""
    fields = {name: wanted[name] for name in _OF_PREFILL if name in wanted}
    return Requirements(**fields, **shape, paged=False, return_lse=True)


def _require(wanted: Mapping[str, Any], own: Mapping[str, Any]) -> Requirements:
    fields = {**wanted, **own}
    return Requirements(**(_contiguous(fields) if fields["attn_type"] in ("encoder", "encoder_only") else fields))
