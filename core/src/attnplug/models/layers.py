"""From a model's configuration to the requirements of each of its attention layers: no model, no weights, no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from attnplug.errors import RequirementsError
from attnplug.models.architectures import ARCHITECTURES, FORBIDDEN_FIELDS, REFUSED, Architecture
from attnplug.models.fields import Fields, read_fields
from attnplug.models.patterns import BLOCK_SPARSE, CHUNKED, FULL, SLIDING
from attnplug.request.requirements import Requirements

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from os import PathLike

_CACHE_FIELDS: Final = ("block_size", "kv_layout", "kv_cache_form", "kv_cache_dtype")
_LAYERS: Final = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
_HIDDEN: Final = ("hidden_size", "n_embd", "d_model", "dim")
_PARTIAL: Final = "pass partial=True for the requirements of the attention layers alone; on the command line, --partial"


@frozen
class ModelLayer:
    """
    One attention layer of a model.

    Attributes:
        name: The end of its module's name.
        index: Its number in its stack, as the module's `layer_idx`.
        requirements: What it requests of a backend.
    """

    name: str
    index: int
    requirements: Requirements


def requirements(
    hf_config: object,
    *,
    dtype: str | None = None,
    paged: bool = False,
    partial: bool = False,
    assume: str | None = None,
    **engine: Any,
) -> dict[str, Requirements]:
    """
    Return what each attention layer of a model requests of a backend, from its configuration alone.

    The names are the ends of the modules' names in transformers: ``"layers.0.self_attn"`` of a Llama is called
    ``model.layers.0.self_attn`` in `LlamaForCausalLM` and ``layers.0.self_attn`` in `LlamaModel`. Of a composite model
    the language model's part is described, as it reads text; for another part, pass that part's configuration. The
    scale of the scores is not a requirement: the `Layer` has it.

    Args:
        hf_config: A transformers configuration, a mapping of its fields, or the path of a ``config.json``.
        dtype: Dtype of query, key and value, such as ``"bfloat16"``; None reads it from the configuration.
        paged: Whether keys and values are in a paged KV cache, or contiguous (non-paged). Encoders have no KV cache.
        partial: Accept models of which only some layers are attention, and describe those.
        assume: Read an unknown model type as this one, such as ``"llama"``; refused for a known type.
        engine: Further fields of `Requirements` that the engine decides, such as ``block_size=16``; those of the KV
            cache are requested of the layers that have one.

    Raises:
        RequirementsError: The model type is unknown, requirements cannot express its attention, or a field that decides
            is missing.
    """
    return {
        layer.name: layer.requirements
        for layer in model_layers(hf_config, dtype=dtype, paged=paged, partial=partial, assume=assume, **engine)
    }


def requirements_from_json(path: str | PathLike[str], **rest: Any) -> dict[str, Requirements]:
    """
    Return `requirements` of a ``config.json`` or of the folder that holds it, with neither transformers nor torch.

    Args:
        path: The file or folder.
        rest: As for `requirements`.

    Raises:
        RequirementsError: As for `requirements`, or the file does not read.
    """
    return requirements(path, **rest)


def model_layers(
    hf_config: object,
    *,
    dtype: str | None = None,
    paged: bool = False,
    partial: bool = False,
    assume: str | None = None,
    fix: str = _PARTIAL,
    **engine: Any,
) -> tuple[ModelLayer, ...]:
    """
    Return what `requirements` describes, as records.

    Args:
        hf_config: As for `requirements`, as are all but `fix`.
        dtype: Dtype of query, key and value.
        paged: Whether keys and values live in a paged cache.
        partial: Accept models of which only some layers are attention.
        assume: Read an unknown model type as this one.
        fix: The fix for a model of which only some layers are attention, where `partial` is false.
        engine: Further fields of `Requirements`.

    Raises:
        RequirementsError: As for `requirements`.
    """
    whole = read_fields(hf_config)
    _refuse_by_name(whole)
    fields = whole.text()
    architecture = _architecture(fields, assume)
    wanted = {**engine, "paged": paged, "dtype": _dtype(fields, dtype)}
    layers = tuple(_layers(fields, architecture, wanted))
    if not partial:
        _refuse_gaps(fields, architecture, layers, fix)
    if not layers:
        raise _refused(fields, "none of its layers is attention over keys", "run it on its own implementation")
    return layers


def _architecture(fields: Fields, assume: str | None) -> Architecture:
    for name, why in FORBIDDEN_FIELDS.items():
        if fields.get(name):
            raise _refused(fields, f"{why} ({name}={fields.get(name)!r})")
    if str(fields.get("position_embedding_type") or "").startswith("relative"):
        positions = fields.get("position_embedding_type")
        raise _refused(fields, f"its scores depend on relative positions (position_embedding_type={positions!r})")
    _refuse_by_name(fields)
    _check_assumed(fields, assume)
    name = assume or fields.model_type
    if name not in ARCHITECTURES:
        raise RequirementsError(
            f"{fields.origin} is of model type {name!r}",
            f"the {len(ARCHITECTURES)} known model types are in attnplug.models.architectures",
            "pass assume='llama' (or another type described there) if its layers are alike, --assume llama on the"
            " command line; otherwise keep transformers' own attention for it, or build the Requirements by hand",
        )
    architecture = ARCHITECTURES[name]
    for spelled in sorted(architecture.spelled):
        if spelled not in fields.data:
            raise fields.missing(spelled)
    return architecture


def _check_assumed(fields: Fields, assume: str | None) -> None:
    """Refuse an assumption about a known model type, or of an unknown one."""
    known = fields.model_type in ARCHITECTURES
    if assume is None or (assume == fields.model_type and known):
        return
    given = f"assume={assume!r} was given for {fields.origin} of model type {fields.model_type!r}"
    if not isinstance(assume, str) or assume not in ARCHITECTURES:
        raise RequirementsError(
            given,
            f"the {len(ARCHITECTURES)} known model types are in attnplug.models.architectures",
            "leave assume out, or pass assume='llama' (or another one described); on the command line, --assume llama",
        )
    if known:
        raise RequirementsError(
            given,
            f"{fields.model_type!r} is known, and not read as another type",
            "leave assume out; on the command line, --assume",
        )


def _refuse_by_name(fields: Fields) -> None:
    if fields.model_type in REFUSED:
        raise _refused(fields, REFUSED[fields.model_type])


def _refused(
    fields: Fields, why: str, fix: str = "keep transformers' own attention for this model"
) -> RequirementsError:
    return RequirementsError(
        f"{fields.origin} is of model type {fields.model_type!r}",
        f"no requirements describe its attention: {why}",
        fix,
    )


def _dtype(fields: Fields, dtype: str | None) -> str:
    found = dtype or fields.get("dtype", "torch_dtype")
    if found is None:
        raise RequirementsError(
            f"{fields.origin} names no dtype",
            "a backend is chosen for one dtype",
            "pass dtype='bfloat16' (or 'float16', 'float32'); on the command line, --dtype bfloat16",
        )
    return str(found)


def _layers(fields: Fields, architecture: Architecture, wanted: Mapping[str, Any]) -> Iterator[ModelLayer]:
    if architecture.family == "encoder_decoder":
        yield from _two_stacks(fields, architecture, wanted)
        return
    causal = _is_causal(fields, architecture)
    # A layer of another kind, such as a convolution, has no requirements, and keeps its number.
    count = fields.need_integer(*_LAYERS)
    for index, kind in enumerate(architecture.pattern(fields, count)):
        if kind in (FULL, SLIDING, CHUNKED, BLOCK_SPARSE):
            shape = _heads(fields.layer(index), architecture)
            masked = _mask(fields, architecture, kind, causal=causal)
            shared = _shares_cache(fields, index, count, wanted)
            yield ModelLayer(architecture.path.format(index), index, _require(wanted, {**shape, **masked, **shared}))


def _is_causal(fields: Fields, architecture: Architecture) -> bool:
    if architecture.family == "encoder":
        return bool(fields.get("is_decoder"))
    if fields.data.get("is_causal") is False and fields.get("sliding_window") is not None:
        raise _refused(
            fields, "without causality transformers has two meanings of its window (is_causal=False, sliding_window)"
        )
    return fields.data.get("is_causal") is not False


def _mask(fields: Fields, architecture: Architecture, kind: str, *, causal: bool) -> dict[str, Any]:
    cap = fields.get(architecture.soft_cap) if architecture.soft_cap else None
    if not architecture.soft_cap and fields.get("attn_logit_softcapping") is not None:
        raise _refused(fields, "transformers ignores its attn_logit_softcapping")
    switched_off = architecture.alibi_switch and not fields.get(architecture.alibi_switch)
    return {
        "attn_type": "decoder" if causal else "encoder_only",
        "logits_soft_cap": cap,
        "sinks": kind in architecture.sinks,
        "alibi": None if switched_off else architecture.alibi,
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
    """Return the tokens that a token attends to on one side, itself included; encoders count without itself."""
    both_sides = fields.get("sliding_window") is None and "local_attention" in architecture.spelled
    # A window over both sides is written as its whole width.
    width = fields.need_integer("local_attention") // 2 if both_sides else fields.need_integer("sliding_window")
    return width if causal else width + 1


def _heads(fields: Fields, architecture: Architecture, heads: tuple[str, ...] = _HEADS) -> dict[str, Any]:
    count = fields.need_integer(*heads)
    if architecture.kv_heads is not None:
        kv_heads = architecture.kv_heads(fields, count)
    else:
        kv_heads = 1 if fields.get("multi_query") else fields.integer("num_key_value_heads") or count
    size = fields.integer("head_dim") or _divided(fields, architecture, count)
    return {"num_q_heads": count, "num_kv_heads": kv_heads, "head_size": size}


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


def _two_stacks(fields: Fields, architecture: Architecture, wanted: Mapping[str, Any]) -> Iterator[ModelLayer]:
    encoder = _heads(fields, architecture, ("encoder_attention_heads",))
    decoder = _heads(fields, architecture, ("decoder_attention_heads",))
    stacks = [("decoder", "decoder_layers", "decoder", decoder)]
    # Such as BartForCausalLM: a decoder alone, whose cross attention runs where a caller passes hidden states.
    if fields.data.get("is_encoder_decoder") is not False:
        stacks.insert(0, ("encoder", "encoder_layers", "encoder", encoder))
    for stack, layers, attn_type, shape in stacks:
        for index in range(fields.need_integer(layers)):
            name = architecture.path.replace("{stack}", stack).format(index)
            yield ModelLayer(name, index, _require(wanted, {**shape, "attn_type": attn_type}))
    for index in range(fields.need_integer("decoder_layers")):
        yield ModelLayer(
            architecture.cross.format(index), index, _require(wanted, {**decoder, "attn_type": "encoder_decoder"})
        )


def _require(wanted: Mapping[str, Any], own: Mapping[str, Any]) -> Requirements:
    fields = {**wanted, **own}
    if fields["attn_type"] in ("encoder", "encoder_only"):
        fields["paged"] = False
        fields = {name: value for name, value in fields.items() if name not in _CACHE_FIELDS}
        if isinstance(fields.get("late"), (list, tuple)):
            fields["late"] = [name for name in fields["late"] if name not in _CACHE_FIELDS]
    return Requirements(**fields)


def _refuse_gaps(fields: Fields, architecture: Architecture, layers: tuple[ModelLayer, ...], fix: str) -> None:
    """Refuse a model of which some layers are something else."""
    if architecture.family == "encoder_decoder":
        return
    described = {layer.index for layer in layers}
    count = fields.need_integer(*_LAYERS)
    kinds = architecture.pattern(fields, count)
    others = {kinds[index] for index in range(count) if index not in described}
    if others:
        raise RequirementsError(
            f"{fields.origin}: {count - len(described)} of {count} layers are {', '.join(sorted(others))}",
            "those are not attention over keys, and no backend here serves them",
            fix,
        )
