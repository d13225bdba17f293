"""What transformers alone computes, and how attnplug's computation compares with it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from attrs import field, frozen
from torch import Tensor

from attnplug_transformers.demo.example import make_model

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from attnplug import Selection
    from attnplug_transformers.demo.example import Example
    from attnplug_transformers.demo.traffic import Traffic

Tokens: TypeAlias = tuple[tuple[int, ...], ...]
"""The tokens of each sequence."""

MIN_MARGIN: Final = 1e-3
"""Logits of the two best tokens that are closer than this may be swapped by rounding, which proves nothing."""

ROUNDING: Final = 1e-4
"""How far numbers of unit size may differ: sums of float32 in another order, through a few layers."""

_MAX_DRAWS: Final = 16


@frozen(eq=False)
class Computed:
    """
    What a model computes from its input.

    Attributes:
        tokens: The tokens of each sequence.
        margin: The smallest logit margin, best minus second, over all tokens.
        states: Other numbers to compare; empty for none.
    """

    tokens: Tokens
    margin: float
    states: Tensor = field(factory=lambda: torch.empty(0))


def draw_reference(example: Example, compute: Callable[[Any], Computed]) -> tuple[Any, Computed]:
    """
    Draw weights until the smallest logit margin of the reference is wide, or take the widest of several draws.

    Args:
        example: The architecture.
        compute: Runs a model on its own eager attention.

    Returns:
        The model, and what it computes.
    """
    best: tuple[Any, Computed] | None = None
    for seed in range(_MAX_DRAWS):
        model = make_model(example, seed)
        found = compute(model)
        if best is None or found.margin > best[1].margin:
            best = model, found
        if found.margin >= MIN_MARGIN:
            break
    assert best is not None  # noqa: S101 - there is at least one draw
    return best


def smallest_margin(logits: Iterable[Tensor]) -> float:
    """Return the smallest difference between the best and the second logit, over all rows."""
    best = torch.cat([rows.reshape(-1, rows.shape[-1]) for rows in logits]).topk(2).values
    return float((best[:, 0] - best[:, 1]).min())


def greedy(model: Any, new_tokens: int, **inputs: Tensor) -> Computed:
    """Return what `generate` of transformers decodes greedily, exactly `new_tokens` tokens per sequence."""
    found = model.generate(
        **inputs,
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return Computed(tuple(map(tuple, found.sequences[:, -new_tokens:].tolist())), smallest_margin(found.logits))


@frozen
class Distance:
    """
    How far numbers differ.

    Attributes:
        what: The numbers.
        count: How many they are.
        largest: The largest difference between two of them.
        allowed: What rounding explains.
    """

    what: str
    count: int
    largest: float
    allowed: float

    @classmethod
    def between(cls, what: str, found: Tensor, expected: Tensor, allowed: float) -> Distance:
        """Return the distance of tensors of one shape."""
        return cls(what, expected.numel(), float((found - expected).abs().max()), allowed)

    @property
    def is_small(self) -> bool:
        """Whether rounding explains it; False where a number is NaN."""
        return self.largest <= self.allowed


@frozen
class Replay:
    """
    The same requests, with decode steps replayed.

    Attributes:
        num_captured: Steps that were captured.
        tokens: The tokens of each sequence.
    """

    num_captured: int
    tokens: Tokens


@frozen(eq=False)
class Outcome:
    """
    One architecture, run through transformers alone and through attnplug.

    Attributes:
        example: The architecture.
        decisions: The decision for each attention layer.
        inputs: Its inputs, in words.
        expected: The tokens of each sequence on transformers' eager attention.
        tokens: The tokens of each sequence through attnplug.
        margin: The smallest logit margin of the reference.
        traffic: The engine's counters; None for dense calls.
        replay: The engine's second run; None where a backend's graph level is "never", and for dense calls.
        distance: How far hidden states or logits differ, where they are compared too.
    """

    example: Example
    decisions: Mapping[str, Selection]
    inputs: str
    expected: Tokens
    tokens: Tokens
    margin: float
    traffic: Traffic | None = None
    replay: Replay | None = None
    distance: Distance | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens of the reference."""
        return sum(map(len, self.expected))

    @property
    def num_equal(self) -> int:
        """Tokens that are equal to the reference."""
        return self.count_equal(self.tokens)

    @property
    def agrees(self) -> bool:
        """Whether all tokens are equal, those of a replay too, and the compared numbers are close."""
        runs = (self.tokens,) if self.replay is None else (self.tokens, self.replay.tokens)
        return all(run == self.expected for run in runs) and (self.distance is None or self.distance.is_small)

    def count_equal(self, tokens: Tokens) -> int:
        """Return how many of these tokens are equal to the reference."""
        pairs = zip(self.expected, tokens, strict=True)
        return sum(one == other for row, found in pairs for one, other in zip(row, found, strict=False))
