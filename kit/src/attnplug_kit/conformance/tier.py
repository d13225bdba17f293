"""The base of every class of the kit: which subjects it tests, and the points that a test runs over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import combinations
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pytest
from attrs import evolve, frozen

from attnplug import AttnplugError
from attnplug.errors import RequirementsError, UnknownBackendError
from attnplug_kit.conformance.drawing import Draw
from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.report import Record
from attnplug_kit.conformance.subject import Subject, find_subjects, installed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnplug.request import Device

_F = TypeVar("_F", bound=Callable[..., Any])
Points = Callable[[Subject], Mapping[str, Any]]


@frozen
class LeftOut:
    """
    A subject that is not tested: its rules refuse every request with the open features of the run.

    Attributes:
        subject: The subject.
        because: Why its manifest refuses the plainest request.
        needed: The open features, besides those of the subject, with which it serves one; empty where none helps.
    """

    subject: Subject
    because: str
    needed: tuple[str, ...]

    @property
    def option(self) -> str:
        """The missing options of the command line."""
        return " ".join(f"--attn-feature={name}" for name in self.needed)

    def __str__(self) -> str:
        return f"{self.subject} is not tested: {self.because}; --attn-backend={self.subject} {self.option} tests it"


@frozen
class RunPlan:
    """
    What a run tests.

    Attributes:
        subjects: Those that serve requests with the open features of the run; at least one.
        left_out: The other variants of the backend, each of which would with more open features.
    """

    subjects: tuple[Subject, ...]
    left_out: tuple[LeftOut, ...]


def plan_run(name: str | None, device: Device | str | None = None, features: Sequence[str] = ()) -> RunPlan:
    """
    Return what a run tests. Arguments and errors as of `find_subjects`.

    Raises:
        UnknownBackendError: No backend is named.
        RequirementsError: No subject serves a request with exactly these features; or one serves none whatever the
            features, which is a mistake in its manifest.
    """
    if name is None:
        raise UnknownBackendError(
            "the conformance kit needs the name of a backend",
            f"it tests an installed one: {', '.join(installed())}",
            "pass --attn-backend=NAME[/variant], or name it in the class: backend = 'mine/plain'",
        )
    found = find_subjects(name, device, features)
    left_out = tuple(left for left in map(_left_out, found) if left is not None)
    wrong = tuple(left for left in left_out if not left.needed) or (left_out if len(left_out) == len(found) else ())
    if wrong:
        requested = f"features={found[0].features}" if found[0].features else "no open feature"
        raise RequirementsError(
            f"the backend {name!r} cannot be tested by requests with {requested}",
            "each variant serves some; "
            + "; ".join(f"{left.subject} refuses even the plainest: {left.because}" for left in wrong),
            "; or ".join(_fix_of(left, alone=len(wrong) == 1) for left in wrong),
        )
    unserved = {left.subject for left in left_out}
    return RunPlan(tuple(subject for subject in found if subject not in unserved), left_out)


def _fix_of(left: LeftOut, *, alone: bool) -> str:
    if not left.needed:
        return f"change the rules or what is declared in the attnplug.toml of {left.subject}"
    option = left.option if alone else f"--attn-backend={left.subject} {left.option}"
    return f"add {option}, or features = {(*left.subject.features, *left.needed)} to the class of the test"


@cache
def _left_out(subject: Subject) -> LeftOut | None:
    """Return why a subject has to be left out; None where it serves some request."""
    declared = field_values_of(subject)
    if declared.spec() is not None:
        return None
    others = [name for name in subject.open_features if name not in subject.features]
    sets = (names for size in range(1, len(others) + 1) for names in combinations(others, size))
    needed = next((names for names in sets if _serves_with(subject, names)), ())
    return LeftOut(subject, "; ".join(map(str, declared.refusal())), needed)


def _serves_with(subject: Subject, names: tuple[str, ...]) -> bool:
    other = evolve(subject, features=tuple(sorted((*subject.features, *names))))
    return field_values_of(other).spec() is not None


def over(points: Points) -> Callable[[_F], _F]:
    """
    Run a test once for each point of its subject, as its argument `point`.

    Args:
        points: Returns the points, by the name that is the test's id. Without any the test is skipped.
    """

    def mark(test: _F) -> _F:
        test.points = points  # type: ignore[attr-defined]
        return test

    return mark


def needs(**fields: Any) -> Callable[[_F], _F]:
    """Skip a test if no request with these fields is served."""

    def mark(test: _F) -> _F:
        test.needs = fields  # type: ignore[attr-defined]
        return test

    return mark


class Tier:
    """
    A part of the kit. Inherit it, or `Conformance` for all of it, and name the backend.

    Attributes:
        backend: ``"name"`` or ``"name/variant"``; None for that of ``--attn-backend``.
        device: Where it is tested, as `Device.parse` reads it; None for that of ``--attn-device``, or this process's.
        features: The open features of every request; None for those of ``--attn-feature``, or none.
        known_failures: Tests that are expected to fail, with the reason: the name of a test, or its name with its point
            in brackets. If one of them passes, the run fails: the entry is out of date.
    """

    backend: ClassVar[str | None] = None
    device: ClassVar[str | None] = None
    features: ClassVar[Sequence[str] | None] = None
    known_failures: ClassVar[Mapping[str, str]] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Make one test for each subject and point."""
        if "subject" not in metafunc.fixturenames:
            return
        try:
            plan = self._plan(metafunc.config)
        except AttnplugError as error:
            raise pytest.Collector.CollectError(str(error)) from error  # which pytest shows without a traceback
        with_points = "point" in metafunc.fixturenames
        names = ("subject", "point") if with_points else ("subject",)
        parameters = [p for subject in plan.subjects for p in self._parameters(metafunc.function, subject)]
        parameters += [_skipped(left, len(names)) for left in plan.left_out]
        metafunc.parametrize(names, parameters)

    def _plan(self, config: pytest.Config) -> RunPlan:
        """Return what the class names, or else the command line."""
        name = self.backend or config.getoption("--attn-backend", default=None)
        given = config.getoption("--attn-feature", default=None) or ()
        device = self.device or config.getoption("--attn-device", default=None)
        return plan_run(name, device, given if self.features is None else self.features)

    @pytest.fixture
    def record(self, request: pytest.FixtureRequest) -> Record:
        """Return what records the findings of the test."""
        return Record(request.node)

    @pytest.fixture
    def draw(self, request: pytest.FixtureRequest) -> Draw:
        """Return what draws the fields that the test does not fix; a failure shows the request."""
        subject: Subject = request.node.callspec.params["subject"]
        name = request.node.name.replace(subject.id, "", 1)
        return Draw(subject, name, lambda text: request.node.add_report_section("call", "request", f"{text}\n"))

    def _parameters(self, test: Callable[..., Any], subject: Subject) -> Iterator[Any]:
        points: Points | None = getattr(test, "points", None)
        found = {"": None} if points is None else dict(points(subject))
        missing = _missing(test, subject) or ("" if found else "it declares nothing of this kind")
        for name, point in (found or {"": None}).items():
            marks = [pytest.mark.skip(reason=f"{subject}: {missing}")] if missing else self._marks(test.__name__, name)
            values = (subject,) if points is None else (subject, point)
            yield pytest.param(*values, id="-".join(filter(None, (subject.id, name))), marks=marks)

    def _marks(self, test: str, point: str) -> list[pytest.MarkDecorator]:
        reasons = [self.known_failures[key] for key in (test, f"{test}[{point}]") if key in self.known_failures]
        return [pytest.mark.xfail(reason=reason, strict=True) for reason in reasons[:1]]


def _skipped(left: LeftOut, count: int) -> Any:
    return pytest.param(*[None] * count, id=left.subject.id, marks=pytest.mark.skip(str(left)))


def _missing(test: Callable[..., Any], subject: Subject) -> str:
    fields = getattr(test, "needs", None)
    if fields is None or field_values_of(subject).spec(**fields) is not None:
        return ""
    return f"no request with {', '.join(f'{name}={value!r}' for name, value in fields.items())} is served"
