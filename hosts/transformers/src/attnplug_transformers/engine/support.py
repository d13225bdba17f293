"""Which models the engine runs: causal language models whose computation knows tokens and positions alone."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from torch import nn

from attnplug.errors import LimitsError, RequirementsError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from attnplug.models import ModelLayer

_KEEP = "keep transformers' own attention for this model"


def check_kind(model: Any) -> None:
    """
    Refuse what is no model of transformers with one stack, before its configuration is read.

    Args:
        model: What was given for the model.

    Raises:
        RequirementsError: The engine does not run this; the reason is said.
    """
    _refuse_first(model, _of_what_is_no_model(model))


def check_model(model: Any, layers: Sequence[ModelLayer]) -> None:
    """
    Refuse a model that the engine would run into wrong tokens: for its layers, its forward or its state.

    Args:
        model: The model.
        layers: Its attention layers, as its configuration describes them for paged caches.

    Raises:
        RequirementsError: The model is of a kind that the engine does not run; the reason is said.
    """
    _refuse_first(model, _of_layers(layers))
    _refuse_first(model, _of_kind(model))


def check_call(model: Any) -> None:
    """
    Refuse a model through which a step does not reach the attention that has been put into it.

    Args:
        model: The model.

    Raises:
        RequirementsError: Its forward takes none but its own arguments.
    """
    parameters = inspect.signature(model.forward).parameters
    if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values()):
        reason = ("its forward takes no further keywords", "the step reaches the attention function as one", _KEEP)
        _refuse_first(model, [reason])


def check_lengths(model: Any, max_seq_len: int, max_num_tokens: int) -> None:
    """
    Refuse lengths from which on a model would run into wrong tokens.

    Args:
        model: The model.
        max_seq_len: Tokens of the longest request.
        max_num_tokens: Tokens of the largest step.

    Raises:
        RequirementsError: What the model computes depends on more than tokens and positions there.
    """
    for name, module in model.named_modules():
        _refuse_first(model, _of_rotation(name, module, max_seq_len))
        _refuse_first(model, _of_temperature(name, module, max(max_seq_len, max_num_tokens)))


def longest(model: Any, asked: int | None) -> int:
    """
    Return the tokens of the longest request: as asked, or as many positions as the model has.

    Raises:
        LimitsError: The model has fewer positions, or does not say how many.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    most = positions if asked is None else asked
    if type(most) is not int or most < 1 or (positions is not None and most > positions):
        raise LimitsError(
            f"max_seq_len={asked!r} was given",
            f"the model's configuration has max_position_embeddings={positions}",
            "pass a whole number from 1 to that" if positions else "pass max_seq_len",
        )
    return most


def end_of_text(model: Any) -> tuple[int, ...]:
    """Return the tokens that end a text by the model's generation_config."""
    found = model.generation_config.eos_token_id
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)


def _refuse_first(model: Any, obstacles: Iterable[tuple[str, str, str]]) -> None:
    for given, because, fix in obstacles:
        raise RequirementsError(f"{type(model).__name__} was given to the engine: {given}", because, fix)


def _of_what_is_no_model(model: Any) -> Iterator[tuple[str, str, str]]:
    if "_orig_mod" in getattr(model, "_modules", ()):
        yield (
            "a model compiled by torch.compile",
            "the engine calls the model itself",
            "pass the model that was compiled",
        )
    usual = isinstance(model, nn.Module) and callable(getattr(model, "set_attn_implementation", None))
    if not usual or not hasattr(getattr(model, "config", None), "get_text_config"):
        yield (
            "no model of transformers",
            "the engine runs causal language models of transformers",
            "pass what AutoModelForCausalLM.from_pretrained(...) returns",
        )
    if getattr(model.config, "is_encoder_decoder", False):
        yield "an encoder-decoder", "the engine runs causal language models of one stack", _KEEP


def _of_kind(model: Any) -> Iterator[tuple[str, str, str]]:
    if not callable(getattr(model, "get_output_embeddings", None)) or model.get_output_embeddings() is None:
        yield "a model without a language-model head", "tokens are sampled from its logits", "load it for causal LM"
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" not in parameters:
        yield "its forward takes no position_ids", "requests of one step stand at different positions", _KEEP
    if model.training:
        yield "it is in training mode", "dropout is a training feature", "call model.eval() first"
    devices = {str(parameter.device) for parameter in model.parameters()}
    if devices == {"meta"}:
        yield "its weights are on the meta device", "tensors there hold no numbers", "load it with its weights"
    if len(devices) > 1:
        yield f"it lies on {', '.join(sorted(devices))}", "the engine runs on one device", "load it on one device"


def _of_layers(layers: Sequence[ModelLayer]) -> Iterator[tuple[str, str, str]]:
    for layer in layers:
        asked = layer.requirements
        if asked.attn_type != "decoder":
            yield f"{layer.name} is {asked.attn_type} attention", "the engine runs causal decoders", _KEEP
        if asked.kv_sharing:
            yield (
                f"{layer.name} reads the keys of an earlier layer",
                "its module takes them from transformers' cache object, and the engine has no such object",
                _KEEP,
            )


def _of_rotation(name: str, module: Any, max_seq_len: int) -> Iterator[tuple[str, str, str]]:
    """Dynamic rotary embeddings take their frequencies from the longest sequence of the row."""
    kinds = getattr(module, "rope_type", None)
    for layer_type, kind in kinds.items() if isinstance(kinds, dict) else [(None, kinds)]:
        if kind not in ("dynamic", "longrope"):
            continue
        parameters = module.config.rope_parameters
        parameters = parameters if layer_type is None else parameters[layer_type]
        original = "original_max_position_embeddings"
        fixed = parameters[original] if kind == "longrope" else module.original_max_seq_len
        if max_seq_len > fixed:
            yield (
                f"{name} has rotary embeddings of type {kind!r}",
                f"beyond {fixed} positions their frequencies depend on the longest sequence of a step",
                f"pass max_seq_len={fixed}",
            )


def _of_temperature(name: str, module: Any, most: int) -> Iterator[tuple[str, str, str]]:
    """Llama 4 takes positions for its temperature from the cache object, and without one from the row."""
    if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
        floor = getattr(module, "floor_scale", 1)
        if most >= floor:
            yield (
                f"{name} scales its queries by position",
                f"from {floor:g} on it takes positions from transformers' cache object, and the engine has none",
                f"pass max_seq_len and max_num_tokens below {floor:g}",
            )
