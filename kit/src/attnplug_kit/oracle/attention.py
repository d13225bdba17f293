"""
What attention is, written to be checked by reading: one request, one head at a time, in float64.

It shares no code with any backend. Nothing here is fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import Tensor

from attnplug_kit.oracle.sparsity import seen_by

if TYPE_CHECKING:
    from collections.abc import Mapping


@frozen(eq=False)
class Attended:
    """
    The result of attention.

    Attributes:
        output: ``(queries, num_q_heads, head_size_v)`` float64; 0 for a row that attends nothing.
        lse: ``(queries, num_q_heads)`` float64, natural log-sum-exp of the scores, the sink not
            counted; -inf for such a row.
        lse_with_sink: The same with the sink counted; equal to `lse` where there is none.
    """

    output: Tensor
    lse: Tensor
    lse_with_sink: Tensor


def attend(  # noqa: PLR0913 - every feature of attention is one argument
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: tuple[int, int] = (-1, -1),
    attention_chunk: int | None = None,
    logits_soft_cap: float | None = None,
    alibi: str | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    custom_mask: Tensor | None = None,
    block_sparse: Mapping[str, Any] | None = None,
) -> Attended:
    """
    Attend the keys of one request.

    The queries are the last tokens of the sequence: query ``i`` stands at position ``len(key) - len(query) + i``,
    which is negative for the first of more queries than keys.

    In order: scores are scaled, capped, biased by ALiBi, masked, and normalized together with the sink.

    Args:
        query: ``(queries, num_q_heads, head_size)``.
        key: ``(keys, num_kv_heads, head_size)``.
        value: ``(keys, num_kv_heads, head_size_v)``.
        scale: Factor of the scores.
        causal: Whether a token attends no later position.
        window: Positions attended to the left and to the right of a token's own, -1 for all.
        attention_chunk: A token attends its own chunk of this many positions only.
        logits_soft_cap: Scores become ``cap * tanh(score / cap)``.
        alibi: ``"linear"``: scores lose ``slope * distance``; ``"sqrt"``: they lose ``slope * sqrt(distance)``.
        alibi_slopes: ``(num_q_heads,)``.
        sinks: ``(num_q_heads,)`` logits that take part in the softmax and have no value.
        custom_mask: ``(queries, keys)`` bool: what is False is not attended, whatever else allows it.
        block_sparse: The parameters of a pattern, see `attnplug_kit.oracle.sparsity`; all heads are here.
    """
    num_queries, num_q_heads, _ = query.shape
    group = num_q_heads // key.shape[1]
    queries = torch.arange(num_queries) + key.shape[0] - num_queries
    positions = torch.arange(key.shape[0])
    visible = _visible(queries, positions, window, attention_chunk, causal=causal)
    visible = visible if custom_mask is None else visible & custom_mask
    distance = (queries[:, None] - positions[None, :]).abs().double()

    output = torch.zeros(num_queries, num_q_heads, value.shape[2], dtype=torch.float64)
    lse = torch.full((num_queries, num_q_heads), -torch.inf, dtype=torch.float64)
    lse_with_sink = lse.clone()
    for head in range(num_q_heads):
        keys, values = key[:, head // group].double(), value[:, head // group].double()
        scores = scale * (query[:, head].double() @ keys.T)
        if logits_soft_cap is not None:
            scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
        if alibi is not None and alibi_slopes is not None:
            slope = alibi_slopes[head].double()
            scores = scores - slope * (distance if alibi == "linear" else distance.sqrt())
        mine = visible
        if block_sparse is not None:
            heads = {"num_q_heads": num_q_heads, "num_kv_heads": key.shape[1]}
            mine = visible & seen_by(head, block_sparse, **heads, queries=queries, keys=positions)
        for row in range(num_queries):
            seen = mine[row]
            if seen.any():
                lse[row, head] = torch.logsumexp(scores[row, seen], 0)
            lse_with_sink[row, head] = lse[row, head]
            if sinks is not None:
                lse_with_sink[row, head] = torch.logaddexp(lse[row, head], sinks[head].double())
            if seen.any():
                weights = torch.exp(scores[row, seen] - lse_with_sink[row, head])
                output[row, head] = weights @ values[seen]
    return Attended(output, lse, lse_with_sink)


def _visible(
    queries: Tensor, keys: Tensor, window: tuple[int, int], attention_chunk: int | None, *, causal: bool
) -> Tensor:
    """``(queries, keys)``: which position sees which."""
    q, k = queries[:, None], keys[None, :]
    visible = torch.ones(len(queries), len(keys), dtype=torch.bool)
    if causal:
        visible &= k <= q
    left, right = window
    if left >= 0:
        visible &= k >= q - left
    if right >= 0:
        visible &= k <= q + right
    if attention_chunk is not None:
        visible &= k // attention_chunk == torch.div(q, attention_chunk, rounding_mode="floor")
    return visible
