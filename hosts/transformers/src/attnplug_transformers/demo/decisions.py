"""One request, decided for this CPU and for GPUs of three generations, between all installed plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from attnplug import explain
from attnplug.request import Device, Requirements

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug import Explanation, Verdict

FIELDS: Final[dict[str, Any]] = {
    "head_size": 64,
    "num_q_heads": 64,
    "num_kv_heads": 8,
    "dtype": "bfloat16",
    "sliding_window": 128,
    "sinks": True,
}
"""The request: a windowed layer of gpt-oss-120b. Few backends support attention sinks, and each on its own devices."""

GPUS: Final = {"8.0": "A100", "9.0": "H100", "10.0": "B200"}
"""Compute capability -> a device that has it."""


@frozen(eq=False)
class Decision:
    """
    The decision for one device.

    Attributes:
        label: The device, in words.
        explanation: The decision, with the verdict of every candidate.
    """

    label: str
    explanation: Explanation

    @property
    def runner_up(self) -> Verdict | None:
        """The best-ranked other candidate that can serve, as ``attnplug explain`` names it."""
        return self.explanation.runner_up

    @property
    def least_refused(self) -> Verdict | None:
        """Of the installed candidates that cannot serve, the one with the fewest reasons."""
        others = (v for v in self.explanation.verdicts if v.status not in ("chosen", "eligible", "absent"))
        return min(others, key=lambda verdict: len(verdict.reasons), default=None)


def decide() -> tuple[Decision, ...]:
    """Return the decision for each device. Nothing of a plugin is imported."""
    requirements = Requirements(**FIELDS)
    gpus = (
        Decision(f"{device} ({name})", explain(requirements, device, assume_installed=True))
        for device, name in ((Device.cuda(capability), name) for capability, name in GPUS.items())
    )
    return Decision("cpu (this one)", explain(requirements, Device.cpu())), *gpus


def to_dict(decisions: Sequence[Decision]) -> list[dict[str, Any]]:
    """Return decisions as plain JSON values."""
    return [{"label": decision.label, **decision.explanation.to_dict()} for decision in decisions]
