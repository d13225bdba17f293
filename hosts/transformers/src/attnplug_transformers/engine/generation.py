"""The fields of a model's generation_config: each is applied as by transformers' `generate`, refused, or irrelevant."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import frozen
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    GenerationConfig,
    InfNanRemoveLogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from attnplug.errors import RequirementsError
from attnplug_transformers.engine.params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from collections.abc import Set as AbstractSet

    from attnplug_transformers.engine.request import Request

SAMPLING: Final = frozenset({"do_sample", "temperature", "top_k", "top_p", "min_p"})
"""Applied to requests without a `SamplingParams`."""

PROCESSORS: Final = frozenset(
    {
        "sequence_bias",
        "encoder_repetition_penalty",
        "repetition_penalty",
        "no_repeat_ngram_size",
        "encoder_no_repeat_ngram_size",
        "bad_words_ids",
        "min_length",
        "min_new_tokens",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "remove_invalid_values",
        "exponential_decay_length_penalty",
        "suppress_tokens",
        "begin_suppress_tokens",
    }
)
"""Applied to the logits of every request, by transformers' own classes."""

APPLIED: Final = SAMPLING | PROCESSORS | {"eos_token_id", "max_new_tokens", "stop_strings"}

_BEAMS = "the engine has no beam search"
_STRATEGY = "the engine samples one token at a time from one model"
_FILTER = "the filters of SamplingParams are temperature, top_k, top_p and min_p"

REFUSED: Final[dict[str, tuple[tuple[object, ...], str]]] = {
    "num_beams": ((1,), _BEAMS),
    "num_beam_groups": ((1,), _BEAMS),
    "diversity_penalty": ((0,), _BEAMS),
    "constraints": ((), _BEAMS),
    "force_words_ids": ((), _BEAMS),
    "num_return_sequences": ((1,), "a request has its own number of samples: pass SamplingParams(n=...)"),
    "penalty_alpha": ((0,), _STRATEGY),
    "dola_layers": ((), _STRATEGY),
    "guidance_scale": ((1,), "it takes a second, unconditional forward pass"),
    "watermarking_config": ((), "the engine has no watermarks"),
    "is_assistant": ((False,), "the engine is no assistant of another model: it would stop at unlikely tokens"),
    "assistant_ensemble_weight": ((), "the engine has no assistant model to mix with"),
    "max_time": ((), "the engine has no time limit; cancel() ends a request"),
    "token_healing": ((False,), "a prompt is tokens, and none of them is replaced"),
    "cache_implementation": (
        ("dynamic", "static", "offloaded", "offloaded_static", "hybrid", "sliding_window", "paged"),
        "the engine has its KV caches, whose precision is the engine's kv_cache_dtype",
    ),
}
"""Refused with another value than None or these, and why."""

REFUSED_FILTERS: Final[dict[str, tuple[tuple[object, ...], str]]] = {
    "top_h": ((), _FILTER),
    "typical_p": ((1,), _FILTER),
    "epsilon_cutoff": ((0, 1), _FILTER),
    "eta_cutoff": ((0, 1), _FILTER),
}
"""Likewise, where `do_sample` is set and a request has no `SamplingParams`: `generate` ignores them otherwise."""

IRRELEVANT: Final[dict[str, str]] = {
    "max_length": "each request has its max_new_tokens",
    **dict.fromkeys(("early_stopping", "length_penalty"), "beam search only, which is refused"),
    **dict.fromkeys(("pad_token_id", "bos_token_id"), "a request has a prompt, and no padding"),
    "decoder_start_token_id": "encoder-decoders only, which are refused",
    "renormalize_logits": "the probabilities are the same",
    "low_memory": "contrastive search only, which is refused",
    **dict.fromkeys(
        ("use_cache", "cache_config", "max_cache_len"),
        "the engine has its KV caches",
    ),
    **dict.fromkeys(
        (
            "use_mtp",
            "num_assistant_tokens",
            "num_assistant_tokens_schedule",
            "assistant_confidence_threshold",
            "prompt_lookup_num_tokens",
            "max_matching_ngram_size",
            "assistant_early_exit",
            "assistant_lookbehind",
            "target_lookbehind",
            "speculation_type",
        ),
        "speculation changes the time, and not what tokens are sampled from",
    ),
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        "what generate() returns beside tokens",
    ),
    **dict.fromkeys(
        ("compile_config", "disable_compile", "continuous_batching_config", "prefill_chunk_size"),
        "how generate() runs the model",
    ),
    "transformers_version": "a version",
}
"""Not read, and why the tokens do not depend on it."""


