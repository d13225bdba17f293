"""An encoder on sentences of different lengths in one padded batch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from attnplug_transformers.decisions import selections
from attnplug_transformers.demo.models.example import PADDING, SPECIAL
from attnplug_transformers.demo.models.outcome import Distance, Outcome
from attnplug_transformers.demo.models.reference import ROUNDING, Computed, clearest, margin
from attnplug_transformers.registration import register

if TYPE_CHECKING:
    from attnplug_transformers.demo.models.example import Example

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
