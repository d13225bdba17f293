"""Checks prompts and stop tokens as callers pass them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from attnplug.errors import BatchError

if TYPE_CHECKING:
    from collections.abc import Sequence


def to_tokens(tokens: Iterable[Any]) -> list[int]:
    """
    Return token ids as a list, those of a tensor or an array too.

    Raises:
        BatchError: An element is not a token id.
    """
    try:
        found = list(tokens.tolist() if hasattr(tokens, "tolist") else tokens)
    except TypeError:
        raise _not_a_token(tokens) from None
    for token in found:
        if type(token) is not int or token < 0:
            raise _not_a_token(token)
    return found


def _not_a_token(value: object) -> BatchError:
    return BatchError(
        f"{value!r} of type {type(value).__name__} was given for tokens",
        "tokens are a list, a tensor or an array of one dimension, and each token is an int from 0 on",
        "pass a flat list of token ids, such as tensor.tolist()",
    )


def to_stop_tokens(tokens: Iterable[Any]) -> frozenset[int]:
    """
    Return stop tokens as a set.

    Raises:
        BatchError: An element is not a token id.
    """
    return frozenset(to_tokens(tokens))


def check_vocabulary(what: str, tokens: Iterable[int], vocabulary: int) -> None:
    """
    Check that all tokens are below the size of the vocabulary.

    Args:
        what: What has the tokens, for the message.
        tokens: The tokens.
        vocabulary: The number of tokens that the model has.

    Raises:
        BatchError: One is not.
    """
    highest = max(tokens, default=0)
    if highest >= vocabulary:
        raise BatchError(
            f"{what} {highest} was given",
            f"the model's vocabulary has tokens from 0 to {vocabulary - 1}",
            "use the model's own tokenizer",
        )


def to_prompts(prompts: Any, tokenizer: Any = None) -> list[Iterable[Any]]:
    """
    Return prompts as a list of token lists.

    Args:
        prompts: Token ids of each prompt, as a list, a tensor or an array; or its text.
        tokenizer: What turns text into tokens; None without.

    Raises:
        BatchError: This is not a list of prompts, or a prompt is text and there is no tokenizer.
    """
    found = list(prompts) if isinstance(prompts, Iterable) and not isinstance(prompts, str) else None
    if found is None or not all(map(_is_prompt, found)) or (tokenizer is None and any(map(_is_text, found))):
        raise BatchError(
            f"prompts of type {type(prompts).__name__!r} were given that are not lists of tokens",
            "prompts are a list, and each prompt in it is a list of token ids, or text for an engine with a tokenizer",
            "pass [ids] for one prompt, or tokenizer(texts).input_ids; Engine(model, tokenizer=...) takes texts",
        )
    return [to_prompt(prompt, tokenizer) for prompt in found]


def to_prompt(prompt: Any, tokenizer: Any) -> Iterable[Any]:
    """
    Return the tokens of one prompt, unchecked where they are given as tokens.

    Raises:
        BatchError: It is text, and there is no tokenizer.
    """
    if not isinstance(prompt, str):
        tokens: Iterable[Any] = prompt
        return tokens
    if tokenizer is None:
        raise BatchError(
            "a text was given as a prompt",
            "the engine has no tokenizer",
            "pass tokenizer(text).input_ids, or make the engine with tokenizer=...",
        )
    ids: Sequence[Any] = tokenizer(prompt).input_ids
    return ids


def _is_text(prompt: object) -> bool:
    return isinstance(prompt, str)


def _is_prompt(prompt: object) -> bool:
    return isinstance(prompt, Iterable) and getattr(prompt, "ndim", 1) > 0
