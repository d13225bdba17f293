"""Yields what requests generate, step by step."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import define, field, frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from attnplug_transformers.engine.logprobs import TokenLogprobs
    from attnplug_transformers.engine.request import FinishReason, Request


@frozen
class StreamOutput:
    """
    What a request has generated since its last output.

    Attributes:
        prompt: Index of its prompt.
        sample: Its number among the samples of that prompt.
        tokens: The new tokens: one for each step, and more only where the engine was stepped elsewhere meanwhile. None
            where a request ended without one.
        text: The new text, of complete characters; empty as long as a character or the beginning of a stop string is
            incomplete, and without a tokenizer. The texts of all outputs are the request's `text`.
        logprobs: The log-probabilities of the tokens, where the request reports them; otherwise None.
        finish_reason: Why the request has ended, in its last output; None before.
        request: The request.
    """

    prompt: int
    sample: int
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs | None, ...] | None
    finish_reason: FinishReason | None
    request: Request = field(repr=False)


@define(eq=False)
class _Reader:
    """A request, and how much of it was yielded."""

    request: Request
    prompt: int
    num_tokens: int = 0
    num_characters: int = 0
    has_ended: bool = False

    def read(self) -> StreamOutput | None:
        """Return what is new; None without anything."""
        request = self.request
        tokens = tuple(request.tokens[request.num_prompt_tokens + self.num_tokens :])
        if self.has_ended or not (tokens or request.is_finished):
            return None
        text = _text_of(request)
        logprobs = request.logprobs
        found = StreamOutput(
            prompt=self.prompt,
            sample=request.sample,
            tokens=tokens,
            text=text[self.num_characters :],
            logprobs=None if logprobs is None else tuple(logprobs[self.num_tokens :]),
            finish_reason=request.finish_reason,
            request=request,
        )
        self.num_tokens += len(tokens)
        self.num_characters = max(len(text), self.num_characters)
        self.has_ended = request.is_finished
        return found


def _text_of(request: Request) -> str:
    """Return the text so far; of a request that its tokenizer has failed for, none that is new."""
    return "" if request.detokenizer is None or request.error is not None else request.text


def stream(requests: Sequence[tuple[int, Request]], step: Callable[[], object]) -> Iterator[StreamOutput]:
    """
    Yield what each request generates, and step the engine where nothing is new.

    Args:
        requests: Index of the prompt and request, for each.
        step: Runs one step of the engine.
    """
    readers = [_Reader(request, prompt) for prompt, request in requests]
    while readers:
        for reader in readers:
            output = reader.read()
            if output is not None:
                yield output
        readers = [reader for reader in readers if not reader.has_ended]
        if readers:
            step()
