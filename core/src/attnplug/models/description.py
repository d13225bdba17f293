"""A model's attention as a whole: the layers that backends can serve, the others by name, and the assumptions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from attnplug.errors import RequirementsError
from attnplug.models.architectures import ARCHITECTURES, BIASED, LATENT, REFUSED, STATE, Architecture
from attnplug.models.fields import LIBRARY, read_fields
from attnplug.models.latent import latent_attention
from attnplug.models.layers import (
    LAYERS,
    ModelLayer,
    attention_layers,
    decide,
    kinds_of,
    read_text_part,
)
from attnplug.models.patterns import MLA
from attnplug.models.quantization import notes
from attnplug.models.refusals import check_assumed, check_expressible, forbidden

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnplug.models.fields import Fields
    from attnplug.request.requirements import Requirements

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
    whole = read_fields(hf_config)
    fields = read_text_part(whole)
    name = assume or fields.model_type
    check_assumed(fields, assume)
    refused = _refused(whole, fields)
    if refused is not None:
        return ModelDescription(whole.origin, fields.model_type, (), (refused,), tuple(_of_parts(whole, fields)))
    wanted, note = decide(whole, fields, dtype, engine, paged=paged)
    is_biased = name in BIASED
    why = None if is_biased else latent_attention(fields, wanted["dtype"]) or forbidden(fields)
    architecture = _find(fields, name, is_expressible=why is None)
    layers = () if why else tuple(attention_layers(fields, architecture, wanted, is_biased=is_biased))
    others = () if architecture.family == "encoder_decoder" else _others(kinds_of(fields, architecture), layers, why)
    said = [*_of_parts(whole, fields), note, _of_defaults(fields), *_of_layers(architecture, name, paged=paged)]
    said += notes((whole, fields), engine.get("kv_cache_dtype"), paged=paged)
    return ModelDescription(whole.origin, fields.model_type, layers, others, tuple(text for text in said if text))


def _find(fields: Fields, name: str, *, is_expressible: bool) -> Architecture:
    for table in (ARCHITECTURES, BIASED, LATENT):
        if name in table:
            return table[name]
    # What cannot be expressed is described by its fields, whatever its type is called.
    assumed = None if name == fields.model_type else name
    return check_expressible(fields, assumed) if is_expressible else Architecture()


def _others(kinds: Sequence[str], layers: tuple[ModelLayer, ...], why: str | None) -> tuple[OtherLayers, ...]:
    described = {layer.index for layer in layers}
    left: dict[str, list[int]] = {}
    for index, kind in enumerate(kinds):
        if index not in described:
            left.setdefault(kind, []).append(index)
    return tuple(_other(kind, indices, why) for kind, indices in left.items())


def _other(kind: str, indices: list[int], why: str | None) -> OtherLayers:
    if kind in _WHY:
        return OtherLayers(kind, tuple(indices), _WHY[kind], is_attention=False)
    if why is not None:
        return OtherLayers(MLA if why.startswith(MLA) else kind, tuple(indices), why, is_attention=True)
    unknown = "a kind of layer that is not known here, and that no backend is asked to serve"
    return OtherLayers(kind, tuple(indices), unknown, is_attention="attention" in kind)


def _refused(whole: Fields, fields: Fields) -> OtherLayers | None:
    """Return all layers together where the model type says that no requirements describe its attention."""
    for part in (whole, fields):
        if part.model_type in REFUSED and part.model_type not in BIASED:
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


def _of_layers(architecture: Architecture, name: str, *, paged: bool) -> Iterator[str]:
    if architecture.beside:
        yield f"each of these layers has {architecture.beside} beside its attention, which runs on its own"
    if name in BIASED:
        bias = "self-attention adds a learned bias of relative position to the scores: attn_bias, an additive mask"
        yield f"{bias}, which the contract has for contiguous K/V only{', whatever the engine pages' if paged else ''}"
