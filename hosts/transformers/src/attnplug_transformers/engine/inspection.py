"""
Which models the engine runs: causal language models whose attention depends on tokens and positions alone.

`check_class`, `check_model` and `check_lengths` read the model; `inspect_layers` runs it.
"""

from __future__ import annotations

import inspect
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NoReturn

import attrs
import torch
from torch import Tensor, nn

from attnplug.errors import LimitsError, NotNegotiatedError, RequirementsError
from attnplug_transformers.call import module_name, tensor_version
from attnplug_transformers.engine.adapters import alibi_slopes, is_adapted
from attnplug_transformers.engine.latent import LatentCache
from attnplug_transformers.engine.layers import LayerSpec, is_placeholder
from attnplug_transformers.engine.model_attention import fixed_attention, placeholder_mask, serving
from attnplug_transformers.engine.scales import scales_of
from attnplug_transformers.mask import LazyMask
from attnplug_transformers.packing import Pattern

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.models import ModelLayer
    from attnplug.request import Requirements
    from attnplug_transformers.call import AttentionCall
    from attnplug_transformers.engine.model_attention import AttentionHandler

KEEP: Final = (
    "generate with transformers and attn_implementation='attnplug' (attnplug_transformers.register()), which serves"
    " more models, or keep transformers' own attention for this model"
)

_TOKENS: Final = 5
"""Tokens of the sequences that `inspect_layers` runs."""

_TRAINING: Final = attrgetter("training")

_ROWS: Final = 64
"""Queries whose row of the mask is compared."""

_TOLERANCE: Final = 0.05
"""How far rows of one token at one position may differ by the rounding of a 16-bit dtype, relative to the largest."""


def check_options(graphs: object, async_scheduling: object, prefix_caching: object, kv_cache_dtype: object) -> None:
    """
    Check the types of an engine's options.

    Raises:
        RequirementsError: One has another type.
    """

    def refuse(name: str, value: object, expected: str, fix: str) -> NoReturn:
        raise RequirementsError(f"{name}={value!r} was given to the engine", f"it is {expected}", fix)

    if graphs is not None and not isinstance(graphs, bool):
        refuse("graphs", graphs, "True, False or None", "leave graphs out to capture steps on CUDA")
    if async_scheduling is not None and not isinstance(async_scheduling, bool):
        refuse("async_scheduling", async_scheduling, "True, False or None", "leave it out to run ahead on CUDA")
    if not isinstance(prefix_caching, bool):
        refuse("prefix_caching", prefix_caching, "True or False", "leave prefix_caching out for True")
    if not isinstance(kv_cache_dtype, (str, torch.dtype)):
        refuse("kv_cache_dtype", kv_cache_dtype, "a dtype of torch, its name, or 'auto'", "pass 'auto', or 'fp8'")


def check_class(model: Any) -> None:
    """
    Check, before its configuration is read, that this is a model of transformers without an encoder.

    Raises:
        RequirementsError: It is not.
    """
    if "_orig_mod" in getattr(model, "_modules", ()):
        expected = "the engine calls the model itself"
        _refuse(model, "a model compiled by torch.compile", expected, "pass the model that was compiled")
    switchable = isinstance(model, nn.Module) and callable(getattr(model, "set_attn_implementation", None))
    if not switchable or not hasattr(getattr(model, "config", None), "get_text_config"):
        expected = "the engine runs causal language models of transformers"
        fix = "pass what AutoModelForCausalLM.from_pretrained(...) returns"
        _refuse(model, "not a model of transformers", expected, fix)
    if getattr(model.config, "is_encoder_decoder", False):
        _refuse(model, "an encoder-decoder", "the engine runs causal language models of one stack")
    # Before the configuration is read: no reading of a model type makes such classes call the engine.
    if not is_adapted(model) and not model._can_set_attn_implementation():  # noqa: SLF001 - without a public name
        raise fixed_attention(model)


