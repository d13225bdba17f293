"""What vLLM's selector requests of a backend, judged as a whole: every field of its request at once."""

from __future__ import annotations

from functools import reduce
from typing import TYPE_CHECKING, Any, Final

from attnplug.errors import AttnplugError, NoBackendError
from attnplug.manifest import Constraint, Exact, Range
from attnplug_vllm import advice, facts, model, registration
from attnplug_vllm.cache import layers_of
from attnplug_vllm.names import AUTO, SLOT, is_own, own_name

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attnplug import Requirements

NOT_SERVED: Final = {
    "use_sparse": "attention over tokens that an indexer picks is not served by attnplug",
    "use_rswa": "reference sliding-window attention (R-SWA) is not served by attnplug",
    "use_pcp": "prefill context parallelism (PCP) is not served by attnplug",
    "use_adaptive_verification": "adaptive verification is not served by attnplug: query lengths on the device would"
    " differ from those on the CPU",
}
"""The fields of vLLM's request that nothing here serves, with the reason."""

_LATENT_SPANS: Final = "latent attention with bidirectional spans (mm_prefix) is not served by attnplug"
CROSS: Final = "encoder_decoder"
"""The attention of a model that no layer here serves."""

_SERVED: Final = frozenset(
    {
        "head_size",
        "dtype",
        "kv_cache_dtype",
        "block_size",
        "has_sink",
        "use_per_head_quant_scales",
        "device_capability",
        "attn_type",
        "has_sliding_window",
        "use_non_causal",
        "use_batch_invariant",
        "use_kv_connector",
        "use_dcp",
        "use_mla",
        "use_mm_prefix",
    }
)
_DTYPES: Final = ("float16", "bfloat16", "float32")
_SIZES: Final = 64  # of a bounded range, so many sizes are listed at most


def validate(asked: Mapping[str, Any], choice: facts.Choice, *, latent: bool = False) -> list[str]:
    """
    Return why nothing that may be chosen serves a request of vLLM's selector; empty where something does.

    Args:
        asked: The fields of vLLM's ``AttentionSelectorConfig``, and ``device_capability``.
        choice: The candidates that may be chosen; empty leaves it to attnplug.
        latent: Whether the class that vLLM asks is that for latent attention.
    """
    asked = _of_model() | dict(asked)  # the selector of an earlier version leaves some of it out
    found = [text for name, text in NOT_SERVED.items() if asked.get(name)]
    if asked.get("use_sparse"):
        return found  # the other fields describe another kind of attention then
    if bool(asked.get("use_mla")) is not latent:  # of a model and its drafter
        found.append("layers with latent attention beside layers without it are not served by attnplug")
        return found
    if latent and asked.get("use_mm_prefix"):
        found.append(_LATENT_SPANS)
    if facts.text_of(asked.get("attn_type")) == CROSS:
        found.append("attention to an encoder's keys (attn_type='encoder_decoder') is not served by attnplug")
    found += [f"vLLM requests {name}={asked[name]!r}, which attnplug-vllm does not know" for name in _unknown(asked)]
    try:
        for requirements in layers(asked):
            found += [text for text in facts.reasons(requirements, choice) if text not in found]
            if not found:
                facts.select(requirements, choice)  # which writes it into vLLM's log
    except AttnplugError as error:
        found.append("; ".join(filter(None, (error.problem, error.expected, f"fix: {error.fix}"))))
    return found


def layers(asked: Mapping[str, Any]) -> Iterator[Requirements]:
    """Yield what the layers that such a request may be for request of a backend: those of the model that are alike."""
    if asked.get("use_mla"):
        yield _latent_layer(asked)
        return
    attn_type = facts.text_of(asked.get("attn_type") or "decoder")
    is_windowed = bool(asked.get("has_sliding_window"))
    stated = facts.engine_fields() | {
        "attn_type": attn_type,
        "kv_cache_dtype": asked.get("kv_cache_dtype"),
        "block_size": asked.get("block_size"),
        "sinks": bool(asked.get("has_sink")),
        "per_head_scales": bool(asked.get("use_per_head_quant_scales")),
        "batch_invariant": bool(asked.get("use_batch_invariant")),
        "causal": False if asked.get("use_non_causal") and attn_type == "decoder" else None,
        "mm_prefix": bool(asked.get("use_mm_prefix")),
    }
    if asked.get("use_kv_connector"):
        stated["kv_cache_form"] = facts.CONNECTED
    if asked.get("use_dcp"):
        stated["dcp_size"] = max(2, stated.get("dcp_size", 1))
    for known in model.alike(asked["head_size"], is_windowed=is_windowed):
        fields = {**known, **stated}
        if is_windowed:
            fields.setdefault("sliding_window", facts.UNKNOWN_WINDOW)
        yield facts.layer_requirements(head_size=asked["head_size"], dtype=asked["dtype"], **fields)


