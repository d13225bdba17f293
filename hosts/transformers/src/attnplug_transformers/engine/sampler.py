"""From the logits of a step to the tokens of its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnplug_transformers.engine.logprobs import logprobs_of
from attnplug_transformers.engine.penalties import TokenCounts, add_biases, penalize
from attnplug_transformers.engine.sampling import sample

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from transformers import LogitsProcessorList

    from attnplug_transformers.engine.logprobs import TokenLogprobs
    from attnplug_transformers.engine.request import Request


class Sampler:
    """Samples the tokens of each step of an engine. Requests without biases and penalties cost nothing more."""

    def __init__(self) -> None:
        self._counts = TokenCounts()

    @torch.inference_mode()
    def run(self, logits: Tensor, requests: Sequence[Request]) -> tuple[Tensor, list[TokenLogprobs | None] | None]:
        """
        Return the next token of each request, ``(len(requests),)`` int64 on the device of the logits, and the
        log-probabilities that requests report.

        It waits for the device where a request has top-k, top-p, processors or log-probabilities.

        Args:
            logits: ``(len(requests), vocabulary)`` floats, which are not changed.
            requests: The requests, in the order of the rows.
        """
        tokens = sample(process(logits, requests, self._counts), requests)
        if all(request.logprobs is None for request in requests):
            return tokens, None
        return tokens, logprobs_of(logits, tokens.tolist(), requests)


def download(tokens: Tensor) -> Callable[[], list[int]]:
    """Start copying tokens to the host, and return a function that waits for this copy alone."""
    if not tokens.is_cuda:
        return tokens.tolist
    copy, copied = tokens.to("cpu", non_blocking=True), torch.cuda.Event()  # type: ignore[no-untyped-call]
    copied.record(torch.cuda.current_stream(tokens.device))  # which need not be the current device

    def result() -> list[int]:
        copied.synchronize()
        return copy.tolist()

    return result


def process(logits: Tensor, requests: Sequence[Request], counts: TokenCounts) -> Tensor:
    """
    Return the logits after the biases, penalties and processors of each request, in the order of `generate`.

    Biases and penalties are applied to all rows at once, the model's other processors row by row.

    Args:
        logits: ``(len(requests), vocabulary)`` floats, which are not changed.
        requests: The requests, in the order of the rows.
        counts: The tokens of requests with penalties.

    Returns:
        The same tensor where no request changes its logits, otherwise float32, as in `generate`.
    """
    if not any(request.changes_logits for request in requests):
        return logits
    found = logits.to(torch.float32, copy=True)
    add_biases(found, requests)
    _process_rows(found, [None if one.processors is None else one.processors.first for one in requests], requests)
    penalize(found, requests, counts)
    _process_rows(found, [None if one.processors is None else one.processors.last for one in requests], requests)
    return found


def _process_rows(
    logits: Tensor, processors: Sequence[LogitsProcessorList | None], requests: Sequence[Request]
) -> None:
    for row, (each, request) in enumerate(zip(processors, requests, strict=True)):
        if each:
            tokens: Any = torch.tensor([request.tokens], device=logits.device)
            logits[row] = each(tokens, logits[row : row + 1])[0]
