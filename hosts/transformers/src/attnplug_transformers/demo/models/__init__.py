"""Small models of real architectures with random weights, run through attnplug and through transformers alone."""

from __future__ import annotations

from attnplug_transformers.demo.models.demonstrate import demonstrate
from attnplug_transformers.demo.models.example import EXAMPLES, Example
from attnplug_transformers.demo.models.outcome import Distance, Outcome, Replay
from attnplug_transformers.demo.models.traffic import Arrival, Traffic

__all__ = ["EXAMPLES", "Arrival", "Distance", "Example", "Outcome", "Replay", "Traffic", "demonstrate"]
