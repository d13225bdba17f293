"""Loading every ready candidate for something simple, to hear what only its own code knows."""

from __future__ import annotations

import sys
import time
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any, Literal

import attrs
from attrs import frozen

from attnplug.errors import AttnplugError
from attnplug.request.requirements import Requirements
from attnplug.selection.select import explain

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attnplug.negotiation.candidate import Candidate
    from attnplug.negotiation.verdict import Verdict
    from attnplug.request.device import Device
    from attnplug.selection.selection import Selection

_SIMPLE = {"head_size": 64, "num_q_heads": 8, "num_kv_heads": 8, "dtype": "bfloat16"}


@frozen
class Trial:
    """
    What became of one candidate.

    Attributes:
        id: ``backend/variant``.
        status: ``loaded``, ``failed``, or ``not_asked``: it cannot serve anything simple on this device.
        text: How long it took, what failed, or why it was not asked.
        fix: The fix of a failure.
    """

    id: str
    status: Literal["loaded", "failed", "not_asked"]
    text: str
    fix: str = ""

    def to_dict(self) -> dict[str, str]:
        """Return plain JSON values."""
        return attrs.asdict(self)


def try_all(candidates: Iterable[Candidate], device: Device) -> Iterator[Trial]:
    """Load the candidates that are ready. This imports their plugins, and what those print goes to standard error."""
    for candidate in candidates:
        if candidate.availability == "ready":
            with redirect_stdout(sys.stderr):
                yield _try(candidate, device)


def _try(candidate: Candidate, device: Device) -> Trial:
    try:
        verdict, selection = _ask(candidate, simple_requirements(candidate), device)
    except AttnplugError as error:
        return Trial(candidate.id, "not_asked", f"{error.problem}; {error.expected}")
    if selection is None:
        return Trial(candidate.id, "not_asked", "; ".join(map(str, verdict.reasons)))
    start = time.perf_counter()
    try:
        selection.load()
    except AttnplugError as error:
        return Trial(candidate.id, "failed", f"{error.problem}; {error.expected}", error.fix)
    except ImportError as error:  # what loading itself needs, whatever the plugin
        return Trial(candidate.id, "failed", str(error), "pip install 'attnplug[torch]'")
    return Trial(candidate.id, "loaded", f"in {time.perf_counter() - start:.1f} s")


def simple_requirements(candidate: Candidate) -> Requirements:
    """
    Return something plain that a candidate may serve: its own values nearest to a small model's.

    Raises:
        RequirementsError: Its nearest values contradict each other.
    """
    fields: dict[str, Any] = {}
    for name, value in _SIMPLE.items():
        constraint = candidate.supports(name)
        fields[name] = value if constraint is None else constraint.nearest(value)
    paged = candidate.supports("paged")
    return Requirements(**fields, paged=paged is not None and paged.allows(value=True))


def _ask(candidate: Candidate, asked: Requirements, device: Device) -> tuple[Verdict, Selection | None]:
    """Select the candidate, for what its fix asks of the engine where it wants that."""
    explanation = explain(asked, device, backend=candidate.id)
    verdict = next(verdict for verdict in explanation.verdicts if verdict.id == candidate.id)
    fix = verdict.fix
    if explanation.chosen is None and fix is not None and fix.engine and fix.device is None:
        explanation = explain(fix.apply(asked, device)[0], device, backend=candidate.id)
    return verdict, explanation.chosen
