"""Decoders in the paged engine, beside transformers' `generate` of each prompt alone."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import torch

from attnplug_transformers.demo.models.outcome import Outcome, Replay, Tokens
from attnplug_transformers.demo.models.reference import Computed, clearest, greedy
from attnplug_transformers.demo.models.traffic import arrivals, drive
from attnplug_transformers.engine.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attnplug import Selection
    from attnplug_transformers.demo.models.example import Example
    from attnplug_transformers.demo.models.traffic import Arrival, Traffic

_LIMITS: Final[dict[str, Any]] = {"max_num_reqs": 4, "max_num_tokens": 32, "num_blocks": 19}
"""Fewer than come, shorter than prompts, and less than all that may run would need."""


def decode(example: Example, text: bytes) -> Outcome:
    """
    Serve requests that arrive at different steps, greedily, and compare every token.

    They are served once more with decode steps that were recorded, on graph slots, where the backends have some: on the
    CPU such a step is computed anew from what the slots hold, which is what a graph of CUDA would read.

    Args:
        example: The architecture.
        text: What prompts are cut from.
    """
    coming = arrivals(text)
    model, reference = clearest(example, lambda model: _one_by_one(model, coming))
    with closing(Engine(model, **_LIMITS)) as engine:
        tokens, traffic = _serve(engine, coming)
        decisions = engine.selections
    lengths = sorted(len(arrival.prompt) for arrival in coming)
    return Outcome(
        example,
        decisions,
        f"{len(coming)} requests with prompts of {lengths[0]} to {lengths[-1]} tokens",
        reference.tokens,
        tokens,
        reference.margin,
        traffic,
        _replay(model, coming, decisions),
    )


def _replay(model: Any, coming: Sequence[Arrival], decisions: Mapping[str, Selection]) -> Replay | None:
    if any(selection.agreement.cudagraph == "never" for selection in decisions.values()):
        return None
    with closing(Engine(model, **_LIMITS, graphs=True)) as engine:
        return Replay(engine.num_graphs, _serve(engine, coming)[0])


def _serve(engine: Engine, coming: Sequence[Arrival]) -> tuple[Tokens, Traffic]:
    requests, traffic = drive(engine, coming)
    return tuple(tuple(request.new_tokens) for request in requests), traffic


def _one_by_one(model: Any, coming: Sequence[Arrival]) -> Computed:
    found = [_generate(model, arrival) for arrival in coming]
    return Computed(tuple(one.tokens[0] for one in found), min(one.margin for one in found))


def _generate(model: Any, arrival: Arrival) -> Computed:
    ids = torch.tensor([list(arrival.prompt)])
    return greedy(model, arrival.new_tokens, input_ids=ids, attention_mask=torch.ones_like(ids))
