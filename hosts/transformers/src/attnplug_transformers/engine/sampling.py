"""Samples the next token of each request from its logits."""

from __future__ import annotations

from hashlib import blake2b
from typing import TYPE_CHECKING, Final, NoReturn

import torch
from attrs import frozen

from attnplug.errors import LimitsError, TensorError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attnplug_transformers.engine.request import Request

NO_TOKEN: Final = -1
"""The token of a row without a finite highest logit: it has NaN or plus infinity, or rules out all tokens."""

_FEW: Final = 1024
"""Tokens that nearly always include all that top-k and top-p keep; ranking a whole vocabulary costs much more."""


def _refuse(name: str, value: object, expected: str, fix: str) -> NoReturn:
    raise LimitsError(f"{name}={value!r} was given", f"{name} is {expected}", fix)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@frozen(kw_only=True)
class Sampling:
    """
    How the tokens of a request are sampled. The filters apply in this order, each to what the one before has kept.

    Raises:
        LimitsError: A value is out of its range.

    Attributes:
        temperature: Logits are divided by it; 0 takes the most likely token, and of equal ones the lowest id.
        top_k: Keep the k most likely tokens, of equal ones the lowest ids; None keeps all.
        top_p: Keep the fewest most likely tokens whose probabilities sum to at least this; None keeps all.
        seed: Equal seeds draw equal tokens from equal logits at equal positions; None is a random seed per request.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None

    def __attrs_post_init__(self) -> None:
        if not _is_number(self.temperature) or not 0 <= self.temperature < float("inf"):
            _refuse("temperature", self.temperature, "a finite number from 0 on", "pass 0 for greedy decoding, or 1.0")
        if self.top_k is not None and (type(self.top_k) is not int or self.top_k < 1):
            _refuse("top_k", self.top_k, "a whole number from 1 on, or None", "leave top_k out to keep all tokens")
        if self.top_p is not None and (not _is_number(self.top_p) or not 0 < self.top_p <= 1):
            _refuse("top_p", self.top_p, "above 0 and at most 1, or None", "leave top_p out to keep all tokens")
        if self.seed is not None and type(self.seed) is not int:
            _refuse("seed", self.seed, "a whole number, or None", "pass an int")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without a random draw."""
        return self.temperature == 0

    @property
    def filters(self) -> bool:
        """Whether top-k or top-p excludes tokens."""
        return self.top_k is not None or (self.top_p is not None and self.top_p < 1)


def sample(logits: Tensor, requests: Sequence[Request]) -> Tensor:
    """
    Return the next token of each request.

    Rows are independent, and a draw depends on the request's seed and the token's position alone: other requests,
    preemption and a repeated step do not change it.

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
    tokens = logits.argmax(dim=-1)  # NaN counts as the highest
    highest = logits.gather(-1, tokens[:, None]).squeeze(-1)
    tokens = tokens.where(highest.isfinite(), NO_TOKEN)
    rows = [row for row, request in enumerate(requests) if not request.sampling.is_greedy]
    if rows:
        drawing = [requests[row] for row in rows]
        index = torch.tensor(rows, device=logits.device)
        probabilities = filtered_probabilities(logits[index], [request.sampling for request in drawing])
        tokens[index] = _pick(probabilities, [draw(request.seed, len(request.tokens)) for request in drawing])
    return tokens


def draw(seed: int, position: int) -> float:
    """Return a pseudorandom number from 0 to below 1, a function of seed and position."""
    digest = blake2b(f"{seed}/{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) * 2.0**-53  # the 53 bits of a double's mantissa


def filtered_probabilities(logits: Tensor, samplings: Sequence[Sampling]) -> Tensor:
    """
    Return the probability of each token after temperature, top-k and top-p.

    Args:
        logits: ``(rows, vocabulary)`` floats.
        samplings: One for each row, none of them greedy.

    Returns:
        ``(rows, vocabulary)`` float64. A filtered row need not sum to 1.
    """
    scores = logits.to(torch.float64, copy=True)
    # The highest score becomes 0 before the division, so that no temperature overflows.
    scores -= scores.amax(-1, keepdim=True)
    scores /= _column([sampling.temperature for sampling in samplings], logits)
    probabilities = scores.softmax(-1)
    rows = [row for row, sampling in enumerate(samplings) if sampling.filters]
    if rows:
        index = torch.tensor(rows, device=logits.device)
        probabilities[index] = _filter(probabilities[index], logits[index], [samplings[row] for row in rows])
    return probabilities


def _filter(probabilities: Tensor, logits: Tensor, samplings: Sequence[Sampling], width: int = _FEW) -> Tensor:
    """Set to zero what top-k and top-p exclude, from the `width` most likely tokens where these are enough."""
    size = logits.shape[-1]
    width = min(width, size)
    top_k = _column([min(sampling.top_k or size, size) for sampling in samplings], logits)
    top_p = _column([sampling.top_p or 1.0 for sampling in samplings], logits)
    order = _ranking(logits).topk(width).indices
    ranked = probabilities.gather(-1, order).where(torch.arange(width, device=logits.device) < top_k, 0.0)
    mass = ranked.cumsum(-1)
    enough = (top_k <= width) | ((top_k == size) & (mass[:, -1:] >= top_p))
    if width < size and not bool(enough.all()):
        return _filter(probabilities, logits, samplings, size)
    total = mass[:, -1:].where(top_k < size, 1.0)
    # A token stays while those before it sum to less than top_p; without top_p all that top_k kept stays.
    ranked = ranked.where((mass - ranked < top_p * total) | (top_p == 1.0), 0.0)
    return torch.zeros_like(probabilities).scatter_(-1, order, ranked)


def _ranking(logits: Tensor) -> Tensor:
    """
    Return ``(rows, vocabulary)`` int64 that rise with the logits, and of equal ones are highest for the lowest token.

    They are all different: the order of equal values in topk differs between devices, and ties are common in bfloat16.
    """
    bits = (logits.float() + 0.0).view(torch.int32)  # adding 0.0 turns -0.0 into 0.0
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # as integers, the bits of negative floats fall where the floats rise
    return (rising.long() << 32) + torch.arange(logits.shape[-1] - 1, -1, -1, device=logits.device)


def _pick(probabilities: Tensor, draws: Sequence[float]) -> Tensor:
    """Return ``(rows,)`` int64: the token at which the cumulative probability passes each row's draw."""
    mass = probabilities.cumsum(-1)
    targets = _column(draws, probabilities) * mass[:, -1:]
    picked = torch.searchsorted(mass, targets, right=True).squeeze(-1)
    return picked.where(mass[:, -1] > 0, NO_TOKEN)  # NaN is not above 0 either


def _column(values: Sequence[float], like: Tensor) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device=like.device).unsqueeze(-1)
