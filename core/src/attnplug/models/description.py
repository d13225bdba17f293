"""A model's attention as a whole: the layers that backends can serve, the others by name, and the assumptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs
from attrs import frozen

from attnplug.errors import RequirementsError
from attnplug.models.architectures import ARCHITECTURES, BIASED, REFUSED, STATE, Architecture
from attnplug.models.fields import LIBRARY, read_fields
from attnplug.models.known_fields import dropped, unknown
from attnplug.models.latent import indexer_note, sparse_selection
from attnplug.models.layers import (
    LAYERS,
    ModelLayer,
    attention_layers,
    decide,
    kinds_of,
    read_text_part,
)
from attnplug.models.patterns import INDEXED, every_layer, listed
from attnplug.models.quantization import notes
from attnplug.models.refusals import check_assumed, forbidden, inexpressible, of_close_name, unknown_type

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from os import PathLike

    from attnplug.models.fields import Fields
    from attnplug.request.requirements import Requirements

_PARTIAL: Final = "pass partial=True for the requirements of the attention layers alone"
_KEPT: Final = "with a state instead of a KV cache"
_WHY: Final = {
    "linear_attention": f"linear attention or a state-space recurrence (Mamba, gated delta net), {_KEPT}",
    "conv": f"a short convolution, {_KEPT}",
    "mlp": "a feed-forward layer",
    "moe": "a feed-forward layer of experts",
    "no_attention": "a layer whose attention was left out",
    "linear_layer": "a layer whose attention was replaced by a linear layer",
}


@frozen
class OtherLayers:
    """
    Layers that no requirements describe.

    Attributes:
        kind: What they are, in transformers' words where it has some.
        indices: Their numbers in the stack; empty where the configuration does not say how many there are.
        why: What they are, or what they need that the contract does not express.
        is_attention: Whether they are attention that a backend would have to serve. Others, such as recurrences, are
            not attention over keys, and run on their own implementation beside any backend.
    """

    kind: str
    indices: tuple[int, ...]
    why: str
    is_attention: bool

    def __str__(self) -> str:
        count = f"{len(self.indices)} layer{'s' * (len(self.indices) != 1)}: " if self.indices else ""
        return f"{count}{self.why}" if self.why.startswith(self.kind) else f"{count}{self.kind}: {self.why}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "kind": self.kind,
            "indices": list(self.indices),
            "why": self.why,
            "is_attention": self.is_attention,
        }


@frozen
class ModelDescription:
    """
    The attention of a model, from its configuration.

    Attributes:
        origin: What was read.
        model_type: The architecture's name in transformers; of a composite model, that of its text part.
        layers: The attention layers, with what each requests of a backend.
        others: The layers that no requirements describe.
        notes: What was assumed because the configuration leaves it out, and what of it changes nothing.
    """

    origin: str
    model_type: str
    layers: tuple[ModelLayer, ...]
    others: tuple[OtherLayers, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def requirements(self) -> dict[str, Requirements]:
        """The requirements of each attention layer, by the end of its module's name."""
        return {layer.name: layer.requirements for layer in self.layers}

    @property
    def uncompressed(self) -> dict[str, Requirements]:
        """The requests of uncompressed prefills, by layer, where keys are latents."""
        return {layer.name: layer.uncompressed for layer in self.layers if layer.uncompressed is not None}

    @property
    def unserved(self) -> tuple[OtherLayers, ...]:
        """The attention layers that the contract does not express: no backend can serve them."""
        return tuple(other for other in self.others if other.is_attention)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, without the layers."""
        return {
            "origin": self.origin,
            "model_type": self.model_type,
            "others": [other.to_dict() for other in self.others],
            "notes": list(self.notes),
        }


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
    Return the requirements of each attention layer of a model, from its configuration alone.

    The names are the ends of the modules' names in transformers: ``"layers.0.self_attn"`` of a Llama is called
    ``model.layers.0.self_attn`` in `LlamaForCausalLM` and ``layers.0.self_attn`` in `LlamaModel`. Of a composite model
    the language model's part is described, as it reads text; for another part, pass that part's configuration. The
    scale of the scores is not a requirement: the `Layer` has it.

    Args:
        hf_config: A transformers configuration, a mapping of its fields, the path of a ``config.json`` or of its
            folder, or a model id in the local Hugging Face cache. A field that it leaves out has transformers' default;
            `describe_model` says which were used.
        dtype: Dtype of query, key and value, such as ``"bfloat16"``; None reads it, then assumes what transformers
            does: the dtype of the weights beside a ``config.json``, else float32.
        paged: Whether keys and values are in a paged KV cache, or contiguous (non-paged). Encoders have no KV cache.
        partial: Accept models of which only some layers are attention, and describe those.
        assume: Read an unknown model type as this one, such as ``"llama"``; refused for a known type.
        engine: Further fields of `Requirements` that the engine decides, such as ``block_size=16``; those of the KV
            cache are requested of the layers that have one. Without `kv_cache_dtype`, a paged KV cache has the dtype
            that the checkpoint's quantization names, if any.

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
    Return the layers that `requirements` describes, as records.

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
    model, architecture = _describe(hf_config, dtype, assume, engine, paged=paged)
    _refuse_left_out(model, architecture, None if partial else fix)
    return model.layers


def describe_model(
    hf_config: object, *, dtype: str | None = None, paged: bool = True, assume: str | None = None, **engine: Any
) -> ModelDescription:
    """
    Describe the attention of a whole model, from its configuration alone: no model, no weights, no torch.

    Beside `requirements` it describes more: what it cannot express is named instead of refused, and so are assumptions.

    Args:
        hf_config: A transformers configuration, a mapping of its fields, the path of a ``config.json`` or of its
            folder, or a model id in the local Hugging Face cache.
        dtype: Dtype of query, key and value; None reads it, then assumes what transformers does.
        paged: Whether keys and values are in a paged KV cache. Layers that cannot have one have contiguous K/V.
        assume: Read an unknown model type as this one, such as ``"llama"``; refused for a known type.
        engine: Further fields of `Requirements` that the engine decides. Without `kv_cache_dtype`, a paged KV cache has
            the dtype that the checkpoint's quantization names, if any.

    Raises:
        RequirementsError: The configuration is not found or does not read, its model type is unknown, or a field that
            decides is missing or invalid.
    """
    return _describe(hf_config, dtype, assume, engine, paged=paged)[0]


def _describe(
    hf_config: object, dtype: str | None, assume: str | None, engine: dict[str, Any], *, paged: bool
) -> tuple[ModelDescription, Architecture]:
    whole = read_fields(hf_config)
    fields = read_text_part(whole)
    name = assume or fields.model_type
    check_assumed(fields, assume)
    refused = _refused(whole, fields)
    if refused is not None:
        parts = tuple(_of_parts(whole, fields))
        return ModelDescription(whole.origin, fields.model_type, (), (refused,), parts), Architecture()
    wanted, note = decide(whole, fields, dtype, engine, paged=paged)
    is_biased = name in BIASED
    why = None if is_biased else forbidden(fields, name)
    architecture = _find(fields, name, is_expressible=why is None)
    layers = () if why else tuple(attention_layers(fields, architecture, wanted, is_biased=is_biased))
    if assume is not None and not why and (why := dropped(fields, name)):
        layers = ()
    kinds = () if architecture.family == "encoder_decoder" else kinds_of(fields, architecture)
    others = _others(fields, kinds, layers, why)
    said = [*_of_parts(whole, fields), note, _of_defaults(fields), *_of_layers(architecture, name, paged=paged)]
    said += [indexer_note(fields, layers), _of_unknown(fields)]
    said += notes((whole, fields), engine.get("kv_cache_dtype"), paged=paged)
    described = ModelDescription(whole.origin, fields.model_type, layers, others, tuple(text for text in said if text))
    return described, architecture


def _find(fields: Fields, name: str, *, is_expressible: bool) -> Architecture:
    for table in (ARCHITECTURES, BIASED):
        if name in table:
            return table[name]
    # What cannot be expressed is described by its fields, whatever its type is called.
    if is_expressible:
        raise unknown_type(fields, name, _suggested(fields))
    return Architecture(pattern=listed(every_layer))


def _suggested(fields: Fields) -> list[str]:
    """Return the types whose fields fit an unknown one: those of a close name, then Llama."""
    fitting = []
    for name in [*of_close_name(fields.model_type), "llama", "deepseek_v3"]:
        trial = attrs.evolve(fields, defaults={}, assumed={}, read=set())
        try:
            found = list(attention_layers(trial, ARCHITECTURES[name], {"paged": False, "dtype": "bfloat16"}))
        except RequirementsError:
            continue
        is_whole = dropped(trial, name) is None and forbidden(trial, name) is None
        if found and is_whole and not any(unknown(trial, by_name=True)):
            fitting.append(name)
    return fitting


def _refuse_left_out(model: ModelDescription, architecture: Architecture, fix: str | None) -> None:
    """Refuse a model without attention layers to serve; with a fix, also one that has other layers besides."""
    if model.model_type in BIASED:
        raise inexpressible(model, REFUSED[model.model_type])
    if not model.layers:
        if model.unserved:
            raise inexpressible(model, model.unserved[0].why)
        why = f"none of its layers is attention over keys{f' ({model.others[0].why})' if model.others else ''}"
        raise inexpressible(model, why)
    if fix is not None and architecture.beside:
        raise RequirementsError(
            f"{model.origin}: each attention layer has {architecture.beside} beside it",
            "that is not attention over keys, and no backend here serves it",
            fix,
        )
    if fix is not None and model.others:
        left = sum(len(other.indices) for other in model.others)
        kinds = ", ".join(sorted(other.kind for other in model.others))
        raise RequirementsError(
            f"{model.origin}: {left} of {left + len(model.layers)} layers are {kinds}",
            "those are not attention over keys, and no backend here serves them",
            fix,
        )


def _others(
    fields: Fields, kinds: Sequence[str], layers: tuple[ModelLayer, ...], why: str | None
) -> tuple[OtherLayers, ...]:
    described = {layer.index for layer in layers}
    left: dict[str, list[int]] = {}
    for index, kind in enumerate(kinds):
        if index not in described:
            left.setdefault(kind, []).append(index)
    return tuple(_other(fields, kind, indices, why) for kind, indices in left.items())


def _other(fields: Fields, kind: str, indices: list[int], why: str | None) -> OtherLayers:
    if kind in _WHY:
        return OtherLayers(kind, tuple(indices), _WHY[kind], is_attention=False)
    if kind == INDEXED:
        why = sparse_selection(fields, ARCHITECTURES.get(fields.model_type))
    if why is not None:
        return OtherLayers(kind, tuple(indices), why, is_attention=True)
    unknown = "a kind of layer that is not known here, and that no backend is asked to serve"
    return OtherLayers(kind, tuple(indices), unknown, is_attention="attention" in kind)


def _refused(whole: Fields, fields: Fields) -> OtherLayers | None:
    """Return all layers together where the model type says that no requirements describe its attention."""
    for part in (whole, fields):
        is_read = part.model_type in BIASED and part.origin == fields.origin
        if part.model_type in REFUSED and not is_read:
            try:
                count = fields.integer(*LAYERS) or 0
            except RequirementsError:
                count = 0
            why = REFUSED[part.model_type]
            return OtherLayers(part.model_type, tuple(range(count)), why, is_attention=why != STATE)
    return None


def _of_parts(whole: Fields, fields: Fields) -> Iterator[str]:
    """Yield which part of a composite model is described, and which are not."""
    if fields.origin == whole.origin:
        return
    described = fields.origin.removeprefix(f"{whole.origin}.")
    others = [name for name, value in whole.data.items() if name.endswith("_config") and isinstance(value, dict)]
    others = [name for name in others if name not in ("quantization_config", described.partition(".")[0])]
    rest = f"; {', '.join(others)} {'are' if len(others) > 1 else 'is'} not described" if others else ""
    yield f"{described} of {whole.model_type!r} is described, as it reads text{rest}"
    if whole.get("use_bidirectional_attention") == "vision" or fields.get("use_bidirectional_attention") == "vision":
        yield "tokens of one image attend to each other in both directions, which text does not need"


def _of_defaults(fields: Fields) -> str:
    used = {name: value for name, value in fields.assumed.items() if value not in (False, 0, None)}
    listed = ", ".join(f"{name}={value}" for name, value in sorted(used.items()))
    return f"the configuration leaves out {listed}: the default of {LIBRARY} for {fields.model_type!r}" if used else ""


def _of_unknown(fields: Fields) -> str:
    names = ", ".join(sorted(unknown(fields)))
    return f"not read, and not known to leave attention as it is: {names}" if names else ""


def _of_layers(architecture: Architecture, name: str, *, paged: bool) -> Iterator[str]:
    if architecture.beside:
        yield f"each of these layers has {architecture.beside} beside its attention, which runs on its own"
    if name in BIASED:
        bias = "self-attention adds a learned bias of relative position to the scores: attn_bias, an additive mask"
        yield f"{bias}, which the contract has for contiguous K/V only{', whatever the engine pages' if paged else ''}"