def check_model(model: Any, layers: Sequence[ModelLayer]) -> None:
    """
    Check the layers, the forward and the state of a model.

    Args:
        model: The model.
        layers: Its attention layers, as its configuration describes them for paged KV caches.

    Raises:
        RequirementsError: The engine does not run it, or would run it to wrong tokens.
    """
    if not callable(getattr(model, "get_output_embeddings", None)) or model.get_output_embeddings() is None:
        expected = "tokens are sampled from its logits"
        _refuse(model, "a model without a language-model head", expected, "load it for causal LM")
    # ALiBi depends on the distance in the KV cache, and its models have no other positions.
    placed = all(layer.requirements.alibi for layer in layers)
    if not placed and "position_ids" not in inspect.signature(model.forward).parameters:
        _refuse(model, "its forward takes no position_ids", "requests of one step are at different positions")
    for layer in layers:
        if layer.requirements.attn_type != "decoder":
            found = f"{layer.name} is {layer.requirements.attn_type} attention"
            _refuse(model, found, "the engine runs causal decoders")
    if training := [name for name, module in model.named_modules() if module.training]:
        found = f"{training[0] or 'it'} is in training mode"
        _refuse(model, found, "dropout is a training feature", "call model.eval() first")
    devices = {str(parameter.device) for parameter in model.parameters()}
    if devices == {"meta"}:
        expected = "tensors of that device hold no numbers"
        _refuse(model, "its weights are on the meta device", expected, "load it with its weights")
    if len(devices) > 1:
        found = f"its weights are on {', '.join(sorted(devices))}"
        _refuse(model, found, "the engine runs on one device", "load it on one device")


def check_autocast(device: torch.device) -> None:
    """
    Check that torch.autocast is off: KV caches and backends have the dtype of the model.

    Raises:
        NotNegotiatedError: It is on.
    """
    if torch.is_autocast_enabled(device.type):
        raise NotNegotiatedError(
            f"torch.autocast to {torch.get_autocast_dtype(device.type)} is on for {device.type}",
            "the engine's KV caches and backends have the dtype of the model, and autocast gives values another one",
            "leave the autocast block, or load the model in that dtype",
        )


