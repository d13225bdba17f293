"""What transformers alone computes, with nothing left to rounding."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import field, frozen
from torch import Tensor

from attnplug_transformers.demo.models.weights import draw

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from attnplug_transformers.demo.models.example import Example
    from attnplug_transformers.demo.models.outcome import Tokens

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