@cache
def _defaults() -> GenerationConfig:
    return GenerationConfig()  # type: ignore[no-untyped-call] # transformers' signature is incomplete


@cache
def _unclassified() -> tuple[tuple[str, object], ...]:
    """Return the fields that a later version of transformers added, with their defaults."""
    known: AbstractSet[str] = APPLIED | REFUSED.keys() | REFUSED_FILTERS.keys() | IRRELEVANT.keys()
    fields = vars(_defaults()).items()
    return tuple((name, value) for name, value in fields if name not in known and not name.startswith("_"))


def config_of(model: Any) -> GenerationConfig:
    """Return the model's generation_config, or the defaults where it has none."""
    found = getattr(model, "generation_config", None)
    return _defaults() if found is None else found


def check_generation(config: GenerationConfig) -> None:
    """
    Check the fields that concern all requests.

    Raises:
        RequirementsError: One changes tokens in a way that the engine does not support.
    """
    _refuse_set(config, REFUSED)
    for name, default in _unclassified():
        if getattr(config, name, default) != default:
            _refuse(config, name, "this version of attnplug does not support the field", default)


def _refuse_set(config: GenerationConfig, refused: dict[str, tuple[tuple[object, ...], str]]) -> None:
    for name, (neutral, why) in refused.items():
        value = getattr(config, name, None)
        if value is not None and value not in neutral:
            _refuse(config, name, why, None)


def _refuse(config: GenerationConfig, name: str, why: str, default: object) -> None:
    raise RequirementsError(
        f"{name}={getattr(config, name)!r} is set in the model's generation_config",
        why,
        f"set model.generation_config.{name} = {default!r}, or generate with transformers",
    )


def default_sampling(config: GenerationConfig) -> SamplingParams:
    """
    Return the sampling of requests that have none; where a field is None, with the default of `generate`.

    Raises:
        RequirementsError: It has a filter that `SamplingParams` lacks.
        LimitsError: A value is out of its range.
    """
    if not config.do_sample:
        return SamplingParams()
    try:
        _refuse_set(config, REFUSED_FILTERS)
    except RequirementsError as error:
        raise RequirementsError(error.problem, error.expected, f"{error.fix}, or pass SamplingParams") from None
    top_k = 50 if config.top_k is None else config.top_k
    return SamplingParams(
        temperature=1.0 if config.temperature is None else config.temperature,
        top_k=top_k or None,
        top_p=config.top_p,
        min_p=config.min_p,
    )


def eos_tokens(config: GenerationConfig) -> tuple[int, ...]:
    """Return the end-of-text tokens."""
    found = config.eos_token_id
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)


def stop_strings(config: GenerationConfig) -> tuple[str, ...]:
    """Return the strings that end every request without other ones."""
    found = config.stop_strings
    return () if found is None else (found,) if isinstance(found, str) else tuple(found)


@frozen
class Processors:
    """
    What changes the logits of a request by the model's generation_config, in the order of `generate`.

    Attributes:
        first: What comes before the penalties of `SamplingParams`.
        last: What comes after them.
    """

    first: LogitsProcessorList
    last: LogitsProcessorList


def repetition_penalty(config: GenerationConfig) -> float:
    """
    Return the repetition penalty of requests without another one; 1 is none.

    Raises:
        RequirementsError: It is no positive float.
    """
    found = config.repetition_penalty
    if found is None or found == 1:
        return 1.0
    try:
        return RepetitionPenaltyLogitsProcessor(found).penalty
    except ValueError as error:
        raise _invalid(error) from error


