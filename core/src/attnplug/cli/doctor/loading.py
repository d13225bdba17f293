"""Loading every ready candidate for a simple request: what only a plugin's own code can report."""

from __future__ import annotations

import sys
import time
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any, Final, Literal

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

_SIMPLE: Final = {"head_size": 64, "num_q_heads": 8, "num_kv_heads": 8, "dtype": "bfloat16"}


@frozen
class LoadResult:
    """
    What came of loading one candidate.

    Attributes:
        id: ``backend/variant``.
        status: ``loaded``, ``failed``, or ``not_loaded``: it cannot serve a simple request on this device.
        text: How long it took, what failed, or why it was not loaded.
        fix: The fix of a failure.
    """

    id: str
    status: Literal["loaded", "failed", "not_loaded"]
    text: str
    fix: str = ""

    def to_dict(self) -> dict[str, str]:
        """Return plain JSON values."""
        return attrs.asdict(self)


def load_ready(candidates: Iterable[Candidate], device: Device) -> Iterator[LoadResult]:
    """Load the candidates that are ready. This imports their plugins, and what those print goes to standard error."""
    for candidate in candidates:
        if candidate.availability == "ready":
            with redirect_stdout(sys.stderr):
                yield _load(candidate, device)


def _load(candidate: Candidate, device: Device) -> LoadResult:
    try:
        verdict, selection = _select(candidate, simple_requirements(candidate), device)
    except AttnplugError as error:
        return LoadResult(candidate.id, "not_loaded", in_one_line(error))
    if selection is None:
        return LoadResult(candidate.id, "not_loaded", "; ".join(map(str, verdict.reasons)))
    start = time.perf_counter()
    try:
        selection.load()
    except AttnplugError as error:
        return LoadResult(candidate.id, "failed", in_one_line(error), error.fix)
    except ImportError as error:  # what loading itself needs, whatever the plugin
        return LoadResult(candidate.id, "failed", str(error), "pip install 'attnplug[torch]'")
    return LoadResult(candidate.id, "loaded", f"in {time.perf_counter() - start:.1f} s")


def in_one_line(error: AttnplugError) -> str:
    """Return an error in one line, without its fix."""
    return "; ".join(filter(None, (error.problem, error.expected)))


def simple_requirements(candidate: Candidate) -> Requirements:
    """
    Return a simple request that a candidate may serve: its own values nearest to those of a small model.

    Raises:
        RequirementsError: Its nearest values contradict each other.
    """
    fields: dict[str, Any] = {}
    for name, value in _SIMPLE.items():
        constraint = candidate.supports(name)
        fields[name] = value if constraint is None else constraint.nearest(value)
    paged = candidate.supports("paged")
    return Requirements(**fields, paged=paged is not None and paged.allows(value=True))


def _select(candidate: Candidate, requirements: Requirements, device: Device) -> tuple[Verdict, Selection | None]:
    """Select the candidate; where it requires other engine fields, with those of its fix."""
    explanation = explain(requirements, device, backend=candidate.id)
    verdict = next(verdict for verdict in explanation.verdicts if verdict.id == candidate.id)
    fix = verdict.fix
    if explanation.chosen is None and fix is not None and fix.engine and fix.device is None:
        explanation = explain(fix.apply(requirements, device)[0], device, backend=candidate.id)
    return verdict, explanation.chosen
