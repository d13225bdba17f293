"""Small models of real architectures with random weights, run through attnplug and through transformers alone."""

from __future__ import annotations

from attnplug.hosts.transformers.demonstration.demonstrate import demonstrate
from attnplug.hosts.transformers.demonstration.example import EXAMPLES, Example
from attnplug.hosts.transformers.demonstration.outcome import Distance, Outcome, Replay
from attnplug.hosts.transformers.demonstration.traffic import Arrival, Traffic

__all__ = ["EXAMPLES", "Arrival", "Distance", "Example", "Outcome", "Replay", "Traffic", "demonstrate"]
