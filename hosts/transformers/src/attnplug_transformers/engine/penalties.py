"""Biases and penalties of requests, on all rows of a step at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attnplug_transformers.engine.request import Request

_ROWS: Final = 8
"""Rows of the first table; it doubles when a step has more requests with penalties."""


class TokenCounts:
    """
    How often each token is in the prompt and among the generated tokens of each request that has penalties.

    A row of a table on the device belongs to a request as long as no other one needs it: then a step adds one token per
    request, and a row that was lost is counted again from the request's tokens. Sampling counts the tokens before the
    step, which no rollback removes.
    """

    def __init__(self) -> None:
        self._in_prompt: Tensor | None = None
        self._generated: Tensor | None = None
        self._known: dict[int, tuple[int, int]] = {}  # request id -> its row, and how many of its tokens are counted

    def update(self, requests: Sequence[Request], like: Tensor) -> tuple[Tensor, Tensor]:
        """
        Count the new tokens, and return the rows of these requests.

        Args:
            requests: Requests of one engine, each once.
            like: ``(rows, vocabulary)``, with the vocabulary and the device of the tables.

        Returns:
            ``(len(requests), vocabulary)`` bool: the token is in the prompt; and int32: how often it was generated.
        """
        # Taken away until all is counted: after an interrupt in between, every row is counted again.
        known, self._known = self._known, {}
        in_prompt, generated, known = self._tables(len(requests), like, known)
        batch = {request.id for request in requests}
        free = [row for name, (row, _) in known.items() if name not in batch]
        free += set(range(in_prompt.shape[0])) - {row for row, _ in known.values()}
        owners = {row: name for name, (row, _) in known.items()}
        fresh: list[Request] = []
        more: list[tuple[int, int]] = []  # row and token
        for request in requests:
            if request.id not in known:
                row = free.pop()
                known.pop(owners.get(row, -1), None)
                known[request.id] = (row, request.num_prompt_tokens)
                fresh.append(request)
            row, count = known[request.id]
            more += [(row, token) for token in request.tokens[count:]]
            known[request.id] = (row, request.num_tokens)
        if fresh:
            rows = torch.tensor([known[request.id][0] for request in fresh], device=like.device)
            in_prompt[rows] = False
            generated[rows] = 0
            pairs = [
                (known[request.id][0], token)
                for request in fresh
                for token in set(request.tokens[: request.num_prompt_tokens])
                if token < like.shape[-1]  # an embedding may have more tokens than there are logits
            ]
            in_prompt[_index(pairs, like)] = True
        if more:
            index = _index(more, like)
            ones = torch.ones(len(more), dtype=generated.dtype, device=like.device)
            generated.index_put_(index, ones, accumulate=True)
        self._known = known
        rows = torch.tensor([known[request.id][0] for request in requests], device=like.device)
        return in_prompt[rows], generated[rows]

    def _tables(
        self, count: int, like: Tensor, known: dict[int, tuple[int, int]]
    ) -> tuple[Tensor, Tensor, dict[int, tuple[int, int]]]:
        """Return tables with at least `count` rows, and which of them are known: none of new tables."""
        in_prompt, generated = self._in_prompt, self._generated
        if in_prompt is None or generated is None or in_prompt.shape[0] < count:
            size = (max(_ROWS, 1 << (count - 1).bit_length()), like.shape[-1])
            in_prompt = self._in_prompt = torch.zeros(size, dtype=torch.bool, device=like.device)
            generated = self._generated = torch.zeros(size, dtype=torch.int32, device=like.device)
            known = {}
        return in_prompt, generated, known


def _index(pairs: Sequence[tuple[int, int]], like: Tensor) -> tuple[Tensor, Tensor]:
    rows, tokens = torch.tensor(pairs, dtype=torch.int64, device=like.device).reshape(-1, 2).unbind(-1)
    return rows, tokens


def add_biases(logits: Tensor, requests: Sequence[Request]) -> None:
    """
    Add the `logit_bias` of each request to its row.

    Args:
        logits: ``(len(requests), vocabulary)`` float32, changed in place.
        requests: The requests, in the order of the rows.
    """
    found = [(row, *entry) for row, request in enumerate(requests) for entry in request.sampling.logit_bias]
    if found:
        index = _index([(row, token) for row, token, _ in found], logits)
        values = torch.tensor([bias for *_, bias in found], dtype=logits.dtype, device=logits.device)
        logits.index_put_(index, values, accumulate=True)


def penalize(logits: Tensor, requests: Sequence[Request], counts: TokenCounts) -> None:
    """
    Apply the penalties of each request to its row: repetition, frequency, presence, as `SamplingParams` defines them.

    Args:
        logits: ``(len(requests), vocabulary)`` float32, changed in place.
        requests: The requests, in the order of the rows.
        counts: Their tokens.
    """
    rows = [row for row, request in enumerate(requests) if request.has_penalties]
    if not rows:
        return
    some = [requests[row] for row in rows]
    index = slice(None) if len(rows) == len(requests) else torch.tensor(rows, device=logits.device)
    in_prompt, generated = counts.update(some, logits)
    found = logits[index]
    before = generated > 0
    if any(request.repetition_penalty != 1 for request in some):
        penalty = _column([request.repetition_penalty for request in some], logits)
        penalized = torch.where(found < 0, found * penalty, found / penalty)
        found = torch.where(in_prompt.logical_or_(before), penalized, found)
    if any(request.sampling.frequency_penalty for request in some):
        found = found - generated * _column([request.sampling.frequency_penalty for request in some], logits)
    if any(request.sampling.presence_penalty for request in some):
        found = found - before * _column([request.sampling.presence_penalty for request in some], logits)
    logits[index] = found


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device).unsqueeze(-1)
