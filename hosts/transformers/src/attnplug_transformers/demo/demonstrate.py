"""Decoders in the paged engine, beside transformers' `generate` of each prompt alone."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from torch import Tensor

from attnplug_transformers.demo.example import FRAMES, MEL_BINS, PADDING, SPECIAL
from attnplug_transformers.demo.outcome import (
    ROUNDING,
    Computed,
    Distance,
    Outcome,
    Replay,
    Tokens,
    clearest,
    greedy,
    margin,
)
from attnplug_transformers.demo.traffic import arrivals, drive
from attnplug_transformers.engine.engine import Engine
from attnplug_transformers.registration import register, selections

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attnplug import Selection
    from attnplug_transformers.demo.example import Example
    from attnplug_transformers.demo.traffic import Arrival, Traffic


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


_LENGTHS: Final = (96, 23, 67, 5)
_EVERY: Final = 3


def encode(example: Example, text: bytes) -> Outcome:
    """
    Predict masked tokens, and compare them, the logits and the hidden states after every layer.

    Args:
        example: The architecture.
        text: What sentences are cut from.
    """
    ids = _sentences(text)
    model, reference = clearest(example, lambda model: _predict(model, ids))
    model.set_attn_implementation(register())
    found = _predict(model, ids)
    lengths = ", ".join(str(int(count)) for count in (ids != PADDING).sum(1))
    return Outcome(
        example,
        selections(model),
        f"{len(ids)} sentences of {lengths} tokens in one batch, padded to {ids.shape[1]}, every third token masked",
        reference.tokens,
        found.tokens,
        reference.margin,
        distance=Distance.between("hidden states and logits", found.states, reference.states, ROUNDING),
    )


def _sentences(text: bytes) -> Tensor:
    """Return ``(sentences, tokens)`` ids, padded on the right."""
    apart = len(text) // len(_LENGTHS)
    ids = torch.full((len(_LENGTHS), max(_LENGTHS)), PADDING)
    for row, length in enumerate(_LENGTHS):
        piece = text[row * apart :][:length]
        ids[row, : len(piece)] = torch.tensor(list(piece))
        ids[row, 1 : len(piece) : _EVERY] = SPECIAL
    return ids


def _predict(model: Any, ids: Tensor) -> Computed:
    real, masked = ids != PADDING, ids == SPECIAL
    with torch.inference_mode():
        found = model(input_ids=ids, attention_mask=real.long(), output_hidden_states=True)
    best = found.logits.argmax(-1)
    tokens = tuple(tuple(row[where].tolist()) for row, where in zip(best, masked, strict=True))
    return Computed(tokens, margin([found.logits[masked]]), torch.cat([*found.hidden_states, found.logits], -1)[real])


_SOUNDS: Final = 3
_NEW_TOKENS: Final = 32


def transcribe(example: Example) -> Outcome:
    """
    Generate from random sounds in one batch, and compare every token and what the encoder makes of the sounds.

    Args:
        example: The architecture.
    """
    sounds = torch.randn(_SOUNDS, MEL_BINS, FRAMES, generator=torch.Generator().manual_seed(0))
    model, reference = clearest(example, lambda model: _transcribe(model, sounds))
    model.set_attn_implementation(register())
    found = _transcribe(model, sounds)
    return Outcome(
        example,
        selections(model),
        f"{_SOUNDS} random sounds in one batch, of which the encoder makes {FRAMES // 2} tokens each",
        reference.tokens,
        found.tokens,
        reference.margin,
        distance=Distance.between("the encoder's results", found.states, reference.states, ROUNDING),
    )


def _transcribe(model: Any, sounds: Tensor) -> Computed:
    with torch.inference_mode():
        states = model.get_encoder()(sounds).last_hidden_state
    return attrs.evolve(greedy(model, _NEW_TOKENS, input_features=sounds), states=states)


def demonstrate(example: Example, text: bytes) -> Outcome:
    """
    Run an architecture on transformers' eager attention, and through the backends that attnplug chooses.

    Args:
        example: The architecture.
        text: What prompts and sentences are cut from, a token per byte.

    Raises:
        AttnplugError: Nothing can serve one of its layers, or a backend refuses what it is given.
    """
    if example.kind == "encoder":
        return encode(example, text)
    if example.kind == "encoder_decoder":
        return transcribe(example)
    return decode(example, text)
