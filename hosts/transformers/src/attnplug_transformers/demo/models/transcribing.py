"""An encoder-decoder on sound: bidirectional, causal and cross attention in one model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import attrs
import torch
from torch import Tensor

from attnplug_transformers.decisions import selections
from attnplug_transformers.demo.models.example import FRAMES, MEL_BINS
from attnplug_transformers.demo.models.outcome import Distance, Outcome
from attnplug_transformers.demo.models.reference import ROUNDING, Computed, clearest, greedy
from attnplug_transformers.registration import register

if TYPE_CHECKING:
    from attnplug_transformers.demo.models.example import Example

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
