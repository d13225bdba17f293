"""What callers give to an engine, checked before anything is done with it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from attnplug.errors import BatchError, RequirementsError
from attnplug_transformers.engine.request import Request

if TYPE_CHECKING:
    from collections.abc import Container, Sequence

    from attnplug_transformers.engine.sampling import Sampling


def check_choices(graphs: object, reuse_prefixes: object, kv_cache_dtype: object) -> None:
    """
    See that the choices of an engine are of their kind.

    Raises:
        RequirementsError: One is not.
    """
    if graphs is not None and not isinstance(graphs, bool):
        _refuse_choice("graphs", graphs, "True, False or None", "leave graphs out to record steps where that helps")
    if not isinstance(reuse_prefixes, bool):
        _refuse_choice("reuse_prefixes", reuse_prefixes, "True or False", "leave reuse_prefixes out for True")
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


def prompts_of(prompts: Any) -> list[Iterable[Any]]:
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


def samplings_of(sampling: Any, count: int) -> Sequence[Sampling]:
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
