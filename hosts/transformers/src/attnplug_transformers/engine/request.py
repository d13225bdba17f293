"""A request of the engine: its prompt, its tokens, and what is known of them."""

from __future__ import annotations

from itertools import pairwise
from secrets import randbits
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal

from attrs import define, field

from attnplug.errors import BatchError, LimitsError
from attnplug_transformers.engine.metrics import RequestMetrics
from attnplug_transformers.engine.params import SamplingParams
from attnplug_transformers.engine.prompts import to_stop_tokens, to_tokens

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug_transformers.engine.detokenizer import Detokenizer
    from attnplug_transformers.engine.generation import Processors
    from attnplug_transformers.engine.logprobs import TokenLogprobs

Status = Literal["waiting", "running", "finished", "cancelled"]
FinishReason = Literal["stop", "length", "cancelled", "failed"]


@define(eq=False, kw_only=True)
class Request:
    """
    A prompt, the tokens generated from it, and the blocks of its KV cache.

    Only the engine and its scheduler write the attributes below `stop_tokens`.

    Raises:
        BatchError: The prompt is empty or has an element that is not a token id, or `sampling` is no `SamplingParams`.
        LimitsError: `max_new_tokens` is not positive.

    Attributes:
        id: The caller's number for it.
        tokens: The prompt, followed by the generated tokens.
        max_new_tokens: The most tokens to generate.
        sampling: How its tokens are sampled.
        stop_tokens: Generating one of these finishes the request; it is kept as the last token.
        sample: Its number among the n samples of its prompt, from 0 on.
        samples: All samples of its prompt, itself included; those after the first one wait for its prompt.
        stop: The stop strings in force.
        repetition_penalty: The repetition penalty in force; 1 is none.
        processors: What else changes its logits, by the model's generation_config.
        has_penalties: Whether tokens that it has are penalized.
        changes_logits: Whether its token is sampled from other logits than those of the model.
        detokenizer: Decodes its tokens; None where the engine has no tokenizer.
        decodes: Whether each token is decoded at once, for stop strings or a stream, and not when `text` is read.
        seed: Seed of its random draws: that of `sampling` and `sample`, or a random one.
        num_prompt_tokens: Tokens of the prompt.
        num_computed_tokens: Leading tokens whose keys and values are in the KV cache.
        num_cached_tokens: Those of them that its last admission found by prefix caching.
        num_preemptions: Times that it released its blocks, and was recomputed.
        blocks: The blocks that hold its tokens, in order; the null block where no later query attends to them.
        logprobs: The log-probabilities of each generated token, where `sampling` requests them; otherwise None.
        status: Its state. A preempted request is waiting again.
        finish_reason: A stop token or string, its length, a cancel, or a failure: `error` says of what.
        stop_reason: The token or the string that stopped it; None otherwise.
        error: What the tokenizer raised for its tokens; None also where it has failed for its non-finite logits.
    """

    id: int
    tokens: list[int] = field(converter=to_tokens)
    max_new_tokens: int
    sampling: SamplingParams = field(factory=SamplingParams)
    stop_tokens: frozenset[int] = field(default=frozenset(), converter=to_stop_tokens)
    sample: int = 0
    samples: tuple[Request, ...] = field(init=False, repr=False)
    stop: tuple[str, ...] = field(init=False, default=())
    repetition_penalty: float = field(init=False, default=1.0)
    processors: Processors | None = field(init=False, default=None)
    has_penalties: bool = field(init=False)
    changes_logits: bool = field(init=False)
    detokenizer: Detokenizer | None = field(init=False, default=None, repr=False)
    decodes: bool = field(init=False, default=False)
    seed: int = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = field(init=False, default=0)
    num_cached_tokens: int = field(init=False, default=0)
    num_preemptions: int = field(init=False, default=0)
    blocks: list[int] = field(init=False, factory=list)
    logprobs: list[TokenLogprobs | None] | None = field(init=False, default=None, repr=False)
    status: Status = field(init=False, default="waiting")
    finish_reason: FinishReason | None = field(init=False, default=None)
    stop_reason: int | str | None = field(init=False, default=None)
    error: Exception | None = field(init=False, default=None)
    _arrived: float = field(init=False, repr=False)
    _scheduled: float | None = field(init=False, default=None, repr=False)
    _times: list[float] = field(init=False, factory=list, repr=False)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.sampling, SamplingParams):
            raise BatchError(
                f"sampling={self.sampling!r} was given",
                "it is a SamplingParams; Engine.generate also takes a list with one for each prompt",
                "leave it out for greedy decoding, or pass SamplingParams(temperature=0.8)",
            )
        if not self.tokens:
            raise BatchError("an empty prompt was given", "a prompt has at least one token", "pass the start token")
        if type(self.max_new_tokens) is not int or self.max_new_tokens < 1:
            raise LimitsError(
                f"max_new_tokens={self.max_new_tokens!r} was given",
                "max_new_tokens is a whole number from 1 on",
                "request at least one token",
            )
        self._arrived = perf_counter()
        self.samples = (self,)
        self.num_prompt_tokens = len(self.tokens)
        self.seed = randbits(64) if self.sampling.seed is None else self.sampling.seed + self.sample
        self.configure()
        if self.sampling.logprobs is not None:
            self.logprobs = []

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and generated ones."""
        return len(self.tokens)

    @property
    def max_tokens(self) -> int:
        """The most tokens that it can have."""
        return self.num_prompt_tokens + self.max_new_tokens

    @property
    def new_tokens(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        """Whether it generates no more tokens."""
        return self.finish_reason is not None

    @property
    def text(self) -> str:
        """
        The text of the generated tokens, before the stop string.

        While it runs, this is the text that no later token changes: characters are complete.

        Raises:
            BatchError: The engine has no tokenizer.
        """
        found = self.detokenizer
        if found is None:
            raise BatchError(
                f"the text of request {self.id} was read",
                "its engine has no tokenizer",
                "make the engine with tokenizer=..., or decode new_tokens",
            )
        if self.error is None:
            found.update(self.tokens, self.num_prompt_tokens)
        return found.text if self.is_finished else found.stable

    @property
    def metrics(self) -> RequestMetrics:
        """Its times and counts so far."""
        times = self._times
        return RequestMetrics(
            queue_time=None if self._scheduled is None else self._scheduled - self._arrived,
            time_to_first_token=times[0] - self._arrived if times else None,
            inter_token_latencies=tuple(after - before for before, after in pairwise(times)),
            total_time=times[-1] - self._arrived if times else None,
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_new_tokens=self.num_tokens - self.num_prompt_tokens,
            num_preemptions=self.num_preemptions,
        )

    def configure(
        self,
        *,
        stop: Sequence[str] = (),
        repetition_penalty: float = 1.0,
        processors: Processors | None = None,
        detokenizer: Detokenizer | None = None,
    ) -> None:
        """
        Set what the engine derives from its model and its tokenizer.

        Args:
            stop: The stop strings.
            repetition_penalty: The model's; that of `sampling` takes its place.
            processors: What else changes the logits.
            detokenizer: Decodes the tokens.
        """
        sampling = self.sampling
        own = sampling.repetition_penalty
        self.stop, self.processors, self.detokenizer = tuple(stop), processors, detokenizer
        self.decodes = bool(stop)
        self.repetition_penalty = repetition_penalty if own is None else own
        self.has_penalties = self.repetition_penalty != 1 or bool(
            sampling.presence_penalty or sampling.frequency_penalty
        )
        self.changes_logits = self.has_penalties or processors is not None or bool(sampling.logit_bias)

    def admit(self) -> None:
        """Set it running, at the time of its first admission."""
        self.status = "running"
        if self._scheduled is None:
            self._scheduled = perf_counter()

    def append(self, token: int, logprobs: TokenLogprobs | None = None, now: float | None = None) -> None:
        """
        Add a generated token, and set `finish_reason` where it is the last one.

        Args:
            token: The token.
            logprobs: Its log-probabilities, where they are reported.
            now: When its step has ended, in seconds of `time.perf_counter`; None reads the clock.
        """
        self.tokens.append(token)
        self._times.append(perf_counter() if now is None else now)
        if self.logprobs is not None:
            self.logprobs.append(logprobs)
        if self.decodes and self._decode():
            return
        if token in self.stop_tokens:
            self.finish_reason, self.stop_reason = "stop", token
        elif len(self.tokens) >= self.max_tokens:
            self.finish_reason = "length"

    def _decode(self) -> bool:
        """Decode the last token, and return whether that ends the request. What a tokenizer raises fails it alone."""
        if self.detokenizer is None:
            return False
        try:
            self.stop_reason = self.detokenizer.update(self.tokens, self.num_prompt_tokens)
        except Exception as error:  # noqa: BLE001 - the code of any tokenizer
            self.finish_reason, self.error = "failed", error
            return True
        if self.stop_reason is not None:
            self.finish_reason = "stop"
        return self.is_finished

    def truncate(self, num_tokens: int) -> None:
        """Undo what was appended behind so many tokens, whatever an exception has left of it."""
        del self.tokens[num_tokens:]
        count = num_tokens - self.num_prompt_tokens
        del self._times[max(count, 0) :]
        if self.logprobs is not None:
            del self.logprobs[max(count, 0) :]
        if self.detokenizer is not None:
            self.detokenizer.reset()
        self.finish_reason = self.stop_reason = self.error = None


def to_samplings(sampling: Any, count: int) -> Sequence[SamplingParams | None]:
    """
    Return the sampling of each prompt.

    Args:
        sampling: One for all prompts, or a list with one for each.
        count: The number of prompts.

    Raises:
        BatchError: The list has another length.
    """
    if not isinstance(sampling, (list, tuple)):
        return [sampling] * count
    if len(sampling) != count:
        raise BatchError(
            f"{len(sampling)} SamplingParams were given for {count} prompts",
            "a list of SamplingParams has one for each prompt",
            "pass one SamplingParams for all, or one for each",
        )
    return sampling
