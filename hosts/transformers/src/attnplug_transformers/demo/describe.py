"""The demonstration of one architecture as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

if TYPE_CHECKING:
    from attnplug_transformers.demo.models import Outcome


def describe(outcome: Outcome) -> dict[str, Any]:
    """Return an outcome as plain JSON values; `engine`, `replay` and `distance` are None where there is none."""
    return {
        "name": outcome.example.name,
        "about": outcome.example.about,
        "kind": outcome.example.kind,
        "inputs": outcome.inputs,
        "agrees": outcome.agrees,
        "num_tokens": outcome.num_tokens,
        "num_equal": outcome.num_equal,
        "margin": outcome.margin,
        "tokens": list(map(list, outcome.tokens)),
        "expected": list(map(list, outcome.expected)),
        "engine": None if outcome.traffic is None else attrs.asdict(outcome.traffic),
        "replay": _replay(outcome),
        "distance": None if outcome.distance is None else _finite(attrs.asdict(outcome.distance)),
        "layers": {name: selection.to_dict() for name, selection in outcome.decisions.items()},
    }


def _replay(outcome: Outcome) -> dict[str, Any] | None:
    replay = outcome.replay
    if replay is None:
        return None
    return {
        "num_recorded": replay.num_recorded,
        "num_equal": outcome.equal_to(replay.tokens),
        "tokens": list(map(list, replay.tokens)),
    }


def _finite(distance: dict[str, Any]) -> dict[str, Any]:
    """JSON has no word for what is no number: it becomes null."""
    largest = distance["largest"]
    return {**distance, "largest": largest if largest < float("inf") else None}
