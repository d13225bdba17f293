"""The findings of a run for one subject: outcomes, declared values that were served, errors; as JSON and as a table."""

from __future__ import annotations

import json
import platform
import re
import sys
from collections import Counter
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, field, frozen
from packaging.requirements import Requirement

from attnplug.request import FIELDS, Names, Table
from attnplug_kit.conformance.failures import failed_points, lines_of_causes
from attnplug_kit.conformance.field_values import Capability, field_values_of
from attnplug_kit.oracle import tolerance
from attnplug_kit.oracle.exercised import Exercised
from attnplug_kit.unexercised import Unexercised, unexercised
from attnplug_kit.unexercised import lines_of as lines_of_unexercised

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from collections.abc import Set as AbstractSet

    import pytest
    from torch import Tensor

    from attnplug.contract import LoadedBackend
    from attnplug_kit.conformance.subject import Subject
    from attnplug_kit.oracle import RunResult, Scene


EXERCISED: Final = "attnplug exercised"
ERROR: Final = "attnplug error"
RAN: Final = "attnplug ran"
SUBJECT: Final = "attnplug subject"
"""The names of the properties that tests add to pytest's report."""

FORMAT: Final = 2
"""The version of the files that the kit writes."""

_TEST: Final = re.compile(r"::(test_\w+(?:\[.*\])?)$", re.DOTALL)


class Record:
    """
    Records the findings of one test, in pytest's report of it.

    Args:
        node: The test.
    """

    def __init__(self, node: pytest.Item) -> None:
        self._properties = node.user_properties

    def exercised(self, field: str, value: Any) -> None:
        """Record that a declared value was requested and served."""
        self._add(EXERCISED, text_of(field, value))

    def served(self, backend: LoadedBackend) -> None:
        """Record all values of an agreement."""
        agreed, requirements = backend.agreement, backend.agreement.requirements
        terms = {name: getattr(agreed, name) for name in ("block_size", "kv_layout", "kv_cache_form")}
        facts = {**requirements.facts(), **terms}
        facts |= {name: value for name, value in backend.device_properties.facts().items() if value is not None}
        facts.pop("cudagraph")  # recorded by tests that replay
        if requirements.head_size_v == requirements.head_size:
            facts.pop("head_size_v")
        if requirements.kv_cache_dtype == requirements.dtype:
            facts["kv_cache_dtype"] = "auto"
        for name, value in facts.items():
            if isinstance(FIELDS[name].domain, Names):
                for item in value:
                    self.exercised(name, (item,))
            elif value is not None:
                self.exercised(name, value)

    def errors(self, backend: LoadedBackend, scene: Scene, ran: RunResult) -> None:
        """Record the largest and the mean difference from the oracle's results, beside the tolerance."""
        exact, scaled = scene.expected(), scene.rounding is not None
        limit = tolerance(ran.output.dtype, scaled_keys=scaled, byte_weights=scene.has_byte_weights)
        self._error(backend, "output", ran.output, exact.output, (limit.atol * scene.largest_value, limit.rtol))
        if backend.agreement.requirements.return_lse:
            expected = exact.lse_with_sink if backend.impl_class.lse_includes_sink else exact.lse
            self._error(backend, "lse", ran.lse, expected, (limit.lse, limit.lse))

    def _error(self, backend: LoadedBackend, what: str, got: Tensor, exact: Tensor, limit: tuple[float, float]) -> None:
        finite = exact.isfinite()
        error = (got.detach().cpu().double() - exact).abs()[finite]
        if not error.numel():
            return
        dtype, cached = backend.agreement.requirements.dtype, backend.agreement.kv_cache_dtype
        sums = {"max": float(error.max()), "mean": float(error.mean()), "count": error.numel()}
        where = {"dtype": dtype, "kv_cache_dtype": cached if cached != dtype else "auto", "what": what}
        self._add(ERROR, json.dumps({**where, **sums, "atol": limit[0], "rtol": limit[1]}, sort_keys=True))

    def _add(self, name: str, text: str) -> None:
        if (name, text) not in self._properties:
            self._properties.append((name, text))


def text_of(field: str, value: Any) -> str:
    """
    Return a declared value as JSON text, as records and evidence files have it: a table as an object.

    Args:
        field: The field.
        value: The value, as the requirements have it.
    """
    plain = dict(value) if isinstance(FIELDS[field].domain, Table) else value
    return json.dumps({"field": field, "value": plain}, default=str, sort_keys=True)


