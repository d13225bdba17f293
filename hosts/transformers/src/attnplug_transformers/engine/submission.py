"""Makes requests of what callers pass, and refuses what the engine cannot do."""

from __future__ import annotations

from itertools import count
from math import inf
from typing import TYPE_CHECKING, Any, Final

from attnplug.errors import BatchError, LimitsError, RequirementsError
from attnplug_transformers.engine.detokenizer import Detokenizer
from attnplug_transformers.engine.generation import (
    check_generation,
    config_of,
    default_sampling,
    eos_tokens,
    make_processors,
    repetition_penalty,
    stop_strings,
)
from attnplug_transformers.engine.params import SamplingParams, unknown_name
from attnplug_transformers.engine.prompts import check_vocabulary, to_stop_tokens, to_tokens
from attnplug_transformers.engine.request import Request

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from transformers import GenerationConfig

_NAMES: Final = ["max_new_tokens", "sampling", "stop_tokens"]


def check_names(where: str, given: Mapping[str, object], *known: str) -> None:
    """
    Check that a call was given no unknown name.

    Raises:
        RequirementsError: It was: a field of `SamplingParams`, one of another library, or a misspelled one.
    """
    for name in given:
        if name in SamplingParams.names():
            raise RequirementsError(
                f"{where}() was given {name!r}",
                "it is a field of SamplingParams, which each request has",
                f"pass sampling=SamplingParams({name}=...)",
            )
        raise unknown_name(name, f"{where}()", [*_NAMES, *known])