def make_processors(
    config: GenerationConfig, request: Request, model: Any, bad_words: Sequence[Sequence[int]] = ()
) -> Processors | None:
    """
    Return what changes the logits of a request, beside the penalties; None where nothing does.

    They depend on the request's tokens alone, and `generate` applies the same ones in the same order.

    Args:
        config: The model's generation_config.
        request: The request; its stop tokens take the place of `eos_token_id`.
        model: The model.
        bad_words: The tokens of each of the request's own bad words.

    Raises:
        RequirementsError: A value is invalid.
    """
    asks = bool(bad_words) or request.sampling.min_tokens > 0
    if not asks and not any(getattr(config, name, None) is not None for name in PROCESSORS):
        return None
    try:
        found = _processors(config, request, str(model.device), bad_words)
        if not (found.first or found.last):
            return None
        width = model.get_output_embeddings().weight.shape[0]
        # What cannot be applied is refused here, and not in the middle of each later step.
        tokens: Any = torch.tensor([request.tokens], device=model.device)
        for each in (found.first, found.last):
            each(tokens, torch.zeros(1, width, device=model.device))
    except (ValueError, TypeError, IndexError, RuntimeError) as error:
        raise _invalid(error) from error
    return found


def _invalid(error: Exception) -> RequirementsError:
    return RequirementsError(
        f"the model's generation_config cannot be applied: {error}",
        "its values are those of transformers' GenerationConfig",
        "set the field to None, or to a valid value",
    )


def _processors(
    config: GenerationConfig, request: Request, device: str, bad_words: Sequence[Sequence[int]]
) -> Processors:
    prompt: Any = torch.tensor([request.tokens[: request.num_prompt_tokens]], device=device)
    length = request.num_prompt_tokens
    stops: Any = torch.tensor(sorted(request.stop_tokens), device=device) if request.stop_tokens else None
    found: list[Any] = []

    def add(name: str, make: Callable[[Any], Any], neutral: tuple[object, ...] = (), *, stopping: bool = False) -> None:
        value = getattr(config, name, None)
        if value is not None and value not in neutral and not (stopping and stops is None):
            found.append(make(value))

    add("sequence_bias", SequenceBiasLogitsProcessor)
    add("encoder_repetition_penalty", lambda value: EncoderRepetitionPenaltyLogitsProcessor(value, prompt), (1,))
    first, found = found, []  # the repetition penalty is between the two: `penalize` applies it to all rows at once
    add("no_repeat_ngram_size", NoRepeatNGramLogitsProcessor, (0,))
    add("encoder_no_repeat_ngram_size", lambda value: EncoderNoRepeatNGramLogitsProcessor(value, prompt), (0,))
    add("bad_words_ids", lambda value: NoBadWordsLogitsProcessor(value, stops))
    if bad_words:
        found.append(NoBadWordsLogitsProcessor([list(word) for word in bad_words]))
    add("min_length", lambda value: MinLengthLogitsProcessor(value, stops, device), (0,), stopping=True)
    add(
        "min_new_tokens",
        lambda value: MinNewTokensLengthLogitsProcessor(length, value, stops, device),
        (0,),
        stopping=True,
    )
    if request.sampling.min_tokens and stops is not None:
        found.append(MinNewTokensLengthLogitsProcessor(length, request.sampling.min_tokens, stops, device))
    add("forced_bos_token_id", ForcedBOSTokenLogitsProcessor)
    add("forced_eos_token_id", lambda value: ForcedEOSTokenLogitsProcessor(request.max_tokens, value, device))
    add("remove_invalid_values", lambda _: InfNanRemoveLogitsProcessor(), (False,))
    add(
        "exponential_decay_length_penalty",
        lambda value: ExponentialDecayLengthPenalty(value, stops, length),
        stopping=True,
    )
    add("suppress_tokens", lambda value: SuppressTokensLogitsProcessor(value, device))
    # A forced first token comes before the first one that is chosen.
    begin = length + (length == 1 and config.forced_bos_token_id is not None)
    add("begin_suppress_tokens", lambda value: SuppressTokensAtBeginLogitsProcessor(value, begin, device))
    return Processors(LogitsProcessorList(first), LogitsProcessorList(found))
