"""
Reference attention in float64: one request and one head at a time, short enough to be verified by reading.

It computes the spread of each result besides, which says how much rounding may change it.

It shares no code with any backend, and is slow. Block-sparse patterns are those of Phi-3-small: local blocks, and
vertical blocks at a stride that shifts from head to head.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import frozen
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@frozen(eq=False)
class OracleResult:
    """
    The result of reference attention.

    Attributes:
        output: ``(queries, num_q_heads, head_size_v)`` float64; 0 for a row that attends to nothing.
        lse: ``(queries, num_q_heads)`` float64, natural log-sum-exp of the scores without the sink; -inf for such a
            row.
        lse_with_sink: The same with the sink; equal to `lse` where there is none.
        spread: As `output`: ``sqrt(sum((weight * value) ** 2))`` over the keys. It is the standard deviation of the
            output, in units of that of the weights' relative errors, where these are independent with mean 0 (the model
            of Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019).
        peak: As `output`: the largest weight times ``sqrt(sum(value ** 2))``, the same for errors that are relative to
            the largest weight, as those of integer weights are.
    """

    output: Tensor
    lse: Tensor
    lse_with_sink: Tensor
    spread: Tensor
    peak: Tensor


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
    attn_bias: Tensor | None = None,
    spans: Tensor | None = None,
    block_sparse: Mapping[str, Any] | None = None,
) -> OracleResult:
    """
    Return the attention of one request.

    The queries are the last tokens of the sequence: the position of query ``i`` is ``len(key) - len(query) + i``. It is
    negative for the first ones where there are more queries than keys.

    Scores are scaled, capped, biased by ALiBi and by the additive mask, masked, and normalized together with the sink,
    in this order.

    Args:
        query: ``(queries, num_q_heads, head_size)``.
        key: ``(keys, num_kv_heads, head_size)``.
        value: ``(keys, num_kv_heads, head_size_v)``.
        scale: Factor of the scores.
        causal: Whether a token attends to no later position.
        window: Positions attended to on the left and on the right of a token's own, -1 for all.
        attention_chunk: A token attends to its own chunk of this many positions only.
        logits_soft_cap: Scores become ``cap * tanh(score / cap)``.
        alibi: ``"linear"``: scores lose ``slope * distance``; ``"sqrt"``: they lose ``slope * sqrt(distance)``.
        alibi_slopes: ``(num_q_heads,)``.
        sinks: ``(num_q_heads,)`` logits that are part of the softmax and have no value.
        custom_mask: ``(queries, keys)`` bool: False hides a key, whatever else shows it.
        attn_bias: ``(1 or num_q_heads, queries, keys)``, added to the scores; finite.
        spans: ``(queries, 2)`` the first and the last position of the span that a query is in: it attends to all of
            it, unless `custom_mask` hides keys. A span without the query's position does not count.
        block_sparse: The parameters of a pattern, see `REQUIRED`. All heads of the model are here.
    """
    num_queries, num_q_heads, _ = query.shape
    group = num_q_heads // key.shape[1]
    queries = torch.arange(num_queries) + key.shape[0] - num_queries
    positions = torch.arange(key.shape[0])
    visible = _visible(queries, positions, window, attention_chunk, causal=causal)
    if spans is not None:
        low, high = spans[:, :1], spans[:, 1:]
        is_inside = (low <= queries[:, None]) & (queries[:, None] <= high)
        visible |= is_inside & (low <= positions[None, :]) & (positions[None, :] <= high)
    visible = visible if custom_mask is None else visible & custom_mask
    seen = visible.any(0)  # no query attends to the other keys: windows and chunks hide most of a long sequence
    visible, positions, key, value = visible[:, seen], positions[seen], key[seen], value[seen]
    attn_bias = None if attn_bias is None else attn_bias[:, :, seen]
    distance = (queries[:, None] - positions[None, :]).abs().double()

    output = torch.zeros(num_queries, num_q_heads, value.shape[2], dtype=torch.float64)
    spread, peak = output.clone(), output.clone()
    lse = torch.full((num_queries, num_q_heads), -torch.inf, dtype=torch.float64)
    lse_with_sink = lse.clone()
    if not len(positions):  # nothing to attend to but a sink
        lse_with_sink = lse if sinks is None else sinks.double().expand_as(lse).clone()
        return OracleResult(output, lse, lse_with_sink, spread, peak)
    for head in range(num_q_heads):
        if head % group == 0:  # the first query head of a KV head
            keys, values = key[:, head // group].double(), value[:, head // group].double()
            squares = values.square()
            sizes = (visible.double() @ squares).sqrt()
        scores = scale * (query[:, head].double() @ keys.T)
        if logits_soft_cap is not None:
            scores = logits_soft_cap * torch.tanh(scores / logits_soft_cap)
        if alibi is not None and alibi_slopes is not None:
            slope = alibi_slopes[head].double()
            scores = scores - slope * (distance if alibi == "linear" else distance.sqrt())
        if attn_bias is not None:
            scores = scores + attn_bias[head % attn_bias.shape[0]].double()
        mine = visible
        if block_sparse is not None:
            heads = {"num_q_heads": num_q_heads, "num_kv_heads": key.shape[1]}
            mine = visible & seen_by(head, block_sparse, **heads, queries=queries, keys=positions)
            sizes = (mine.double() @ squares).sqrt()
        lse[:, head] = torch.logsumexp(scores.masked_fill(~mine, -torch.inf), 1)
        lse_with_sink[:, head] = lse[:, head]
        if sinks is not None:
            lse_with_sink[:, head] = torch.logaddexp(lse[:, head], sinks[head].double())
        weights = torch.exp(scores - lse_with_sink[:, head, None]).masked_fill(~mine, 0.0)
        output[:, head] = weights @ values
        spread[:, head] = (weights.square() @ squares).sqrt()
        peak[:, head] = weights.amax(1, keepdim=True) * sizes
    return OracleResult(output, lse, lse_with_sink, spread, peak)


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


REQUIRED: Final = ("max_seqlen", "block_size", "local_blocks", "vert_stride")
"""
The parameters of a block-sparse pattern: tokens of the longest sequence, tokens per block, local blocks, and the stride
of vertical blocks, of which one in so many is visible.
"""

OPTIONAL: Final = ("homo_head", "homo_head_group")
"""Whether all heads share a pattern; whether the query heads of a KV head do. The first overrides the second."""

FULL_PATTERN: Final[Mapping[str, Any]] = MappingProxyType(
    {"max_seqlen": 4096, "block_size": 16, "local_blocks": 0, "vert_stride": 1}
)
"""A pattern that hides nothing: every block is vertical."""


def has_known_parameters(pattern: Mapping[str, Any]) -> bool:
    """Whether the parameters of a pattern are those of the oracle."""
    return set(REQUIRED) <= set(pattern) <= {*REQUIRED, *OPTIONAL}


def seen_by(
    head: int, pattern: Mapping[str, Any], *, num_q_heads: int, num_kv_heads: int, queries: Tensor, keys: Tensor
) -> Tensor:
    """
    Return ``(queries, keys)`` bool: what a pattern lets a head see. Causality is applied besides.

    Args:
        head: A query head of the model, all tensor-parallel ranks counted.
        pattern: The parameters.
        num_q_heads: Query heads of the model.
        num_kv_heads: KV heads of the model.
        queries: ``(queries,)`` positions; a negative one attends to nothing.
        keys: ``(keys,)`` positions.
    """
    size, stride = pattern["block_size"], pattern["vert_stride"]
    if pattern.get("homo_head"):
        shift = 0
    elif pattern.get("homo_head_group"):
        shift = head // (num_q_heads // num_kv_heads) * max(1, stride // num_kv_heads)
    else:
        shift = head * max(1, stride // num_q_heads)
    mine = torch.div(queries, size, rounding_mode="floor")[:, None]
    other = (keys // size)[None, :]
    is_local = mine - other < pattern["local_blocks"]
    is_vertical = (other + shift + 1) % stride == 0
    seen: Tensor = (other <= mine) & (is_local | is_vertical)
    return seen
