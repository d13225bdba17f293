"""Decoders in the paged engine, beside transformers' `generate` of each prompt alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from attnplug.hosts.transformers.demonstration.outcome import Outcome
from attnplug.hosts.transformers.demonstration.reference import Computed, clearest, greedy
from attnplug.hosts.transformers.demonstration.traffic import arrivals, drive
from attnplug.hosts.transformers.engine.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.hosts.transformers.demonstration.example import Example
    from attnplug.hosts.transformers.demonstration.traffic import Arrival

_LIMITS: Final[dict[str, Any]] = {"max_num_reqs": 4, "max_num_tokens": 32, "num_blocks": 19}
"""Fewer than come, shorter than prompts, and less than all that may run would need."""


def decode(example: Example, text: bytes) -> Outcome:
    """
    Serve requests that arrive at different steps, greedily, and compare every token.

    Args:
        example: The architecture.
        text: What prompts are cut from.
    """
    coming = arrivals(text)
    model, reference = clearest(example, lambda model: _one_by_one(model, coming))
    engine = Engine(model, **_LIMITS)
    try:
        requests, traffic = drive(engine, coming)
        decisions = engine.selections
    finally:
        engine.close()
    lengths = sorted(len(arrival.prompt) for arrival in coming)
    return Outcome(
        example,
        decisions,
        f"{len(coming)} requests with prompts of {lengths[0]} to {lengths[-1]} tokens",
        reference.tokens,
        tuple(tuple(request.new_tokens) for request in requests),
        reference.margin,
        traffic,
    )


def _one_by_one(model: Any, coming: Sequence[Arrival]) -> Computed:
    found = [_generate(model, arrival) for arrival in coming]
    return Computed(tuple(one.tokens[0] for one in found), min(one.margin for one in found))


def _generate(model: Any, arrival: Arrival) -> Computed:
    ids = torch.tensor([list(arrival.prompt)])
    return greedy(model, arrival.new_tokens, input_ids=ids, attention_mask=torch.ones_like(ids))
