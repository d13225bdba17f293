"""Log-probabilities of generated tokens, by the model's own logits."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from attrs import frozen

from attnplug_transformers.engine.sampling import rank

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attnplug_transformers.engine.request import Request


@frozen
class TokenLogprobs:
    """
    Natural logarithms of probabilities at one generated token.

    They are those of the model: of its logits in float32, before biases, penalties, temperature and filters.

    Attributes:
        token: The generated token.
        logprob: Its log-probability.
        top: The most likely tokens with theirs, most likely first, of equal ones the lowest id.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def logprobs_of(
    logits: Tensor, tokens: Sequence[int], requests: Sequence[Request]
) -> list[TokenLogprobs | None] | None:
    """
    Return the log-probabilities that the requests report; None where none of them does.

    Args:
        logits: ``(len(requests), vocabulary)`` floats of the model, which are not changed.
        tokens: The token of each request; a negative one is no token, and has none.
        requests: The requests, in the order of the rows.
    """
    rows = [row for row, request in enumerate(requests) if request.logprobs is not None and tokens[row] >= 0]
    if not rows:
        return None
    some = logits if len(rows) == len(requests) else logits[torch.tensor(rows, device=logits.device)]
    some = some.float()
    total = some.logsumexp(-1, keepdim=True)
    chosen = torch.tensor([[tokens[row]] for row in rows], device=logits.device)
    own = (some.gather(-1, chosen) - total).squeeze(-1).tolist()
    counts = [min(requests[row].sampling.logprobs or 0, some.shape[-1]) for row in rows]
    tops: list[list[tuple[int, float]]] = [[] for _ in rows]
    if most := max(counts):
        values, order = rank(some, [most] * len(rows))
        tops = [list(zip(*pair, strict=True)) for pair in zip(order.tolist(), (values - total).tolist(), strict=True)]
    found: list[TokenLogprobs | None] = [None] * len(requests)
    for row, value, top, count in zip(rows, own, tops, counts, strict=True):
        found[row] = TokenLogprobs(tokens[row], value, tuple(top[:count]))
    return found
