"""How the tokens of a request are sampled, and when it stops: the fields, their ranges, and what the engine lacks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import wraps
from math import inf, isfinite
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar

import attrs
from attrs import field, frozen

from attnplug.errors import LimitsError, RequirementsError
from attnplug.request import near
from attnplug_transformers.engine.prompts import to_stop_tokens, to_tokens

if TYPE_CHECKING:
    from collections.abc import Callable

_C = TypeVar("_C", bound=type)

_CONFIG: Final = "set it in model.generation_config, whose fields apply to every request"
_NO_BEAMS: Final = "the engine has no beam search"
_NO_FILTER: Final = "the filters are top_k, top_p and min_p"
_NO_GRAMMAR: Final = "the engine has no grammars"

ELSEWHERE: Final[dict[str, tuple[str, str]]] = {
    "max_tokens": ("the field has another name", "pass max_new_tokens=..."),
    "max_length": ("the field has another meaning", "pass max_new_tokens=..., without the tokens of the prompt"),
    "num_return_sequences": ("the field has another name", "pass n=..."),
    "stop_strings": ("the field has another name", "pass stop=..."),
    "eos_token_id": ("the field has another name", "pass stop_token_ids=..., or stop_tokens=... to submit()"),
    "stop_tokens": ("it replaces the model's end-of-text tokens", "pass stop_tokens=... to submit() or generate()"),
    "ignore_eos": ("the end-of-text tokens are those of the request", "pass stop_tokens=() to submit() or generate()"),
    "do_sample": ("temperature=0 is greedy, and any other temperature draws", "pass temperature=..."),
    "sequence_bias": ("logit_bias has one token per entry", f"pass logit_bias=..., or {_CONFIG}"),
    "min_new_tokens": ("the field has another name", "pass min_tokens=..."),
    "bad_words_ids": ("the field has another name", "pass bad_words=..."),
    **dict.fromkeys(
        ("min_length", "suppress_tokens", "no_repeat_ngram_size"),
        ("the field is the model's, not the request's", _CONFIG),
    ),
    **dict.fromkeys(("best_of", "use_beam_search", "num_beams", "length_penalty"), (_NO_BEAMS, "draw n samples: n=4")),
    **dict.fromkeys(
        ("typical_p", "top_h", "epsilon_cutoff", "eta_cutoff"), (_NO_FILTER, "pass one of these, or use generate()")
    ),
    **dict.fromkeys(
        ("structured_outputs", "guided_decoding", "json_schema", "regex", "ebnf"),
        (_NO_GRAMMAR, "leave it out, and check the text; vLLM and SGLang have them"),
    ),
    "allowed_token_ids": ("no field allows some tokens only", "pass logit_bias={token: -inf} for the others"),
    "logits_processors": ("a function per request would process one row at a time", "pass logit_bias=..."),
    "prompt_logprobs": (
        "a step computes the logits of sampled tokens alone; those of a prompt take memory for each of its tokens",
        "leave it out, or read model(ids).logits of transformers",
    ),
    "include_stop_str_in_output": ("text always ends before the stop string", "append Request.stop_reason to it"),
    "detokenize": ("text is decoded when it is read", "leave it out"),
    "spaces_between_special_tokens": ("a fast tokenizer does not have it", "leave it out"),
    "output_kind": ("stream() and generate() are the two kinds", "call one of these"),
}
"""Fields of other libraries -> why the engine has no field of this name, and what to do."""


def _refuse(name: str, value: object, expected: str, fix: str) -> NoReturn:
    raise LimitsError(f"{name}={value!r} was given", f"{name} is {expected}", fix)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: object, least: int) -> bool:
    return type(value) is int and value >= least


def _is_bias(entry: Any) -> bool:
    """Return whether this is a token with a number that can be added to its logit."""
    if not isinstance(entry, tuple) or len(entry) != 2 or not _is_count(entry[0], 0):
        return False
    return _is_number(entry[1]) and (isfinite(entry[1]) or entry[1] == -inf)


def _to_bias(value: Any) -> Any:
    """Return pairs in the order of their tokens; what is no mapping of numbers is returned unchanged, to be refused."""
    if value is None:
        return ()
    if isinstance(value, Mapping):
        value = tuple(value.items())
    try:
        return tuple(sorted((token, bias) for token, bias in value))
    except (TypeError, ValueError):
        return value


def _to_stop(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value if value is None else (value,)
    try:
        return tuple(value)
    except TypeError:
        return value


def _to_words(value: Any) -> Any:
    """Return words as a tuple of texts and of tuples of tokens; others are returned unchanged, to be refused."""
    if value is None or isinstance(value, str):
        return () if value is None else (value,)
    try:
        return tuple(word if isinstance(word, str) else tuple(to_tokens(word)) for word in value)
    except TypeError:
        return value


def unknown_name(name: str, where: str, known: list[str]) -> RequirementsError:
    """Return the error for a name that a call does not have; the message has the nearest one that it has."""
    if name in ELSEWHERE:
        why, fix = ELSEWHERE[name]
        return RequirementsError(f"{where} was given {name!r}", why, fix)
    return RequirementsError(
        f"{where} was given {name!r}{near(name, known)}", f"it has {', '.join(known)}", "use one of these names"
    )


def _known_names_only(cls: _C) -> _C:
    """Make the constructor raise an error of this project for an unknown name, instead of a TypeError."""
    construct: Callable[..., None] = cls.__init__  # type: ignore[misc]

    @wraps(construct)
    def init(self: object, /, *args: object, **given: object) -> None:
        known: list[str] = cls.names()  # type: ignore[attr-defined] # of the class that this decorates
        if args:
            raise RequirementsError(
                f"{len(args)} unnamed values were given", "every field has a name", "write temperature=0.8, ..."
            )
        for name in given:
            if name not in known:
                raise unknown_name(name, "SamplingParams", known)
        construct(self, **given)

    cls.__init__ = init  # type: ignore[misc]
    return cls


@_known_names_only
@frozen(kw_only=True, repr=False)
class SamplingParams:
    """
    How the tokens of a request are sampled, and when it stops.

    The logits are changed in this order, which is that of `generate` of transformers where it has the same field:
    `logit_bias`, `repetition_penalty`, `frequency_penalty` and `presence_penalty`, the temperature. Then the filters
    apply, each to what the one before has kept: `top_k`, `top_p`, `min_p`.

    Raises:
        LimitsError: A value is out of its range.
        BatchError: A token of `stop_token_ids` or `bad_words` is not a token id.
        RequirementsError: A name is unknown, or the engine has no such field.

    Attributes:
        n: Samples of the prompt, which share the blocks of the prompt where prefix caching is on.
        temperature: Logits are divided by it; 0 takes the most likely token, and of equal ones the lowest id.
        top_k: Keep the k most likely tokens, of equal ones the lowest ids; None keeps all.
        top_p: Keep the fewest most likely tokens whose probabilities sum to at least this; None keeps all.
        min_p: Keep tokens at least this times as likely as the most likely one, as transformers' MinPLogitsWarper does;
            None keeps all.
        repetition_penalty: Above 1, tokens of the prompt and generated ones get less likely: positive logits are
            divided by it, others multiplied (Keskar et al. 2019, arXiv:1909.05858, in the form of transformers'
            RepetitionPenaltyLogitsProcessor). None takes that of the model's generation_config.
        presence_penalty: From -2 to 2: subtracted from the logit of each token that was generated before. The formula
            of the OpenAI API is ``logit[j] - count[j] * frequency_penalty - (count[j] > 0) * presence_penalty``, where
            ``count[j]`` is how often token j was sampled so far (API reference, "Create chat completion", and
            "Advanced usage: frequency and presence penalties"). The prompt does not count.
        frequency_penalty: From -2 to 2: subtracted once for each time that the token was generated; formula above.
        logit_bias: Token -> what is added to its logit before all else, as `sequence_bias` of transformers does for
            single tokens; minus infinity rules a token out. Kept as pairs in the order of the tokens.
        stop: Strings that end the request when the generated text has one of them, across token borders too; `text`
            ends before it. They need a tokenizer. None takes those of the model's generation_config, ``()`` has none.
        stop_token_ids: Tokens that end the request, beside its `stop_tokens`.
        max_new_tokens: The most tokens to generate; None takes the argument of the call, and without one that of the
            model's generation_config.
        min_tokens: Tokens before a stop token is sampled or a stop string ends the request.
        bad_words: Texts, or lists of token ids, that are not generated: the last token of each is ruled out behind the
            others. A text needs a tokenizer, and is meant at the beginning of the text and behind a space.
        logprobs: Report the log-probability of each generated token and of so many most likely ones, by the model's own
            logits: before biases, penalties, temperature and filters. 0 reports the generated token alone.
        seed: Equal seeds draw equal tokens from equal logits at equal positions; None is a random seed per request. Of
            n samples the i-th draws with ``seed + i``. The logits of a request may depend on the rest of its batch by
            rounding: see the guide of the engine.
        skip_special_tokens: Whether `text` leaves the tokenizer's special tokens out.
    """

    n: int = 1
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = field(default=(), converter=_to_bias)
    stop: tuple[str, ...] | None = field(default=None, converter=_to_stop)
    stop_token_ids: frozenset[int] = field(default=frozenset(), converter=to_stop_tokens)
    max_new_tokens: int | None = None
    min_tokens: int = 0
    bad_words: tuple[str | tuple[int, ...], ...] = field(default=(), converter=_to_words)
    logprobs: int | None = None
    seed: int | None = None
    skip_special_tokens: bool = True

    def __attrs_post_init__(self) -> None:
        self._check_filters()
        self._check_penalties()
        self._check_stops()
        if not _is_count(self.n, 1):
            _refuse("n", self.n, "a whole number from 1 on", "request at least one sample")
        if self.n > 1 and self.is_greedy:
            _refuse("n", self.n, "1 where temperature=0: all samples would be equal", "pass a temperature, such as 1.0")
        if self.logprobs is not None and not _is_count(self.logprobs, 0):
            _refuse("logprobs", self.logprobs, "a whole number from 0 on, or None", "pass 0 for the generated token")
        if self.seed is not None and type(self.seed) is not int:
            _refuse("seed", self.seed, "a whole number, or None", "pass an int")

    def _check_filters(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < inf:
            _refuse("temperature", self.temperature, "a finite number from 0 on", "pass 0 for greedy decoding, or 1.0")
        if self.top_k is not None and not _is_count(self.top_k, 1):
            _refuse("top_k", self.top_k, "a whole number from 1 on, or None", "leave top_k out to keep all tokens")
        if self.top_p is not None and (not _is_number(self.top_p) or not 0 < self.top_p <= 1):
            _refuse("top_p", self.top_p, "above 0 and at most 1, or None", "leave top_p out to keep all tokens")
        if self.min_p is not None and (not _is_number(self.min_p) or not 0 <= self.min_p <= 1):
            _refuse("min_p", self.min_p, "from 0 to 1, or None", "leave min_p out to keep all tokens")

    def _check_penalties(self) -> None:
        penalty = self.repetition_penalty
        if penalty is not None and (not _is_number(penalty) or not 0 < penalty < inf):
            _refuse("repetition_penalty", penalty, "a finite number above 0, or None", "pass 1.0 for no penalty")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not _is_number(value) or not -2 <= value <= 2:
                _refuse(name, value, "a number from -2 to 2, as in the OpenAI API", "pass 0 for no penalty")
        bias = self.logit_bias
        if not isinstance(bias, tuple) or not all(map(_is_bias, bias)):
            _refuse(
                "logit_bias", bias, "token ids with a finite number or -inf for each", "pass a dict, such as {5: -1.0}"
            )

    def _check_stops(self) -> None:
        if self.stop is not None and not (
            isinstance(self.stop, tuple) and all(isinstance(one, str) and one for one in self.stop)
        ):
            _refuse("stop", self.stop, "a string or several, none of them empty", "pass a list, such as ['\\n']")
        if self.max_new_tokens is not None and not _is_count(self.max_new_tokens, 1):
            _refuse("max_new_tokens", self.max_new_tokens, "a whole number from 1 on", "request at least one token")
        most = self.max_new_tokens
        if not _is_count(self.min_tokens, 0) or (most is not None and self.min_tokens > most):
            _refuse("min_tokens", self.min_tokens, "a whole number from 0 to max_new_tokens", "pass 0 for no least")
        if not isinstance(self.bad_words, tuple) or not all(self.bad_words):
            _refuse("bad_words", self.bad_words, "texts or lists of token ids, none of them empty", "pass ['word']")
        if not isinstance(self.skip_special_tokens, bool):
            _refuse("skip_special_tokens", self.skip_special_tokens, "a boolean", "pass True or False")

    def __repr__(self) -> str:
        """Return the fields that differ from their defaults."""
        default = {one.name: one.default for one in attrs.fields(type(self))}
        given = [f"{name}={getattr(self, name)!r}" for name in default if getattr(self, name) != default[name]]
        return f"SamplingParams({', '.join(given)})"

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all fields."""
        return [one.name for one in attrs.fields(cls)]

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without a random draw."""
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether top-k or top-p excludes tokens."""
        return self.top_k is not None or (self.top_p is not None and self.top_p < 1)


Sampling = SamplingParams
"""The former name of `SamplingParams`."""
