"""The attention of one request in float64."""

from __future__ import annotations

import torch
from attrs import frozen
from torch import Tensor


@frozen(eq=False, kw_only=True)
class ScoreParams:
    """
    How scores are made.

    Attributes:
        scale: Factor of the scores.
        softcap: Scores become ``cap * tanh(score / cap)``; 0 for none.
        left: Keys that a row sees to its left; -1 for all.
        right: Likewise to its right.
        alibi: ``(heads,)``: a score loses its slope for every position between the row and the key.
        sink: ``(heads,)`` logits that take part in the softmax, and in the LSE.
    """

    scale: float
    softcap: float = 0.0
    left: int = -1
    right: int = -1
    alibi: Tensor | None = None
    sink: Tensor | None = None


def attend(query: Tensor, key: Tensor, value: Tensor, params: ScoreParams) -> tuple[Tensor, Tensor]:
    """
    Return output ``(rows, heads, head_size_v)`` and LSE ``(heads, rows)`` of a request: its rows are the last tokens.

    A row that sees no key has zeros, and -inf or the sink.
    """
    group = query.shape[1] // key.shape[1]
    keys, values = (each.double().repeat_interleave(group, 1) for each in (key, value))
    scores = params.scale * torch.einsum("qhd,khd->hqk", query.double(), keys)
    if params.softcap > 0:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    distance = torch.arange(query.shape[0])[:, None] + key.shape[0] - query.shape[0] - torch.arange(key.shape[0])
    if params.alibi is not None:
        scores = scores - params.alibi.double()[:, None, None] * distance.abs()
    scores = scores.masked_fill(~visible(distance, params), -torch.inf)
    lse = scores.new_full(scores.shape[:2], -torch.inf)
    if key.shape[0]:
        lse = torch.logsumexp(scores, -1)
    if params.sink is not None:
        lse = torch.logaddexp(lse, params.sink.double()[:, None])
    weights = torch.exp(scores - lse.nan_to_num(neginf=0.0)[:, :, None])
    return torch.einsum("hqk,khd->qhd", weights, values), lse


def visible(distance: Tensor, params: ScoreParams) -> Tensor:
    """Return which row sees which key."""
    ahead = torch.ones_like(distance, dtype=torch.bool) if params.right < 0 else distance >= -params.right
    return ahead & (distance <= params.left) if params.left >= 0 else ahead
