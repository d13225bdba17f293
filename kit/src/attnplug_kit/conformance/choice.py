"""Which subjects of a name a run tests, and which it leaves out: those that need an open feature nobody asked for."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from typing import TYPE_CHECKING

from attrs import evolve, frozen

from attnplug.errors import RequirementsError, UnknownBackendError
from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.subject import Subject, find_subjects, installed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug.request import Device


@frozen
class LeftOut:
    """
    A subject that serves no request as the run asks.

    Attributes:
        subject: The subject.
        because: Why its manifest refuses the plainest request.
        needed: The open features, beside those of the subject, with which it serves one; empty where none helps.
    """

    subject: Subject
    because: str
    needed: tuple[str, ...]

    @property
    def option(self) -> str:
        """What the command line lacks."""
        return " ".join(f"--attn-feature={name}" for name in self.needed)

    def __str__(self) -> str:
        return f"{self.subject} is not tested: {self.because}; --attn-backend={self.subject} {self.option} tests it"


@frozen
class Choice:
    """
    What a run tests.

    Attributes:
        subjects: Those that serve requests as the run asks; at least one.
        left_out: The others that the name means, each of which would with more open features.
    """

    subjects: tuple[Subject, ...]
    left_out: tuple[LeftOut, ...]


def choose(name: str | None, device: Device | str | None = None, features: Sequence[str] = ()) -> Choice:
    """
    Return what a run tests. Arguments and errors as of `find_subjects`.

    Raises:
        UnknownBackendError: No backend is named.
        RequirementsError: No subject serves a request that asks for these features and no others; or one serves none
            whatever the features, which is a mistake in its manifest.
    """
    if name is None:
        raise UnknownBackendError(
            "the conformance kit was given no backend",
            f"it tests an installed one: {', '.join(installed())}",
            "pass --attn-backend=NAME[/variant], or name it in the class: backend = 'mine/plain'",
        )
    found = find_subjects(name, device, features)
    left_out = tuple(left for left in map(_left_out, found) if left is not None)
    wrong = tuple(left for left in left_out if not left.needed) or (left_out if len(left_out) == len(found) else ())
    if wrong:
        asked = f"features={found[0].features}" if found[0].features else "no open feature"
        raise RequirementsError(
            f"the backend {name!r} was to be tested with requests that ask for {asked}",
            "; ".join(f"{left.subject} serves no such request: {left.because}" for left in wrong),
            "; or ".join(_way_out(left, alone=len(wrong) == 1) for left in wrong),
        )
    unserved = {left.subject for left in left_out}
    return Choice(tuple(subject for subject in found if subject not in unserved), left_out)


def _way_out(left: LeftOut, *, alone: bool) -> str:
    if not left.needed:
        return f"change the rules or what is declared in the attnplug.toml of {left.subject}"
    option = left.option if alone else f"--attn-backend={left.subject} {left.option}"
    return f"add {option}, or features = {(*left.subject.features, *left.needed)} to the class of the test"


@cache
def _left_out(subject: Subject) -> LeftOut | None:
    """Return why a subject has to be left out; None where it serves some request."""
    menu = field_values_of(subject)
    if menu.ask() is not None:
        return None
    others = [name for name in subject.open_features if name not in subject.features]
    sets = (names for size in range(1, len(others) + 1) for names in combinations(others, size))
    needed = next((names for names in sets if _serves_with(subject, names)), ())
    return LeftOut(subject, menu.refusal(), needed)


def _serves_with(subject: Subject, names: tuple[str, ...]) -> bool:
    asking = evolve(subject, features=tuple(sorted((*subject.features, *names))))
    return field_values_of(asking).ask() is not None