class EvaluationMode:
    """
    Checks that a model stays in evaluation mode; 300 modules take some 10 microseconds.

    Args:
        model: The model. Modules that it gets later are not checked.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._modules = tuple(model.modules())

    def check(self) -> None:
        """
        Check the model and all of its modules.

        Raises:
            NotNegotiatedError: One is in training mode.
        """
        if any(map(_TRAINING, self._modules)):
            name = next((name for name, module in self._model.named_modules() if module.training), "")
            raise NotNegotiatedError(
                f"{name or 'the model'} of {type(self._model).__name__} is in training mode",
                "it was in evaluation mode when the engine was made, and dropout changes tokens at random",
                "call model.eval() before the next step; unfinished requests go on from where they are",
            )


def check_lengths(model: Any, max_seq_len: int, max_num_tokens: int) -> None:
    """
    Check that no module computes something else from some length on.

    Args:
        model: The model.
        max_seq_len: Tokens of the longest request.
        max_num_tokens: Tokens of the largest step.

    Raises:
        RequirementsError: From one of these lengths on it depends on more than tokens and positions.
    """
    for name, module in model.named_modules():
        _check_rotary(model, name, module, max_seq_len)
        # Llama 4 takes positions for its temperature from the cache object, and without one from the row.
        if getattr(module, "attn_temperature_tuning", False) and not getattr(module, "use_rope", True):
            floor = getattr(module, "floor_scale", 1)
            if max(max_seq_len, max_num_tokens) >= floor:
                expected = (
                    f"from {floor:g} on it takes positions from transformers' cache object, and the engine has none"
                )
                fix = f"pass max_seq_len and max_num_tokens below {floor:g}"
                _refuse(model, f"{name} scales its queries by position", expected, fix)


def _check_rotary(model: Any, name: str, module: Any, max_seq_len: int) -> None:
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
            expected = f"beyond {fixed} positions their frequencies depend on the longest sequence of a step"
            _refuse(model, f"{name} has rotary embeddings of type {kind!r}", expected, f"pass max_seq_len={fixed}")


def _refuse(model: Any, found: str, expected: str, fix: str = KEEP) -> NoReturn:
    raise RequirementsError(f"{type(model).__name__} was given to the engine: {found}", expected, fix)


def resolve_max_seq_len(model: Any, requested: int | None) -> int:
    """
    Return the tokens of the longest request: as requested, or as many positions as the model has.

    Raises:
        LimitsError: The model has fewer positions, or does not report how many.
    """
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    length = positions if requested is None else requested
    if type(length) is not int or length < 1 or (positions is not None and length > positions):
        raise LimitsError(
            f"max_seq_len={requested!r} was given",
            f"the model's configuration has max_position_embeddings={positions}",
            "pass a whole number from 1 to that" if positions else "pass max_seq_len",
        )
    return length


def inspect_layers(
    model: Any, layers: Sequence[ModelLayer], kv_cache_dtype: str | torch.dtype
) -> tuple[LayerSpec, ...]:
    """
    Run the model twice on a few tokens, with zeros for attention, and return what its attention calls were.

    The first run compares the masks that the model builds. The second has the same sequence twice in one row, as a step
    of the engine has several requests: it shows modules that depend on more than token and position.

    Args:
        model: The model, on the engine's attention.
        layers: Its attention layers, as its configuration describes them for paged KV caches.
        kv_cache_dtype: Dtype of the KV caches.

    Raises:
        RequirementsError: A layer made no call, or the model depends on where in a row a token is.
        NotNegotiatedError: A call differs from the configuration.
    """
    ids = torch.arange(1, _TOKENS + 1, device=model.device) % model.config.get_text_config().vocab_size
    positions = torch.arange(_TOKENS, device=model.device)
    slopes = alibi_slopes(model)
    mask = placeholder_mask(model.device, alibi=slopes is not None)
    latents = LatentCache(compares=True) if any(layer.requirements.latent for layer in layers) else None
    if any(layer.requirements.topk is not None for layer in layers):  # an indexer computes with the mask
        rows = torch.arange(2 * _TOKENS, device=model.device)
        mask = (rows[:, None] >= rows) & (rows[:, None] // _TOKENS == rows // _TOKENS)
        mask = mask[None, None]
    recorder, packing = LayerRecorder(layers, kv_cache_dtype, slopes), PackingCheck(mask)
    with torch.inference_mode():
        _call(model, ids, positions, recorder, None, latents)
        recorder.check_complete()
        _call(model, ids.repeat(2), positions.repeat(2), packing, mask, latents)
    index_keys = {} if latents is None else latents.index_keys
    return tuple(
        attrs.evolve(spec, takes_mask=packing.takes_mask[spec.module], index_key=index_keys.get(index))
        for index, spec in recorder.specs.items()
    )


def _call(
    model: Any,
    ids: Tensor,
    positions: Tensor,
    handler: AttentionHandler,
    mask: Tensor | None,
    latents: LatentCache | None,
) -> None:
    with serving(handler, latents) as cache:
        model(input_ids=ids[None], position_ids=positions[None], attention_mask=mask, use_cache=False, **cache)


def _zeros(call: AttentionCall) -> Tensor:
    return call.query.new_zeros(call.query.shape[2], call.query.shape[1] * call.value.shape[3])


class LayerRecorder:
    """
    Records the call of each layer.

    Attributes:
        specs: By the number of the layer, what was recorded.
    """

    def __init__(
        self, layers: Sequence[ModelLayer], kv_cache_dtype: str | torch.dtype, alibi_slopes: Tensor | None = None
    ) -> None:
        self.specs: dict[int, LayerSpec] = {}
        self._layers = {layer.index: layer for layer in layers}
        self._kv_cache_dtype = kv_cache_dtype
        self._alibi_slopes = alibi_slopes
        self._keys: list[tuple[Tensor, str]] = []

    def attend(self, call: AttentionCall) -> Tensor:
        """Record the call, and return zeros."""
        index = getattr(call.module, "layer_idx", None)
        layer = self._layers.get(index) if isinstance(index, int) else None
        if layer is None or layer.index in self.specs:
            raise RequirementsError(
                f"the model called its attention from {module_name(call.module)}",
                f"its configuration describes {len(self._layers)} layers, each of which attends once",
                KEEP,
            )
        _check_mask(call, layer)
        if (call.indices is None) != (layer.requirements.topk is None):
            raise NotNegotiatedError(
                f"{layer.name}: the call has {'no ' if call.indices is None else ''}tokens that an indexer selects",
                f"by the model's configuration, topk={layer.requirements.topk}",
                KEEP,
            )
        requirements = call.signature.narrow(layer).evolve(kv_cache_dtype=self._kv_cache_dtype)
        target = self._find_target(call, layer)
        k_scale, v_scale = self._scales(call, requirements, target)
        if k_scale is not None and k_scale.numel() > 1:
            requirements = requirements.evolve(per_head_scales=True)
        sinks = (call.sinks, tensor_version(call.sinks))
        self.specs[layer.index] = LayerSpec(
            layer.name,
            call.module,
            requirements,
            call.signature,
            call.scale,
            sinks,
            takes_mask=True,
            alibi_slopes=self._alibi_slopes,
            kv_sharing_target=target,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return _zeros(call)

    def _scales(
        self, call: AttentionCall, requirements: Requirements, target: str | None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the scales of the layer's KV cache, which are those of the layer that writes it."""
        if not requirements.kv_cache_dtype.startswith("fp8_e"):  # records hold their scales
            return None, None
        owner = next((spec for spec in self.specs.values() if spec.name == target), None)
        if owner is not None:
            return owner.k_scale, owner.v_scale
        k_scale, v_scale = scales_of(call.module, requirements.num_kv_heads, call.key.device)
        # A latent is stored once, as a key: checkpoints may have a scale of values beside, which nothing stores.
        return k_scale, k_scale if requirements.latent else v_scale

    def _find_target(self, call: AttentionCall, layer: ModelLayer) -> str | None:
        """Return the earlier layer whose keys a layer reads: the module passes on that layer's tensor."""
        target = next((name for key, name in self._keys if key is call.key), None)
        if (target is not None) != layer.requirements.kv_sharing:
            found = "its own keys" if target is None else f"the keys of {target}"
            raise RequirementsError(
                f"{layer.name} attends to {found}",
                f"by the model's configuration, kv_sharing={layer.requirements.kv_sharing}",
                KEEP,
            )
        if target is None:
            self._keys.append((call.key, layer.name))
        return target

    def check_complete(self) -> None:
        """
        Check that every layer made its call.

        Raises:
            RequirementsError: One attends by other means.
        """
        missing = [layer.name for index, layer in self._layers.items() if index not in self.specs]
        if missing:
            raise RequirementsError(
                f"{len(missing)} attention layers of the model, {missing[0]!r} first, did not call the engine",
                "the classes of this model do not let their attention be replaced in all layers",
                KEEP,
            )


