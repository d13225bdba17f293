"""One sequence on its way through the engine."""

from __future__ import annotations

from collections.abc import Iterable
from secrets import randbits
from typing import TYPE_CHECKING, Any, Literal

from attrs import define, field

from attnplug.errors import BatchError, LimitsError, RequirementsError
from attnplug_transformers.engine.sampling import Sampling

if TYPE_CHECKING:
    from collections.abc import Container, Sequence


Status = Literal["waiting", "running", "finished", "cancelled"]
FinishReason = Literal["stop", "length", "cancelled", "failed"]


def _to_tokens(tokens: Iterable[Any]) -> list[int]:
    try:
        found = list(tokens)
    except TypeError:
        raise BatchError(
            f"{tokens!r} of type {type(tokens).__name__} was given for tokens",
            "tokens come as a list, and a token is an int from 0 on",
            "pass a flat list of token ids, such as tensor.tolist()",
        ) from None
    for token in found:
        if type(token) is not int or token < 0:
            raise BatchError(
                f"the token {token!r} of type {type(token).__name__} was given",
                "a token is an int from 0 on",
                "pass a flat list of token ids, such as tensor.tolist()",
            )
    return found


def _check_sampling(sampling: object) -> None:
    if not isinstance(sampling, Sampling):
        raise BatchError(
            f"sampling={sampling!r} was given",
            "it is a Sampling; Engine.generate also takes a list with one for each prompt",
            "leave it out for greedy decoding, or pass Sampling(temperature=0.8)",
        )


def to_stop_tokens(tokens: Iterable[Any]) -> frozenset[int]:
    """
    Return stop tokens as a set.

    Raises:
        BatchError: Something of it is no token.
    """
    return frozenset(_to_tokens(tokens))


@define(eq=False, kw_only=True)
class Request:
    """
    A prompt, what was generated so far, and where its keys and values lie.

    The scheduler alone writes the attributes below `stop_tokens`.

    Raises:
        BatchError: The prompt is empty, or holds something that is no token; or the sampling is none.
        LimitsError: Nothing may be generated.

    Attributes:
        id: The host's name for it.
        tokens: The prompt, and behind it the generated tokens.
        max_new_tokens: The most that is generated.
        sampling: How tokens are chosen.
        stop_tokens: Generating one of these ends the request; it is kept as the last token.
        seed: What its draws follow from: the one of `sampling`, or one of its own.
        num_prompt_tokens: Tokens of the prompt.
        num_computed_tokens: Tokens at the front whose keys and values are cached.
        num_cached_tokens: Those of them that the last admission found in the cache.
        blocks: The blocks that hold its tokens, in order.
        status: Where it is. A preempted request is waiting again.
        finish_reason: Why it ended: a stop token, its length, the host cancelled it, or its logits were no numbers.
    """

    id: int
    tokens: list[int] = field(converter=_to_tokens)
    max_new_tokens: int
    sampling: Sampling = field(factory=Sampling)
    stop_tokens: frozenset[int] = field(default=frozenset(), converter=to_stop_tokens)
    seed: int = field(init=False)
    num_prompt_tokens: int = field(init=False)
    num_computed_tokens: int = field(init=False, default=0)
    num_cached_tokens: int = field(init=False, default=0)
    blocks: list[int] = field(init=False, factory=list)
    status: Status = field(init=False, default="waiting")
    finish_reason: FinishReason | None = field(init=False, default=None)

    def __attrs_post_init__(self) -> None:
        self.num_prompt_tokens = len(self.tokens)
        _check_sampling(self.sampling)
        self.seed = randbits(64) if self.sampling.seed is None else self.sampling.seed
        if not self.tokens:
            raise BatchError("an empty prompt was given", "a prompt has at least one token", "pass the start token")
        if type(self.max_new_tokens) is not int or self.max_new_tokens < 1:
            raise LimitsError(
                f"max_new_tokens={self.max_new_tokens!r} was given",
                "max_new_tokens is a whole number from 1 on",
                "ask for at least one token",
            )

    @property
    def num_tokens(self) -> int:
        """Tokens known so far."""
        return len(self.tokens)

    @property
    def max_tokens(self) -> int:
        """Tokens that there will be at most."""
        return self.num_prompt_tokens + self.max_new_tokens

    @property
    def new_tokens(self) -> list[int]:
        """The generated tokens."""
        return self.tokens[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will come."""
        return self.finish_reason is not None

    def append(self, token: int) -> None:
        """Add a generated token; it may be the last one."""
        self.tokens.append(token)
        if token in self.stop_tokens:
            self.finish_reason = "stop"
        elif len(self.tokens) >= self.max_tokens:
            self.finish_reason = "length"


def check_choices(graphs: object, prefix_caching: object, kv_cache_dtype: object) -> None:
    """
    See that the choices of an engine are of their kind.

    Raises:
        RequirementsError: One is not.
    """
    if graphs is not None and not isinstance(graphs, bool):
        _refuse_choice("graphs", graphs, "True, False or None", "leave graphs out to record steps where that helps")
    if not isinstance(prefix_caching, bool):
        _refuse_choice("prefix_caching", prefix_caching, "True or False", "leave prefix_caching out for True")
    if not isinstance(kv_cache_dtype, str):
        _refuse_choice("kv_cache_dtype", kv_cache_dtype, "the name of a dtype, or 'auto'", "pass 'auto', or 'fp8'")


def check_tokens(prompt: Sequence[int], stop_tokens: Iterable[int], vocabulary: int) -> None:
    """
    See that a model knows the tokens of a request.

    Raises:
        BatchError: It does not know one.
    """
    for what, tokens in (("a prompt with the token", prompt), ("the stop token", stop_tokens)):
        most = max(tokens, default=0)
        if most >= vocabulary:
            raise BatchError(
                f"{what} {most} was given",
                f"the model knows tokens from 0 to {vocabulary - 1}",
                "use the model's own tokenizer",
            )


def check_known(request: object, known: Container[Request]) -> None:
    """
    See that a request is one of these.

    Raises:
        BatchError: It is another one, or something else.
    """
    if not isinstance(request, Request) or request not in known:
        what = f"request {request.id}" if isinstance(request, Request) else repr(request)
        raise BatchError(
            f"{what} was given to be cancelled",
            "it is no request of this engine",
            "pass what submit() of this engine returned",
        )


def to_prompts(prompts: Any) -> list[Iterable[Any]]:
    """
    Return prompts as a list of prompts.

    Raises:
        BatchError: It is something else, such as the tokens of one prompt.
    """
    found = list(prompts) if isinstance(prompts, Iterable) else None
    if found is None or isinstance(prompts, str) or not all(_is_prompt(one) for one in found):
        raise BatchError(
            f"prompts of type {type(prompts).__name__!r} were given that are no lists of tokens",
            "prompts are a list, and each prompt in it is a list of token ids",
            "pass [ids] for one prompt, or tokenizer(texts).input_ids",
        )
    return found


def to_samplings(sampling: Any, count: int) -> Sequence[Sampling]:
    """
    Return the sampling of each prompt, from one for all or a list with one for each.

    Raises:
        BatchError: It is something else, or not as many as there are prompts.
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


def _is_prompt(prompt: object) -> bool:
    return isinstance(prompt, Iterable) and not isinstance(prompt, str) and getattr(prompt, "ndim", 1) > 0


def _refuse_choice(name: str, value: object, expected: str, fix: str) -> None:
    raise RequirementsError(f"{name}={value!r} was given to the engine", f"it is {expected}", fix)
