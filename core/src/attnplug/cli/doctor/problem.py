"""What is broken in an environment, with the fix of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
from attrs import frozen

from attnplug.negotiation.verdict import Fix

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from attnplug.errors import AttnplugError
    from attnplug.negotiation.candidate import Candidate


@frozen
class Problem:
    """
    Something broken.

    Attributes:
        subject: What it is about: the settings, the device, a backend.
        what: What is wrong.
        fix: The fix.
    """

    subject: str
    what: str
    fix: str

    @classmethod
    def of(cls, subject: str, error: AttnplugError) -> Problem:
        """Return an error as a problem."""
        return cls(subject, f"{error.problem}; {error.expected}", error.fix)

    def to_dict(self) -> dict[str, str]:
        """Return plain JSON values."""
        return attrs.asdict(self)


def problems_of(candidates: Iterable[Candidate]) -> Iterator[Problem]:
    """
    Yield what is wrong with what is installed: broken plugins, and that nothing is ready.

    What the settings keep out on purpose is no problem, and what lacks a dependency is none as long as something is
    ready.
    """
    listed = tuple(candidates)
    for candidate in listed:
        codes = {reason.code for reason in candidate.reasons}
        if (candidate.availability == "broken" or "api" in codes) and "blocked" not in codes:
            yield Problem(candidate.id, "; ".join(map(str, candidate.reasons)), candidate.fix)
    if not any(candidate.availability == "ready" for candidate in listed):
        yield Problem("selection", "no backend is ready, so that nothing can be selected", _ready_one(listed))


def _ready_one(candidates: Iterable[Candidate]) -> str:
    """Return how to make a backend ready: the one that is part of the core, where an installation is all it takes."""
    lacking = [c for c in candidates if c.availability == "missing_dependency"]
    first = next(iter(sorted(lacking, key=lambda c: not c.built_in)), None)
    if first is None:
        return "install a backend, or allow one: see `attnplug list`"
    return f"{first.id}: {Fix(install=first.install, action=first.fix)}"
