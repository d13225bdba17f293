"""Runs an architecture on transformers' eager attention, and through the backends that attnplug chooses."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from torch import Tensor

from attnplug_transformers import register
from attnplug_transformers.binding import selections
from attnplug_transformers.demo.example import FRAMES, MEL_BINS, PADDING, SPECIAL
from attnplug_transformers.demo.outcome import (
    ROUNDING,
    Computed,
    Distance,
    Outcome,
    Replay,
    draw_reference,
    greedy,
    smallest_margin,
)
from attnplug_transformers.demo.traffic import arrivals, drive
from attnplug_transformers.engine import Engine

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from attnplug import Selection
    from attnplug_transformers.demo.example import Example
    from attnplug_transformers.demo.outcome import Tokens
    from attnplug_transformers.demo.traffic import Arrival, Traffic

_LIMITS: Final[dict[str, Any]] = {"max_num_reqs": 4, "max_num_tokens": 32, "num_blocks": 19}
"""Fewer requests than come, fewer tokens than a prompt has, and fewer blocks than the running requests need."""

_SENTENCE_LENGTHS: Final = (96, 23, 67, 5)
_MASK_EVERY: Final = 3
_RECORDINGS: Final = 3
_TRANSCRIPT_TOKENS: Final = 32


def compare(example: Example, text: bytes) -> Outcome:
    """
    Run an architecture both ways.

    Args:
        example: The architecture.
        text: What prompts and sentences are cut from, a token per byte.

    Raises:
        AttnplugError: No backend supports one of its layers, or a backend refuses a call.
    """
    if example.kind == "encoder":
        return encode(example, text)
    if example.kind == "encoder_decoder":
        return transcribe(example)
    return decode(example, text)


def decode(example: Example, text: bytes) -> Outcome:
    """
    Serve requests that arrive at different steps in the paged engine, greedily, and compare each token.

    Where the backends support graphs, the requests are served once more with captured decode steps. On the CPU such a
    step is computed again from its graph buffers, which are what a CUDA graph would read.
    """
    coming = arrivals(text)
    model, reference = draw_reference(example, lambda model: _one_by_one(model, coming))
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
    found = []
    for arrival in coming:
        ids = torch.tensor([list(arrival.prompt)])
        found.append(greedy(model, arrival.new_tokens, input_ids=ids, attention_mask=torch.ones_like(ids)))
    return Computed(tuple(one.tokens[0] for one in found), min(one.margin for one in found))


def encode(example: Example, text: bytes) -> Outcome:
    """Predict masked tokens of padded sentences, and compare them, the logits and the hidden states of every layer."""
    ids = _sentences(text)
    model, reference = draw_reference(example, lambda model: _predict(model, ids))
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
    distance = len(text) // len(_SENTENCE_LENGTHS)
    ids = torch.full((len(_SENTENCE_LENGTHS), max(_SENTENCE_LENGTHS)), PADDING)
    for row, length in enumerate(_SENTENCE_LENGTHS):
        sentence = text[row * distance :][:length]
        ids[row, : len(sentence)] = torch.tensor(list(sentence))
        ids[row, 1 : len(sentence) : _MASK_EVERY] = SPECIAL
    return ids


def _predict(model: Any, ids: Tensor) -> Computed:
    real, masked = ids != PADDING, ids == SPECIAL
    with torch.inference_mode():
        found = model(input_ids=ids, attention_mask=real.long(), output_hidden_states=True)
    best = found.logits.argmax(-1)
    tokens = tuple(tuple(row[where].tolist()) for row, where in zip(best, masked, strict=True))
    states = torch.cat([*found.hidden_states, found.logits], -1)[real]
    return Computed(tokens, smallest_margin([found.logits[masked]]), states)


def transcribe(example: Example) -> Outcome:
    """Transcribe random audio with an encoder-decoder, and compare each token and the output of the encoder."""
    audio = torch.randn(_RECORDINGS, MEL_BINS, FRAMES, generator=torch.Generator().manual_seed(0))
    model, reference = draw_reference(example, lambda model: _transcribe(model, audio))
    model.set_attn_implementation(register())
    found = _transcribe(model, audio)
    return Outcome(
        example,
        selections(model),
        f"{_RECORDINGS} recordings of random audio in one batch, {FRAMES // 2} tokens each after the encoder",
        reference.tokens,
        found.tokens,
        reference.margin,
        distance=Distance.between("the encoder's outputs", found.states, reference.states, ROUNDING),
    )


def _transcribe(model: Any, audio: Tensor) -> Computed:
    with torch.inference_mode():
        states = model.get_encoder()(audio).last_hidden_state
    return attrs.evolve(greedy(model, _TRANSCRIPT_TOKENS, input_features=audio), states=states)
