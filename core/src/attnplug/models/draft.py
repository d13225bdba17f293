"""The attention of a draft model, whose tokens the model verifies: another model, an EAGLE head, or MTP layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

import attrs

from attnplug.errors import RequirementsError
from attnplug.models.description import describe_model
from attnplug.models.fields import Fields, load_fields
from attnplug.models.locate import find_config

if TYPE_CHECKING:
    from pathlib import Path

    from attnplug.models.description import ModelDescription
    from attnplug.models.layers import ModelLayer

_MTP: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""The number of layers of multi-token prediction: of DeepSeek-V3, GLM-4-MoE and MiMo; of Qwen3-Next and later."""

_PARTS: Final = ("transformer_layer_config", "model")
"""The decoder in a configuration of the library speculators, and in vLLM's of the type ``eagle``."""

_WITHOUT: Final = ("medusa", "mlp_speculator")


def describe_draft(hf_config: object, model: ModelDescription, **engine: Any) -> ModelDescription:
    """
    Describe the attention of a model's draft. Its dtype and that of its KV cache are the model's, unless given.

    The model's own configuration stands for its layers of multi-token prediction (MTP), which request the same as its
    other attention layers.

    Args:
        hf_config: As for `describe_model`; also an EAGLE head, alone or in a configuration of speculators.
        model: The model.
        engine: As for `describe_model`.

    Raises:
        RequirementsError: As for `describe_model`; or the draft has no attention layers, or it is the model itself and
            names no MTP layers, or these could be of several kinds.
    """
    fields = load_fields(hf_config)
    if fields.file is not None and _is_read_from(fields.file, model):
        return _mtp(fields.text(), model)
    if fields.model_type in _WITHOUT:
        raise RequirementsError(
            f"{fields.origin} is a draft of type {fields.model_type!r}",
            "it has no attention layers, so that a plan has nothing to decide for it",
            "plan the model without a draft",
        )
    first = next((layer.requirements for layer in model.layers), None)
    paged = next((each for each in model.requirements.values() if each.paged), None)
    usual = {"dtype": first.dtype} if first is not None else {}
    usual |= {"kv_cache_dtype": paged.kv_cache_dtype} if paged is not None else {}
    part = next((name for name in _PARTS if isinstance(fields.data.get(name), Mapping)), None)
    if part is None:
        return describe_model(hf_config, **{**usual, **engine})
    found = describe_model(dict(fields.data[part]), **{**usual, **engine})
    return attrs.evolve(found, origin=f"{fields.origin}.{part}")


def _is_read_from(file: Path, model: ModelDescription) -> bool:
    try:
        return find_config(model.origin).resolve() == file.resolve()
    except (RequirementsError, OSError):  # the model was no file
        return False


def _mtp(fields: Fields, model: ModelDescription) -> ModelDescription:
    count = fields.integer(*_MTP, least=0) or 0
    if not count or not model.layers:
        raise RequirementsError(
            f"{model.origin} was given as the model and as its draft",
            f"a model drafts for itself with MTP layers, and neither {_MTP[0]!r} nor {_MTP[1]!r} counts any",
            "pass the configuration of another draft, or none",
        )
    kinds = {layer.requirements for layer in model.layers}
    if len(kinds) > 1:
        raise RequirementsError(
            f"{model.origin} was given as its own draft, and its layers have {len(kinds)} kinds of attention",
            "the configuration does not say of which kind its MTP layers are",
            "pass a configuration of the MTP layers alone as the draft",
        )
    after = max(layer.index for layer in model.layers) + 1
    layers = tuple(_renumbered(model.layers[-1], index) for index in range(after, after + count))
    return attrs.evolve(model, layers=layers, others=(), notes=())


def _renumbered(layer: ModelLayer, index: int) -> ModelLayer:
    name = layer.name.replace(f".{layer.index}.", f".{index}.")
    return attrs.evolve(layer, name=name, index=index, indexer=name if layer.indexer else None)