class PackingCheck:
    """
    Compares the second half of a row with the first, which has the same tokens at the same positions.

    Attributes:
        takes_mask: By module, whether the step's mask came with its call.
    """

    def __init__(self, mask: Tensor | None) -> None:
        self.takes_mask: dict[nn.Module, bool] = {}
        self._mask = mask

    def attend(self, call: AttentionCall) -> Tensor:
        """Compare the halves, and return zeros."""
        name = module_name(call.module)
        for rows in (call.query, call.key, call.value):
            first, second = rows[:, :, :_TOKENS].float(), rows[:, :, _TOKENS:].float()
            if float((first - second).abs().max()) > _TOLERANCE * float(first.abs().max()):
                raise RequirementsError(
                    f"{name} computes different queries, keys or values for one token at one position",
                    "they depend on where in the row of a step the token is, and not on position_ids alone",
                    KEEP,
                )
        if call.mask is not None and not is_placeholder(call.mask, self._mask):
            raise NotNegotiatedError(
                f"{name} gets a mask that the model computed",
                "the engine's steps have no mask tensor: the block table separates requests",
                KEEP,
            )
        self.takes_mask[call.module] = call.mask is not None
        return _zeros(call)


def _check_mask(call: AttentionCall, layer: ModelLayer) -> None:
    """Compare the model's mask with the layer's pattern, on a sequence longer than windows and chunks."""
    pattern = Pattern.of(layer.requirements)
    if call.mask is None and not pattern.is_local:
        return
    length = 2 * ((pattern.left or 0) + (pattern.chunk or 0)) + _TOKENS
    rows = min(length, _ROWS)
    if isinstance(call.mask, LazyMask):
        end = attrs.evolve(call.mask, q_length=rows, kv_length=length, q_offset=length - rows, packings={})
        queries, keys = torch.arange(length - rows, length), torch.arange(length)
        expected = pattern.attends(queries[:, None], keys[None, :])
        if all(bool((part[0].cpu() == expected[start : start + part.shape[1]]).all()) for start, part in end.rows()):
            return
    raise NotNegotiatedError(
        f"{layer.name}: by the model's mask, tokens attend to other keys",
        f"by its configuration this is {pattern}, and the backend is chosen for that",
        KEEP,
    )
