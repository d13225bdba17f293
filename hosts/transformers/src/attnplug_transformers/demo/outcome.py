"""How the two computations compare."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from attrs import field, frozen
from torch import Tensor

from attnplug_transformers.demo.example import draw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor

    from attnplug import Selection
    from attnplug_transformers.demo.example import Example
    from attnplug_transformers.demo.traffic import Traffic


Tokens: TypeAlias = tuple[tuple[int, ...], ...]
"""The tokens of each sequence."""


@frozen
class Distance:
    """
    How far numbers are apart.

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
        """Whether rounding explains it; not so where something is no number."""
        return self.largest <= self.allowed


@frozen
class Replay:
    """
    The same requests once more, with decode steps replayed.

    Attributes:
        num_captured: Steps that were recorded.
        tokens: The tokens of each sequence.
    """

    num_captured: int
    tokens: Tokens


@frozen(eq=False)
class Outcome:
    """
    One architecture, run both ways.

    Attributes:
        example: The architecture.
        decisions: The decision for each attention layer.
        inputs: What it was run on, in words.
        expected: The tokens of each sequence on transformers' eager attention.
        tokens: The tokens of each sequence through attnplug.
        margin: Least distance between the best and the second logit, over all tokens of the reference.
        traffic: What the engine did; None for dense calls.
        replay: The engine's second run; None where a backend's graph level is "never", and for dense calls.
        distance: How far hidden states or logits are apart, where they are compared too.
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
        """Tokens that are the same."""
        return self.equal_to(self.tokens)

    @property
    def agrees(self) -> bool:
        """Whether all are, those of the second run too, and the numbers that are compared."""
        runs = (self.tokens,) if self.replay is None else (self.tokens, self.replay.tokens)
        return all(run == self.expected for run in runs) and (self.distance is None or self.distance.is_small)

    def equal_to(self, tokens: Tokens) -> int:
        """Return how many of these tokens are those of the reference."""
        pairs = zip(self.expected, tokens, strict=True)
        return sum(one == other for row, found in pairs for one, other in zip(row, found, strict=False))


LEAST_MARGIN: Final = 1e-3
"""Where the two best tokens are closer than this, rounding may decide, and nothing is learned from who wins."""

ROUNDING: Final = 1e-4
"""How far numbers of unit size may be apart: sums of float32 in another order, through a few layers."""

_DRAWS: Final = 16


@frozen(eq=False)
class Computed:
    """
    What a model makes of its input.

    Attributes:
        tokens: The tokens of each sequence.
        margin: Least distance between the best and the second logit, over all tokens.
        states: What else is compared, number by number; empty for nothing.
    """

    tokens: Tokens
    margin: float
    states: Tensor = field(factory=lambda: torch.empty(0))


def clearest(example: Example, compute: Callable[[Any], Computed]) -> tuple[Any, Computed]:
    """
    Draw weights until every choice of the reference is clear, or take the clearest of some draws.

    Args:
        example: The architecture.
        compute: Runs a model on its own eager attention.

    Returns:
        The model, and what it computes.
    """
    best: tuple[Any, Computed] | None = None
    for seed in range(_DRAWS):
        model = draw(example, seed)
        found = compute(model)
        if best is None or found.margin > best[1].margin:
            best = model, found
        if found.margin >= LEAST_MARGIN:
            break
    assert best is not None  # noqa: S101 - there is at least one draw
    return best


def margin(logits: Iterable[Tensor]) -> float:
    """Return the least distance between the best and the second logit, over all rows."""
    best = torch.cat([rows.reshape(-1, rows.shape[-1]) for rows in logits]).topk(2).values
    return float((best[:, 0] - best[:, 1]).min())


def greedy(model: Any, new_tokens: int, **inputs: Tensor) -> Computed:
    """Return what `generate` of transformers chooses, always the best token and exactly as many as asked for."""
    found = model.generate(
        **inputs,
        do_sample=False,
        min_new_tokens=new_tokens,
        max_new_tokens=new_tokens,
        output_logits=True,
        return_dict_in_generate=True,
    )
    return Computed(tuple(map(tuple, found.sequences[:, -new_tokens:].tolist())), margin(found.logits))
