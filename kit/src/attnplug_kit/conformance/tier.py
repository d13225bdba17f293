"""The base of every class of the kit: which backend it tests, and the points that a test runs over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import pytest

from attnplug import AttnplugError
from attnplug_kit.conformance.choice import Choice, LeftOut, choose
from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.record import Record
from attnplug_kit.conformance.subject import Subject

if TYPE_CHECKING:
    from collections.abc import Iterator

_F = TypeVar("_F", bound=Callable[..., Any])
Points = Callable[[Subject], Mapping[str, Any]]


def over(points: Points) -> Callable[[_F], _F]:
    """
    Run a test once for each point of its subject, as its argument `point`.

    Args:
        points: Returns the points, by the name that the test's id has. Without any the test is skipped.
    """

    def mark(test: _F) -> _F:
        test.points = points  # type: ignore[attr-defined]
        return test

    return mark


def needs(**fields: Any) -> Callable[[_F], _F]:
    """Skip a test where no ask with these fields is served."""

    def mark(test: _F) -> _F:
        test.needs = fields  # type: ignore[attr-defined]
        return test

    return mark


class Tier:
    """
    A part of the kit. Inherit it, or `Conformance` for all of it, and name the backend.

    Attributes:
        backend: ``"name"`` or ``"name/variant"``; None is what ``--attn-backend`` says.
        device: What to test it on, as `Device.parse` reads it; None is what ``--attn-device`` says, or this process's.
        features: The open features that every request asks for; None is what ``--attn-feature`` says, or none.
        known_failures: Tests that are expected to fail, and why: the name of a test, or its name with its point in
            brackets. One that passes fails: the entry is out of date then.
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
            choice = self._choice(metafunc.config)
        except AttnplugError as error:
            raise pytest.Collector.CollectError(str(error)) from error  # which pytest tells without a traceback
        with_points = "point" in metafunc.fixturenames
        names = ("subject", "point") if with_points else ("subject",)
        parameters = [p for subject in choice.subjects for p in self._parameters(metafunc.function, subject)]
        parameters += [_skipped(left, len(names)) for left in choice.left_out]
        metafunc.parametrize(names, parameters)

    def _choice(self, config: pytest.Config) -> Choice:
        """
        Return what to test: what the class names, and else the command line.

        Raises:
            AttnplugError: Neither names a backend, or the one that is named cannot be tested so.
        """
        name = self.backend or config.getoption("--attn-backend", default=None)
        told = config.getoption("--attn-feature", default=None) or ()
        device = self.device or config.getoption("--attn-device", default=None)
        return choose(name, device, told if self.features is None else self.features)

    @pytest.fixture
    def record(self, request: pytest.FixtureRequest) -> Record:
        """Return where the test notes what it found out."""
        return Record(request.node)

    def _parameters(self, test: Callable[..., Any], subject: Subject) -> Iterator[Any]:
        points: Points | None = getattr(test, "points", None)
        found = {"": None} if points is None else dict(points(subject))
        lacking = _lacking(test, subject) or ("" if found else "it declares nothing of this kind")
        for name, point in (found or {"": None}).items():
            marks = [pytest.mark.skip(reason=f"{subject}: {lacking}")] if lacking else self._marks(test.__name__, name)
            values = (subject,) if points is None else (subject, point)
            yield pytest.param(*values, id="-".join(filter(None, (subject.id, name))), marks=marks)

    def _marks(self, test: str, point: str) -> list[pytest.MarkDecorator]:
        reasons = [self.known_failures[key] for key in (test, f"{test}[{point}]") if key in self.known_failures]
        return [pytest.mark.xfail(reason=reason, strict=True) for reason in reasons[:1]]


def _skipped(left: LeftOut, count: int) -> Any:
    return pytest.param(*[None] * count, id=left.subject.id, marks=pytest.mark.skip(str(left)))


def _lacking(test: Callable[..., Any], subject: Subject) -> str:
    fields = getattr(test, "needs", None)
    if fields is None or field_values_of(subject).ask(**fields) is not None:
        return ""
    return f"no request with {', '.join(f'{name}={value!r}' for name, value in fields.items())} is served"
