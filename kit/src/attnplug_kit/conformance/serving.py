"""What every test of the kit begins with: the plainest request with some fields, and a run compared with the oracle."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, Final

from attnplug import select
from attnplug_kit.conformance.field_values import field_values_of
from attnplug_kit.oracle import SceneRunner, check, materialize

if TYPE_CHECKING:
    from attnplug.contract import LoadedBackend
    from attnplug_kit.conformance.report import Record
    from attnplug_kit.conformance.request_spec import RequestSpec
    from attnplug_kit.conformance.subject import Subject
    from attnplug_kit.oracle import Case, RunResult, Scene


_LATE: Final = 0.5


def require(condition: object, message: str) -> None:
    """
    Require that a condition holds. An ``assert`` would say less: pytest doesn't rewrite those of installed packages.

    Raises:
        AssertionError: It does not; with the message.
    """
    if not condition:
        raise AssertionError(message)


def load_for(subject: Subject, spec: RequestSpec, case: Case) -> LoadedBackend:
    """Return the backend that serves a case of a request; in half of them, one whose block size was settled late."""
    requirements = case.requirements(**spec.engine)
    if requirements.paged and random.Random(f"late {spec}").random() < _LATE:
        unbound = requirements.evolve(block_size=None, late=("block_size",))
        return select(unbound, subject.device, backend=subject.id).bind(block_size=requirements.block_size).load()
    return subject.load(requirements)


def plain(subject: Subject, **fields: Any) -> RequestSpec:
    """
    Return the plainest request with these fields.

    Raises:
        AssertionError: None is served. Tests in which this may happen are marked with `needs`.
    """
    spec = field_values_of(subject).spec(**fields)
    if spec is None:
        raise AssertionError(f"{subject}: no request with {fields} is served")
    return spec


def runner_for(subject: Subject, spec: RequestSpec, scene: Scene, **options: Any) -> SceneRunner:
    """Return a runner of the scenes of a request; `options` as of `SceneRunner`."""
    return SceneRunner(load_for(subject, spec, scene.case), scene, **options)


def serve(subject: Subject, spec: RequestSpec, record: Record, case: Case) -> RunResult:
    """
    Run a case, compare it with the oracle, and record what it exercised.

    Raises:
        AssertionError: The result differs from the oracle's; with the request.
    """
    backend, scene = load_for(subject, spec, case), materialize(case)
    try:
        ran = check(backend, scene)
    except AssertionError as error:
        raise AssertionError(f"{subject} with {spec}: {error}") from error
    record.served(backend)
    record.errors(backend, scene, ran)
    return ran
