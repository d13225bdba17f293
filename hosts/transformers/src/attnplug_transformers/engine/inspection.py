"""Which models the engine runs: causal language models whose computation knows tokens and positions alone."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from torch import Tensor, nn

from attnplug.errors import LimitsError, NotNegotiatedError, RequirementsError
from attnplug_transformers.call import tensor_version
from attnplug_transformers.engine.layers import LayerSpec
from attnplug_transformers.mask import LazyMask
from attnplug_transformers.packing import Pattern

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from attnplug.models import ModelLayer
    from attnplug_transformers.engine.model_attention import AttentionCall


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


def eos_tokens(model: Any) -> tuple[int, ...]:
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


_TOKENS: Final = 5
"""Tokens of the sequences that are tried."""

_ROWS: Final = 64
"""Queries whose row of the mask is looked at."""

_ALIKE: Final = 0.05
"""Same token, same position: so far, of the largest value, may rows differ by the rounding of a narrow dtype."""


def inspect_layers(model: Any, layers: Sequence[ModelLayer], kv_cache_dtype: str) -> tuple[LayerSpec, ...]:
    """
    Run the model twice on a few tokens, without attending, and return what its attention calls brought.

    The first run looks at the masks that the model asks for. The second has the same sequence twice in one row, as a
    step of the engine has several requests: whatever of a module depends on more than token and position shows.

    Args:
        model: The model, on the engine's attention implementation.
        layers: Its attention layers, as the configuration describes them for paged caches.
        kv_cache_dtype: Dtype of the caches.

    Raises:
        RequirementsError: A layer was not called, or the model's computation depends on where in a row a token stands.
        NotNegotiatedError: A call brings what the configuration does not say.
    """
    looking = LayerRecorder(layers, kv_cache_dtype)
    ids = torch.arange(1, _TOKENS + 1, device=model.device) % model.config.get_text_config().vocab_size
    positions = torch.arange(_TOKENS, device=model.device)
    mask = placeholder_mask(model.device)
    packed = PackingCheck(mask)
    with torch.inference_mode():
        _call(model, ids, positions, looking, None)
        looking.check_complete()
        _call(model, ids.repeat(2), positions.repeat(2), packed, mask)
    return tuple(attrs.evolve(found, takes_mask=packed.masked[found.module]) for found in looking.found.values())


def placeholder_mask(device: torch.device) -> Tensor:
    """Return what goes in place of a mask: four axes let the library take it for a prepared one, and make none."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def _call(model: Any, ids: Tensor, positions: Tensor, answering: Any, mask: Tensor | None) -> None:
    model(
        input_ids=ids[None],
        position_ids=positions[None],
        attention_mask=mask,
        use_cache=False,
        attnplug_step=answering,
    )


def _zeros(asked: AttentionCall) -> Tensor:
    return asked.query.new_zeros(asked.query.shape[0], asked.query.shape[1] * asked.value.shape[2])


class LayerRecorder:
    """Answers with nothing, and remembers who asked for what."""

    def __init__(self, layers: Sequence[ModelLayer], kv_cache_dtype: str) -> None:
        self.found: dict[int, LayerSpec] = {}
        self._layers = {layer.index: layer for layer in layers}
        self._kv_cache_dtype = kv_cache_dtype

    def answer(self, asked: AttentionCall) -> Tensor:
        """Learn from the first call of a module."""
        index = getattr(asked.module, "layer_idx", None)
        layer = self._layers.get(index) if isinstance(index, int) else None
        if layer is None or layer.index in self.found:
            raise RequirementsError(
                f"the model called its attention from {type(asked.module).__name__} {index}",
                f"its configuration describes {len(self._layers)} layers, each of which attends once",
                "keep transformers' own attention for this model",
            )
        _check_mask(asked, layer)
        requirements = asked.call.agree(layer).evolve(kv_cache_dtype=self._kv_cache_dtype)
        sinks = (asked.sinks, tensor_version(asked.sinks))
        self.found[layer.index] = LayerSpec(
            layer.name, asked.module, requirements, asked.call, asked.scale, sinks, takes_mask=True
        )
        return _zeros(asked)

    def check_complete(self) -> None:
        """Refuse a model of which a layer attends by other means."""
        missing = [layer.name for index, layer in self._layers.items() if index not in self.found]
        if missing:
            raise RequirementsError(
                f"{len(missing)} attention layers of the model, {missing[0]!r} first, did not ask the engine",
                "the classes of this model do not let their attention be replaced in all layers",
                "keep transformers' own attention for this model",
            )


class PackingCheck:
    """Answers with nothing, and compares the second half of the row with the first."""

    def __init__(self, mask: Tensor) -> None:
        self.masked: dict[nn.Module, bool] = {}
        self._mask = mask

    def answer(self, asked: AttentionCall) -> Tensor:
        """Hold equal tokens at equal positions against each other."""
        name = f"{type(asked.module).__name__} {asked.module.layer_idx}"
        for rows in (asked.query, asked.key, asked.value):
            first, second = rows[:_TOKENS].float(), rows[_TOKENS:].float()
            if float((first - second).abs().max()) > _ALIKE * float(first.abs().max()):
                raise RequirementsError(
                    f"{name} computes different queries, keys or values for one token at one position",
                    "they depend on where in the row of a step the token stands: the model does not go by position_ids"
                    " alone",
                    "keep transformers' own attention for this model",
                )
        if asked.mask is not None and asked.mask is not self._mask:
            raise NotNegotiatedError(
                f"{name} is given a mask that the model computed",
                "the engine's steps have no mask tensor: requests are told apart by their pages",
                "keep transformers' own attention for this model",
            )
        self.masked[asked.module] = asked.mask is not None
        return _zeros(asked)


def _check_mask(asked: AttentionCall, layer: ModelLayer) -> None:
    """Hold the mask that the model asks for against what was negotiated, beyond the reach of windows and chunks."""
    pattern = Pattern.of(layer.requirements)
    if asked.mask is None and not pattern.is_local:
        return
    reach = 2 * ((pattern.left or 0) + (pattern.chunk or 0)) + _TOKENS
    rows = min(reach, _ROWS)
    if isinstance(asked.mask, LazyMask):
        far = attrs.evolve(asked.mask, q_length=rows, kv_length=reach, q_offset=reach - rows, packings={})
        queries, keys = torch.arange(reach - rows, reach), torch.arange(reach)
        expected = pattern.attends(queries[:, None], keys[None, :])
        if all(bool((found[0].cpu() == expected[start : start + found.shape[1]]).all()) for start, found in far.rows()):
            return
    raise NotNegotiatedError(
        f"{layer.name}: by the mask that the model asks for, other keys are attended",
        f"by its configuration this is {pattern}, and the backend is chosen for that",
        "keep transformers' own attention for this model",
    )
