"""Samples the next token of each request from its logits."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final

import torch

from attnplug.contract import upload
from attnplug.errors import TensorError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from attnplug_transformers.engine.params import SamplingParams
    from attnplug_transformers.engine.request import Request

NO_TOKEN: Final = -1
"""The token of a row without a finite highest logit: it has NaN or plus infinity, or rules out all tokens."""

_SPARE: Final = 32
"""Tokens beyond top-k that are looked at for some as likely as the last one; more of them cost a full ranking."""

_BLOCK: Final = 128
"""Weights that are summed before they are searched one by one."""

_CPU_LOGITS: Final = 2**18
"""Logits that are sampled from at once on a CPU. Temporary tensors of many MB cost page faults, ten times their use."""

_STEEPEST: Final = 1e30
"""The largest inverse temperature, below the largest float32: with it all but the highest logit have no weight."""


def sample(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """
    Return the next token of each request.

    Rows are independent: equal logits give equal tokens, whatever the other rows are. A draw depends on the request's
    seed and the token's position alone.

    Args:
        logits: ``(len(requests), vocabulary)`` floats; minus infinity rules a token out.
        requests: The requests, in the order of the rows.

    Returns:
        ``(len(requests),)`` int64, on the device of the logits; `NO_TOKEN` for rows of non-finite logits.

    Raises:
        TensorError: There is not one row for each request.
    """
    if logits.dim() != 2 or logits.shape[0] != len(requests):
        raise TensorError(
            f"logits of shape {tuple(logits.shape)} were given for {len(requests)} requests",
            f"logits are ({len(requests)}, vocabulary): one row for each request that samples",
            "select the last row of each request that samples",
        )
    kinds: dict[Callable[[Tensor, Sequence[Request]], Tensor], list[int]] = {}
    for row, request in enumerate(requests):
        kinds.setdefault(_kind(request.sampling), []).append(row)
    if kinds.keys() == {_take_highest}:
        return _take_highest(logits, requests)
    tokens = torch.empty(len(requests), dtype=torch.int64, device=logits.device)
    most = max(1, _CPU_LOGITS // logits.shape[1]) if logits.device.type == "cpu" else len(requests)
    for choose, rows in kinds.items():
        for start in range(0, len(rows), most):
            part = rows[start : start + most]
            everything = len(rows) == len(requests)  # a slice saves a copy
            index = slice(start, start + most) if everything else upload(torch.tensor(part), logits.device)
            tokens[index] = choose(logits[index], [requests[row] for row in part])
    return tokens


def _kind(sampling: SamplingParams) -> Callable[[Tensor, Sequence[Request]], Tensor]:
    if sampling.is_greedy:
        return _take_highest
    return _draw if sampling.top_k is None else _draw_from_top_k


def draw(seed: int, position: int, attempt: int = 0) -> float:
    """Return a pseudorandom number from 0 to below 1, a function of its arguments."""
    text = f"{seed}/{position}/{attempt}" if attempt else f"{seed}/{position}"
    digest = blake2b(text.encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53  # the 53 bits of a double's mantissa


def _draws(requests: Sequence[Request], attempt: int = 0) -> list[float]:
    return [draw(request.seed, len(request.tokens), attempt) for request in requests]


def _take_highest(logits: Tensor, _: Sequence[Request]) -> Tensor:
    tokens = logits.argmax(dim=-1)
    return _where_finite(tokens, logits.gather(-1, tokens.unsqueeze(-1)))


def _where_finite(tokens: Tensor, highest: Tensor) -> Tensor:
    """Return the tokens, or `NO_TOKEN` where the highest logit, ``(rows, 1)``, is not finite; NaN is the highest."""
    return tokens.where(highest.squeeze(-1).isfinite(), NO_TOKEN)


def _draw(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Return the tokens of requests without top-k, and with or without top-p and min-p."""
    logits = logits.float()
    # The highest score becomes 0 before the division, so that no temperature overflows.
    highest = logits.amax(-1, keepdim=True)
    scores = logits - highest
    inverse = [min(1 / request.sampling.temperature, _STEEPEST) for request in requests]
    scores *= _column(inverse, logits).float()
    weights = scores.softmax(-1)
    if any(request.sampling.min_p for request in requests):
        # What min-p keeps is ranked before all else: the mass before such a token is the same without the rest.
        least = _column([request.sampling.min_p or 0.0 for request in requests], logits).float()
        weights = weights.where(weights >= least * weights.amax(-1, keepdim=True), 0.0)
    tokens = _pick(weights, _draws(requests))
    rows = [row for row, request in enumerate(requests) if request.sampling.filters]
    if rows:
        tokens = _draw_from_nucleus(tokens, rows, logits, weights, requests)
    return _where_finite(tokens, highest)


def _draw_from_nucleus(
    tokens: Tensor, rows: Sequence[int], logits: Tensor, weights: Tensor, requests: Sequence[Request]
) -> Tensor:
    """Return the tokens, with others in those of `rows` that top-p excludes."""
    # Nothing is sorted. A token drawn from all is accepted if those ranked before it sum to less than top-p of the
    # mass. Otherwise it and all behind it are excluded, and the next one is drawn from those before it: the rest is the
    # nucleus and some more, in proportion, so that the accepted token has the probability of top-p.
    limits = torch.tensor([requests[row].sampling.top_p or 1.0 for row in rows], device=logits.device)
    attempt = 0
    while rows:
        index = torch.tensor(rows, device=logits.device)
        if attempt:
            tokens[index] = _pick(weights, _draws([requests[row] for row in rows], attempt))
        elif len(rows) < len(requests):
            logits, weights = logits[index], weights[index]
        weights = weights * _ranked_before(logits, tokens[index])
        excluded = (weights.sum(-1) >= limits).nonzero().squeeze(-1)
        rows = [rows[place] for place in excluded.tolist()]
        logits, weights, limits = logits[excluded], weights[excluded], limits[excluded]
        attempt += 1
    return tokens


