"""What vLLM's current configuration says about the attention layers of its model."""

from __future__ import annotations

from typing import Any, Final

from attnplug.errors import RequirementsError
from attnplug.models import model_layers
from attnplug_vllm import facts

_OF_MODEL: Final = ("sliding_window", "logits_soft_cap", "alibi")


def alike(head_size: int, *, is_windowed: bool) -> list[dict[str, Any]]:
    """
    Return what is known of the model's layers with heads of this size, with or without a window: one table of fields
    for each kind of layer. There is one empty table where nothing is known.
    """
    config = facts.current_config()
    model = getattr(config, "model_config", None)
    if model is None:
        return [{}]
    shards = config.parallel_config.tensor_parallel_size
    return _described(model, shards, head_size, is_windowed=is_windowed) or [
        _read(config, head_size, is_windowed=is_windowed)
    ]


def _described(model: Any, shards: int, head_size: int, *, is_windowed: bool) -> list[dict[str, Any]]:
    """Return what attnplug reads in the model's configuration; nothing where it does not know the model type."""
    try:
        layers = model_layers(model.hf_config, dtype="bfloat16", partial=True)
    except RequirementsError:
        return []
    found: list[dict[str, Any]] = []
    for requirements in (layer.requirements for layer in layers):
        if requirements.head_size != head_size or (requirements.sliding_window is not None) != is_windowed:
            continue
        known = {name: getattr(requirements, name) for name in _OF_MODEL}
        known |= _per_rank(requirements.num_q_heads, requirements.num_kv_heads, shards)
        if known not in found:
            found.append(known)
    return found


def _read(config: Any, head_size: int, *, is_windowed: bool) -> dict[str, Any]:
    """Return what vLLM itself reads in the configuration of a model whose type attnplug does not know."""
    model, parallel = config.model_config, config.parallel_config
    text = model.hf_text_config
    known: dict[str, Any] = {"logits_soft_cap": getattr(text, "attn_logit_softcapping", None)}
    if model.get_head_size() == head_size:
        known["num_q_heads"] = model.get_num_attention_heads(parallel)
        known["num_kv_heads"] = model.get_num_kv_heads(parallel)
    window = model.get_sliding_window()
    if is_windowed and isinstance(window, int):
        known["sliding_window"] = window
    if getattr(text, "alibi", False):
        known["alibi"] = "linear"
    return {name: value for name, value in known.items() if value is not None}


def _per_rank(num_q_heads: int, num_kv_heads: int, shards: int) -> dict[str, int]:
    """Return the head counts of one rank. KV heads are replicated where there are more ranks than heads."""
    return {"num_q_heads": num_q_heads // shards, "num_kv_heads": max(1, num_kv_heads // shards)}