class Submission:
    """
    Makes the requests of one engine.

    Args:
        model: The model.
        tokenizer: What decodes tokens; None without.

    Raises:
        RequirementsError: This is no tokenizer.
    """

    def __init__(self, model: Any, tokenizer: Any) -> None:
        if tokenizer is not None and not (callable(tokenizer) and callable(getattr(tokenizer, "decode", None))):
            raise RequirementsError(
                f"tokenizer={tokenizer!r} was given",
                "it is a tokenizer of transformers",
                "pass AutoTokenizer.from_pretrained(...), or leave it out",
            )
        self._model = model
        self._tokenizer = tokenizer
        self._ids = count()
        self._vocabulary: int = model.get_input_embeddings().num_embeddings

    def make(
        self,
        prompt: Iterable[Any],
        max_new_tokens: int | None,
        sampling: SamplingParams | None,
        stop_tokens: Iterable[Any] | None,
    ) -> list[Request]:
        """
        Return the requests of a prompt, one for each sample.

        Args:
            prompt: The tokens of the prompt.
            max_new_tokens: The most tokens to generate, where `sampling` has no number of its own.
            sampling: How its tokens are sampled; None is as the model's generation_config has it.
            stop_tokens: Tokens that end the request; None takes the model's end-of-text tokens.

        Raises:
            BatchError: The prompt is empty, or a token is not in the model's vocabulary.
            LimitsError: There is no number of tokens to generate, or `logit_bias` rules all tokens out.
            RequirementsError: The generation_config has an unsupported or invalid field, or a stop string needs a
                tokenizer.
        """
        config = config_of(self._model)
        check_generation(config)
        how = default_sampling(config) if sampling is None else sampling
        if not isinstance(how, SamplingParams):
            return [Request(id=0, tokens=prompt, max_new_tokens=1, sampling=how)]  # which refuses it
        stops = eos_tokens(config) if stop_tokens is None else to_stop_tokens(stop_tokens)
        tokens = to_tokens(prompt)
        requests = [
            Request(
                id=next(self._ids),
                tokens=tokens,
                max_new_tokens=_max_new_tokens(max_new_tokens, how, config),
                sampling=how,
                stop_tokens={*stops, *how.stop_token_ids},
                sample=sample,
            )
            for sample in range(how.n)
        ]
        first = requests[0]
        check_vocabulary("a prompt with the token", first.tokens, self._vocabulary)
        given = how.stop_token_ids if stop_tokens is None else first.stop_tokens
        check_vocabulary("the stop token", given, self._vocabulary)
        self._check_bias(how)
        strings = stop_strings(config) if how.stop is None else how.stop
        self._check_stop(strings, how)
        words = self._bad_words(how)
        penalty = 1.0 if how.repetition_penalty is not None else repetition_penalty(config)
        for request in requests:
            request.samples = tuple(requests)
            request.configure(
                stop=strings,
                repetition_penalty=penalty,
                processors=make_processors(config, request, self._model, words),
                detokenizer=self._detokenizer(strings, how),
            )
        return requests

    def _num_logits(self) -> int:
        found: int = self._model.get_output_embeddings().weight.shape[0]
        return found

    def _detokenizer(self, strings: tuple[str, ...], sampling: SamplingParams) -> Detokenizer | None:
        if self._tokenizer is None:
            return None
        skip, least = sampling.skip_special_tokens, sampling.min_tokens
        return Detokenizer(self._tokenizer, strings, skip_special_tokens=skip, min_tokens=least)

    def _bad_words(self, sampling: SamplingParams) -> list[tuple[int, ...]]:
        """Return the tokens of the bad words; a text has two forms, at the beginning of the text and behind a space."""
        texts = [word for word in sampling.bad_words if isinstance(word, str)]
        if texts and self._tokenizer is None:
            raise RequirementsError(
                f"the bad_words {texts} were given",
                "texts need a tokenizer, and the engine has none",
                "make the engine with tokenizer=..., or pass the token ids of each word",
            )
        found = [word for word in sampling.bad_words if not isinstance(word, str)]
        forms = [form for text in texts for form in (text.lstrip(), " " + text.lstrip())]
        found += [tuple(self._tokenizer(form, add_special_tokens=False).input_ids) for form in forms]
        check_vocabulary("bad_words with the token", (token for word in found for token in word), self._num_logits())
        return list(dict.fromkeys(word for word in found if word))

    def _check_bias(self, sampling: SamplingParams) -> None:
        check_vocabulary("a logit_bias with the token", (token for token, _ in sampling.logit_bias), self._num_logits())
        ruled_out = {token for token, bias in sampling.logit_bias if bias == -inf}
        if len(ruled_out) == self._num_logits():
            raise LimitsError(
                f"a logit_bias of -inf was given for all {len(ruled_out)} tokens",
                "at least one token of the vocabulary stays possible",
                "leave one token out of logit_bias",
            )

    def _check_stop(self, strings: tuple[str, ...], sampling: SamplingParams) -> None:
        if not strings:
            return
        if self._tokenizer is None:
            raise RequirementsError(
                f"the stop strings {list(strings)} were given",
                "they need a tokenizer, and the engine has none",
                "make the engine with tokenizer=..., or pass stop_token_ids",
            )
        special = getattr(self._tokenizer, "all_special_tokens", ())
        for one in special if sampling.skip_special_tokens else ():
            if any(one in string for string in strings):
                raise RequirementsError(
                    f"the stop strings {list(strings)} were given, one of them with the special token {one!r}",
                    "the text has no special tokens, so that it would never end there",
                    f"pass stop_token_ids=[{self._tokenizer.convert_tokens_to_ids(one)}], or skip_special_tokens=False",
                )


def _max_new_tokens(max_new_tokens: int | None, sampling: SamplingParams, config: GenerationConfig) -> int:
    found = max_new_tokens if sampling.max_new_tokens is None else sampling.max_new_tokens
    found = config.max_new_tokens if found is None else found
    if found is None:
        raise LimitsError(
            "no max_new_tokens was given",
            "a request has a most number of tokens, so that its blocks can be counted",
            "pass max_new_tokens=... to the call or to SamplingParams, or set model.generation_config.max_new_tokens",
        )
    return found


def check_prompt_kind(prompt: object) -> None:
    """
    Check that this is one prompt and no list of them.

    Raises:
        BatchError: It is a list of texts or of lists, or a tensor of several rows.
    """
    is_list = isinstance(prompt, (list, tuple)) and prompt and isinstance(prompt[0], (str, list, tuple))
    if is_list or getattr(prompt, "ndim", 1) == 2:
        raise BatchError(
            "a list of prompts was given to submit()",
            "a request has one prompt",
            "call submit() for each of them, or generate() or stream() with all",
        )