def _ranked_before(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return ``(rows, vocabulary)`` bool: more likely than the row's token, or equally likely with a lower id."""
    chosen = tokens.unsqueeze(-1)
    values = logits.gather(-1, chosen)
    before = logits == values
    before &= torch.arange(logits.shape[-1], device=logits.device) < chosen
    before |= logits > values
    return before


def _draw_from_top_k(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """Return the tokens of requests with top-k, and with or without top-p and min-p."""
    order, weights = ranked_weights(logits, [request.sampling for request in requests])
    places, _ = _search(weights, _column(_draws(requests), logits) * weights.sum(-1, keepdim=True))
    return _where_finite(order.gather(-1, places).squeeze(-1), logits.gather(-1, order[:, :1]))


def ranked_weights(logits: Tensor, samplings: Sequence[SamplingParams]) -> tuple[Tensor, Tensor]:
    """
    Return the most likely tokens, and their weights after temperature, top-k, top-p and min-p.

    Args:
        logits: ``(rows, vocabulary)`` floats.
        samplings: One for each row, each with top-k.

    Returns:
        ``(rows, some)`` int64 and ``(rows, some)`` float64; a row of weights need not sum to 1.
    """
    size = logits.shape[-1]
    counts = [min(sampling.top_k or size, size) for sampling in samplings]
    values, order = rank(logits.float(), counts)
    top_k = torch.tensor(counts, device=logits.device).unsqueeze(-1)
    scores = (values - values[:, :1]).double() / _column([sampling.temperature for sampling in samplings], logits)
    weights = scores.exp().where(torch.arange(values.shape[-1], device=logits.device) < top_k, 0.0)
    mass = weights.cumsum(-1)
    top_p = _column([sampling.top_p or 1.0 for sampling in samplings], logits)
    # A token stays while those before it sum to less than top_p; without top_p all that top_k kept stays.
    weights = weights.where((mass - weights < top_p * mass[:, -1:]) | (top_p == 1.0), 0.0)
    least = _column([sampling.min_p or 0.0 for sampling in samplings], logits)  # the first of each row has weight 1
    return order, weights.where(weights >= least, 0.0)


def rank(logits: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """
    Return the highest logits of each row and their tokens, highest first, of equal ones the lowest token.

    Args:
        logits: ``(rows, vocabulary)`` float32.
        counts: How many of each row are exact, at least 1; some more are returned.
    """
    width = min(max(counts) + _SPARE, logits.shape[-1])
    top_k = torch.tensor(counts, device=logits.device).unsqueeze(-1)
    values, order = logits.topk(width)
    if width < logits.shape[-1] and bool((values[:, -1:] >= values.gather(-1, top_k - 1)).any()):
        order = _ranking(logits).topk(width).indices  # equals that topk left out may have lower ids
        return logits.gather(-1, order), order
    order, places = order.sort(-1)
    values, places = values.gather(-1, places).sort(dim=-1, descending=True, stable=True)
    return values, order.gather(-1, places)


def _ranking(logits: Tensor) -> Tensor:
    """Return ``(rows, vocabulary)`` int64 that rise with the logits; among equal logits the lowest token is highest."""
    # All are different: the order of equal values in topk differs between devices, and ties are common in bfloat16.
    bits = (logits.float() + 0.0).view(torch.int32)  # adding 0.0 turns -0.0 into 0.0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers, the bits of negative floats fall where the floats rise
    return (rising.long() << 32) + torch.arange(logits.shape[-1] - 1, -1, -1, device=logits.device)


def _pick(weights: Tensor, draws: Sequence[float]) -> Tensor:
    """Return ``(rows,)`` int64: the token at which the cumulative weight passes the row's draw, as a share of all."""
    # Sums of blocks first: only the weights of one block per row are accumulated singly, in float64.
    size = weights.shape[-1]
    length = min(_BLOCK, size)
    whole = size - size % length
    sums = weights[:, :whole].unfold(-1, length, length).sum(-1, dtype=torch.float64)
    if whole < size:
        sums = torch.cat([sums, weights[:, whole:].sum(-1, keepdim=True, dtype=torch.float64)], -1)
    block, left = _search(sums, _column(draws, weights) * sums.sum(-1, keepdim=True))
    columns = block * length + torch.arange(length, device=weights.device)
    inside = weights.gather(-1, columns.clamp(max=size - 1)).double().where(columns < size, 0.0)
    return columns.gather(-1, _search(inside, left)[0]).squeeze(-1)


def _search(weights: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the cumulative weight passes the target, and the rest of the target there; both ``(rows, 1)``."""
    mass = weights.cumsum(-1)
    # Rounding may put a target at the end, behind the last positive weight.
    last = (torch.arange(weights.shape[-1], device=weights.device) * (weights > 0)).amax(-1, keepdim=True)
    found = torch.searchsorted(mass, targets, right=True).minimum(last)
    return found, targets - (mass - weights).gather(-1, found)


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return upload(torch.tensor(values, dtype=torch.float64), like.device).unsqueeze(-1)