@frozen(eq=False)
class SubjectReport:
    """
    The report of one subject.

    Attributes:
        subject: The subject.
        tests: Each test's id, outcome and the first line of its failure.
        served: The declared values that a passed test exercised.
        missing: Those within reach that none exercised, and those that are refused in every request.
        errors: The largest and the mean error by dtype, cache dtype and result, beside the tolerance.
        ran: What the comparisons of all passed tests exercised.
        kit_tests: How many tests of the kit ran, and how many it has for the subject.
    """

    subject: Subject
    tests: Sequence[Mapping[str, str]]
    served: tuple[Capability, ...]
    missing: tuple[Capability, ...]
    errors: Sequence[Mapping[str, Any]] = field(factory=tuple)
    ran: Exercised = field(factory=Exercised)
    kit_tests: tuple[int, int] = (0, 0)

    @property
    def is_whole(self) -> bool:
        """Whether every test of the kit ran; a run of some of them is no evidence."""
        ran, planned = self.kit_tests
        return ran == planned

    @property
    def fraction(self) -> float:
        """The part of the declared values within reach that was exercised."""
        return len(self.served) / self.within_reach if self.within_reach else 1.0

    @property
    def within_reach(self) -> int:
        """How many declared values are within reach."""
        return len(self.served) + len(self.missing)

    @property
    def further(self) -> tuple[Capability, ...]:
        """The sizes that ran besides the served values, of fields that are declared."""
        declared = ((name, size) for name, sizes in sorted(self.ran.sizes.items()) for size in sorted(sizes))
        found = (Capability(name, size) for name, size in declared if name in self.subject.supports)
        return tuple(item for item in found if item not in self.served)

    @property
    def failed(self) -> tuple[Capability, ...]:
        """The missing values that failed tests requested."""
        points = failed_points(self.tests, self.subject.id)
        return tuple(item for item in self.missing if str(item) in points)

    @property
    def unexercised(self) -> tuple[Unexercised, ...]:
        """
        The declared values that were not exercised, and can be: how, and on which device.

        A value that failed has no command, and after the whole kit no value of this device: the same run fails again.
        """
        declared, subject = field_values_of(self.subject), self.subject
        without = {*(item.capability for item in declared.unserved), *self.failed}
        reasons = {item.capability: item.because for item in declared.unreached}
        reasons |= {item: "" for item in self.missing if item not in without and not self.is_whole}
        has_capabilities = any(item.field == "compute_capability" for item in reasons)
        found = [
            unexercised(subject.id, item.field, item.value, because, features=subject.features, facts=_known_of(item))
            for item, because in reasons.items()
            if not (has_capabilities and item == Capability("device_type", "cuda"))
        ]
        return tuple(evolve(item, because="") for item in found if item.command)

    @property
    def outcomes(self) -> Mapping[str, int]:
        """The number of tests by outcome."""
        return Counter(test["outcome"] for test in self.tests)

    @property
    def passed(self) -> bool:
        """Whether the whole kit ran, no test failed, and every declared value within reach was exercised."""
        return self.is_whole and not self.outcomes.get("failed") and not self.missing

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: the evidence, and every test."""
        return {**self.evidence(), "outcomes": dict(self.outcomes), "tests": [dict(test) for test in self.tests]}

    def evidence(self) -> dict[str, Any]:
        """Return plain JSON values: the evidence for the subject on this device, without the single tests."""
        unreached = field_values_of(self.subject).unreached
        return {
            "format": FORMAT,
            "backend": self.subject.id,
            "distribution": self.subject.candidate.distribution,
            "device": self.subject.device.to_dict(),
            "features": list(self.subject.features),
            "versions": versions(self.subject),
            "passed": self.passed,
            "kit_tests": dict(zip(("ran", "of"), self.kit_tests, strict=True)),
            "fraction": self.fraction,
            "served": [_plain(item) for item in (*self.served, *self.further)],
            "ranges": self.ran.to_dict()["ranges"],
            "missing": [_plain(item) for item in self.missing],
            "unreached": [{**_plain(item.capability), "because": item.because} for item in unreached],
            "errors": [dict(error) for error in self.errors],
        }


def report_of(subject: Subject, reports: Iterable[pytest.TestReport], planned: AbstractSet[str]) -> SubjectReport:
    """
    Return the report of a subject.

    Args:
        subject: The subject.
        reports: The final report of each of its tests, one for each test.
        planned: The names of all tests that the kit has for it, of `tests_of_kit`.
    """
    found = list(reports)
    exercised = {text for one in found if one.passed for name, text in one.user_properties if name == EXERCISED}
    declared = field_values_of(subject)
    within_reach = (*declared.specs, *(item.capability for item in declared.unserved))
    ran = Exercised()
    for text in (text for one in found if one.passed for name, text in one.user_properties if name == RAN):
        ran.merge(json.loads(str(text)))
    requested = (item for item in declared.specs if text_of(item.field, item.value) in exercised)
    served = tuple(item for item in requested if ran.has_effect(item.field, item.value))
    missing = tuple(item for item in within_reach if item not in served)
    names = {match[1] for one in found if (match := _TEST.search(one.nodeid))}
    counts = (len(planned & names), len(planned))
    return SubjectReport(subject, [_test(one) for one in found], served, missing, _errors(found), ran, counts)


def subject_of(report: pytest.TestReport) -> str | None:
    """Return the subject of a test, or None for a test that is not of the kit."""
    return next((str(value) for name, value in report.user_properties if name == SUBJECT), None)


def versions(subject: Subject) -> dict[str, str]:
    """Return the versions that results depend on: Python, torch, attnplug, and what the variant requires."""
    variant = subject.candidate.variant
    required = [Requirement(text).name for text in variant.requires] if variant else []
    found = {"python": platform.python_version(), "platform": sys.platform}
    for name in dict.fromkeys(("attnplug", "torch", *required)):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _known_of(capability: Capability) -> dict[str, str]:
    """Return what is known besides of a device with a value."""
    return {"device_type": "cuda"} if capability.field == "compute_capability" else {}


def _plain(capability: Capability) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(text_of(capability.field, capability.value))
    return plain


def _test(report: pytest.TestReport) -> dict[str, str]:
    outcome = "xfailed" if report.skipped and hasattr(report, "wasxfail") else report.outcome
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash is not None else _reason(report.longrepr)
    return {"id": report.nodeid, "outcome": outcome, "message": "".join(message.splitlines()[:1])}


def _reason(longrepr: object) -> str:
    """Return why a test was skipped, or a failure without a place; nothing for a test that passed."""
    return str(longrepr[2] if isinstance(longrepr, (tuple, list)) else longrepr or "")


def _errors(reports: Iterable[pytest.TestReport]) -> list[dict[str, Any]]:
    """Return the errors of all tests together: the largest error, the mean, and the largest tolerance."""
    merged: dict[tuple[str, str, str], dict[str, Any]] = {}
    passed = [one for one in reports if one.passed]
    for error in (json.loads(str(text)) for one in passed for name, text in one.user_properties if name == ERROR):
        key = (error["dtype"], error["kv_cache_dtype"], error["what"])
        total = merged.setdefault(key, {**error, "count": 0, "mean": 0.0, "max": 0.0, "atol": 0.0})
        count = total["count"] + error["count"]
        total["mean"] = (total["mean"] * total["count"] + error["mean"] * error["count"]) / count
        total["count"] = count
        total["max"], total["atol"] = max(total["max"], error["max"]), max(total["atol"], error["atol"])
    return [merged[key] for key in sorted(merged)]


def lines_of(report: SubjectReport) -> Iterator[str]:
    """Yield the lines of the table of a subject."""
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(report.outcomes.items()))
    yield f"{report.subject.id} on {report.subject.device}: {outcomes}"
    if not report.is_whole:
        yield "part of the kit ({} of {} tests): it is no evidence".format(*report.kit_tests)
    if report.subject.features:
        yield f"every request has features={', '.join(report.subject.features)}"
    yield f"declared values exercised: {len(report.served)} of {report.within_reach} ({report.fraction:.0%})"
    for name, text in _by_field((*report.served, *report.further)):
        yield f"  {name:<18} {text}"
    failed = report.failed
    for name, text in _by_field(failed):
        yield f"  failed: {name}={text}"
    for name, text in _by_field(tuple(item for item in report.missing if item not in failed)):
        yield f"  not exercised: {name}={text}"
    for item in field_values_of(report.subject).unreached:
        yield f"  out of reach: {item.capability}: {item.because}"
    for line in lines_of_unexercised(report.unexercised):
        yield f"    {line}" if line.startswith(" ") else f"  to exercise {line}"
    yield "compared with the oracle, the smallest to the largest:"
    for name, (low, high) in sorted(report.ran.ranges.items()):
        yield f"  {name:<18} {low} to {high}"
    yield f"  {'dtype':<10} {'cache':<10} {'result':<8} {'max error':>10} {'mean error':>10} {'atol':>9} {'rtol':>9}"
    for error in report.errors:
        yield (
            f"  {error['dtype']:<10} {error['kv_cache_dtype']:<10} {error['what']:<8} {error['max']:>10.1e} "
            f"{error['mean']:>10.1e} {error['atol']:>9.1e} {error['rtol']:>9.1e}"
        )
    yield from lines_of_causes(report.tests, report.subject.id)


def _by_field(capabilities: tuple[Capability, ...]) -> Iterator[tuple[str, str]]:
    names = dict.fromkeys(item.field for item in capabilities)
    for name in names:
        yield name, ", ".join(str(item.value) for item in capabilities if item.field == name)
