"""Runs an ask through a backend and holds the result against the oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.conformance.require import require
from attnplug_kit.oracle.running import check
from attnplug_kit.oracle.scene import materialize

if TYPE_CHECKING:
    from attnplug.contract import Backend
    from attnplug_kit.conformance.record import Record
    from attnplug_kit.conformance.request_spec import RequestSpec
    from attnplug_kit.conformance.subject import Subject
    from attnplug_kit.oracle.cases import Case
    from attnplug_kit.oracle.running import RunResult


def load_for(subject: Subject, ask: RequestSpec, case: Case) -> Backend:
    """Return the backend that serves a case of an ask."""
    return subject.load(case.requirements(**ask.engine))


def plain(subject: Subject, **fields: Any) -> RequestSpec:
    """
    Return the plainest ask with these fields.

    Raises:
        AssertionError: None is served; tests that may meet this are marked with `needs`.
    """
    ask = field_values_of(subject).ask(**fields)
    require(ask is not None, f"{subject}: no request with {fields} is served")
    return ask  # type: ignore[return-value]


def serve(subject: Subject, ask: RequestSpec, record: Record, case: Case) -> RunResult:
    """
    Run a case, compare it with the oracle, and note what it exercised.

    Raises:
        AssertionError: The result is not the oracle's; with what was asked for.
    """
    backend, scene = load_for(subject, ask, case), materialize(case)
    try:
        ran = check(backend, scene)
    except AssertionError as error:
        raise AssertionError(f"{subject} with {ask}: {error}") from error
    record.served(backend)
    record.errors(backend, scene, ran)
    return ran
