"""A request of the engine, and the checks of what callers pass for one."""

from __future__ import annotations

from collections.abc import Iterable
from secrets import randbits
from typing import TYPE_CHECKING, Any, Literal

from attrs import define, field

from attnplug.errors import BatchError, LimitsError
from attnplug_transformers.engine.sampling import Sampling

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import LogitsProcessorList

Status = Literal["waiting", "running", "finished", "cancelled"]
FinishReason = Literal["stop", "length", "cancelled", "failed"]


def _to_tokens(tokens: Iterable[Any]) -> list[int]:
    try:
        found = list(tokens)
    except TypeError:
        raise _not_a_token(tokens) from None
    for token in found:
        if type(token) is not int or token < 0:
            raise _not_a_token(token)
    return found


def _not_a_token(value: object) -> BatchError:
    return BatchError(
        f"{value!r} of type {type(value).__name__} was given for tokens",
        "tokens are a list, and each token is an int from 0 on",
        "pass a flat list of token ids, such as tensor.tolist()",
    )


def to_stop_tokens(tokens: Iterable[Any]) -> frozenset[int]:
    """
    Return stop tokens as a set.

    Raises:
        BatchError: An element is not a token id.
    """
    return frozenset(_to_tokens(tokens))


@define(eq=False, kw_only=True)
class Request:
    """
    A prompt, the tokens generated from it, and the blocks of its KV cache.

    Only the engine and its scheduler write the attributes below `stop_tokens`.

    Raises:
        BatchError: The prompt is empty or has an element that is not a token id, or `sampling` is not a `Sampling`.
        LimitsError: `max_new_tokens` is not positive.

    Attributes:
        id: The caller's number for it.
        tokens: The prompt, followed by the generated tokens.
        max_new_tokens: The most tokens to generate.
        sampling: How its tokens are sampled.
        stop_tokens: Generating one of these finishes the request; it is kept as the last token.
        processors: What changes its logits first, by the model's generation_config.
        seed: Seed of its random draws: that of `sampling`, or a random one.
        num_prompt_tokens: Tokens of the prompt.
        num_computed_tokens: Leading tokens whose keys and values are in the KV cache.
        num_cached_tokens: Those of them that its last admission found by prefix caching.
        blocks: The blocks that hold its tokens, in order; the null block where no later query attends to them.
        status: Its state. A preempted request is waiting again.
        finish_reason: A stop token, its length, a cancel, or a failure: its logits were non-finite.
    """

    id: int
    tokens: list[int] = field(converter=_to_tokens)
    max_new_tokens: int
    sampling: Sampling = field(factory=Sampling)
    stop_tokens: frozenset[int] = field(default=frozenset(), converter=to_stop_tokens)
    processors: LogitsProcessorList | None = field(init=False, default=None)
    seed: int = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = field(init=False, default=0)
    num_cached_tokens: int = field(init=False, default=0)
    blocks: list[int] = field(init=False, factory=list)
    status: Status = field(init=False, default="waiting")
    finish_reason: FinishReason | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.sampling, Sampling):
            raise BatchError(
                f"sampling={self.sampling!r} was given",
                "it is a Sampling; Engine.generate also takes a list with one for each prompt",
                "leave it out for greedy decoding, or pass Sampling(temperature=0.8)",
            )
        if not self.tokens:
            raise BatchError("an empty prompt was given", "a prompt has at least one token", "pass the start token")
        if type(self.max_new_tokens) is not int or self.max_new_tokens < 1:
            raise LimitsError(
                f"max_new_tokens={self.max_new_tokens!r} was given",
                "max_new_tokens is a whole number from 1 on",
                "request at least one token",
            )
        self.num_prompt_tokens = len(self.tokens)
        self.seed = randbits(64) if self.sampling.seed is None else self.sampling.seed

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

    def append(self, token: int) -> None:
        """Add a generated token, and set `finish_reason` where it is the last one."""
        self.tokens.append(token)
        if token in self.stop_tokens:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.max_tokens:
            self.finish_reason = "length"


def check_vocabulary(prompt: Sequence[int], stop_tokens: Iterable[int], vocabulary: int) -> None:
    """
    Check that all tokens are below the size of the vocabulary.

    Raises:
        BatchError: One is not.
    """
    for what, tokens in (("a prompt with the token", prompt), ("the stop token", stop_tokens)):
        highest = max(tokens, default=0)
        if highest >= vocabulary:
            raise BatchError(
                f"{what} {highest} was given",
                f"the model's vocabulary has tokens from 0 to {vocabulary - 1}",
                "use the model's own tokenizer",
            )


def to_prompts(prompts: Any) -> list[Iterable[Any]]:
    """
    Return prompts as a list.

    Raises:
        BatchError: This is not a list of lists, such as the tokens of one prompt.
    """
    found = list(prompts) if isinstance(prompts, Iterable) else None
    if found is None or isinstance(prompts, str) or not all(map(_is_prompt, found)):
        raise BatchError(
            f"prompts of type {type(prompts).__name__!r} were given that are not lists of tokens",
            "prompts are a list, and each prompt in it is a list of token ids",
            "pass [ids] for one prompt, or tokenizer(texts).input_ids",
        )
    return found


def _is_prompt(prompt: object) -> bool:
    return isinstance(prompt, Iterable) and not isinstance(prompt, str) and getattr(prompt, "ndim", 1) > 0


def to_samplings(sampling: Any, count: int) -> Sequence[Sampling | None]:
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
            f"{len(sampling)} Samplings were given for {count} prompts",
            "a list of Samplings has one for each prompt",
            "pass one Sampling for all, or one for each",
        )
    return sampling