def _latent_layer(asked: Mapping[str, Any]) -> Requirements:
    """Return what a layer with latent attention requests, of which vLLM's selector has no rank."""
    config = facts.current_config()
    model = getattr(config, "model_config", None)
    heads = None if model is None else model.get_num_attention_heads(config.parallel_config)
    rank = getattr(getattr(model, "hf_text_config", None), "kv_lora_rank", None)
    fields = facts.latent_fields(rank or 512, heads)
    return facts.layer_requirements(
        head_size=asked["head_size"],
        dtype=asked["dtype"],
        **fields
        | {
            "kv_cache_dtype": asked.get("kv_cache_dtype"),
            "block_size": asked.get("block_size"),
            "batch_invariant": bool(asked.get("use_batch_invariant")),
            "return_lse": bool(asked.get("use_dcp")) or fields["return_lse"],
        },
    )


def chosen_by_config() -> facts.Choice | None:
    """
    Return the choice that the current configuration of vLLM names; None where it names no backend of attnplug.

    Raises:
        NoBackendError: It names one for some kinds of layers only, and the platform does not say which kind is meant;
            or it names vLLM's slot, which no plugin has filled.
    """
    attention = getattr(facts.current_config(), "attention_config", None)
    named = getattr(attention, "backend", None)
    kinds = list((getattr(attention, "backend_per_kind", None) or {}).values())
    if any(member is not None and member.name == SLOT and not member.is_overridden() for member in (named, *kinds)):
        raise NoBackendError(
            f"the attention backend {SLOT!r} was requested of vLLM",
            "no plugin has registered it, and vLLM's CPU platform would run its own backend instead",
            f"pass --attention-backend {AUTO}",
        )
    ours = {registration.choice_of(member.name) for member in (named, *kinds) if is_own(member)}
    if not ours:
        return None
    if len(ours) > 1 or not all(is_own(member) for member in (named, *kinds)):
        raise NoBackendError(
            "vLLM's configuration names different attention backends for the kinds of layers",
            "vLLM's CPU platform does not say for which kind it requests a backend",
            "name one with --attention-backend, and leave backend_per_kind out",
        )
    return ours.pop()


def check_model(choice: facts.Choice) -> None:
    """
    Check that a choice can serve the current model, for platforms whose selector does not validate it.

    Args:
        choice: The candidates that may be chosen.

    Raises:
        NoBackendError: It cannot.
    """
    asked = _of_model()
    found = [text for name, text in NOT_SERVED.items() if asked.get(name)]
    if asked.get("use_mm_prefix") and facts.is_latent():
        found.append(_LATENT_SPANS)
    if not found:
        return
    raise NoBackendError(
        f"the attention backend {own_name(choice)!r} was requested of vLLM",
        "; ".join(found),
        advice.OWN,
    )


def _of_model() -> dict[str, Any]:
    """Return what the current configuration says of the model, in the words of vLLM's selector; empty without one."""
    config = facts.current_config()
    model = getattr(config, "model_config", None)
    if model is None:
        return {}
    return {
        "use_mm_prefix": getattr(model, "is_mm_prefix_lm", False),
        "use_rswa": getattr(model, "rswa_window", None) is not None,
        "use_pcp": getattr(config.parallel_config, "prefill_context_parallel_size", 1) > 1,
        "use_adaptive_verification": getattr(config.speculative_config, "enable_adaptive_verification", False),
    }


def block_sizes(choice: facts.Choice, *, latent: bool = False) -> list[int | Range]:
    """
    Return the block sizes of KV caches that every layer of the current model can have, for the choice; where there are
    no layers yet, those that some candidate has.
    """
    made = (layer.selection.agreement.block_sizes for layer in layers_of(choice, latent=latent))
    agreed = [sizes for sizes in made if sizes is not None]
    if agreed:
        return list(_sizes_of(reduce(Constraint.intersect, agreed)))
    declared = (candidate.supports("block_size") for candidate in facts.candidates(choice))
    return list(dict.fromkeys(size for each in declared if each is not None for size in _sizes_of(each)))


def dtypes(choice: facts.Choice) -> list[Any]:
    """Return the dtypes, as torch has them, in which some candidate computes."""
    import torch  # noqa: PLC0415 - vLLM has imported it

    return [getattr(torch, name) for name in _DTYPES if facts.serves(choice, dtype=name)]


def kv_cache_dtypes(choice: facts.Choice) -> list[str]:
    """Return vLLM's names of the dtypes of KV caches that some candidate reads; ``auto`` is the layer's."""
    return [
        name
        for name, own in facts.KV_CACHE_DTYPES.items()
        if own in ("auto", *_DTYPES) or facts.serves(choice, kv_cache_dtype=own)
    ]


def _sizes_of(constraint: Constraint) -> Iterator[int | Range]:
    for alternative in constraint.alternatives:
        yield from _sizes(alternative)


def _sizes(alternative: Exact | Range) -> Iterator[int | Range]:
    """Yield an alternative as single sizes, or as the multiples of one where it has no end."""
    if isinstance(alternative, Exact):
        yield alternative.value
        return
    step = alternative.multiple_of or 1
    lowest = -(-(alternative.min or step) // step) * step
    if alternative.max is None:
        yield Range(multiple_of=lowest)
    else:
        yield from range(lowest, alternative.max + 1, step)[:_SIZES]


def _unknown(asked: Mapping[str, Any]) -> list[str]:
    return [name for name, value in asked.items() if value and name not in _SERVED and name not in NOT_SERVED]
