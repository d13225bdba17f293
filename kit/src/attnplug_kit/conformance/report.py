"""What a run of the kit found out about one subject: outcomes, capabilities that were served, errors."""

from __future__ import annotations

import json
import platform
import sys
from collections import Counter
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final

from attrs import field, frozen
from packaging.requirements import Requirement

from attnplug_kit.conformance.field_values import Capability, field_values_of
from attnplug_kit.conformance.record import ERROR, EXERCISED, SUBJECT, text_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pytest

    from attnplug_kit.conformance.subject import Subject

FORMAT: Final = 1
"""The version of the files that the kit writes."""


@frozen(eq=False)
class SubjectReport:
    """
    The report of one subject.

    Attributes:
        subject: What was tested.
        tests: Each test's id, outcome and the last line of its failure.
        served: The reachable declared values that a passed test exercised.
        missing: Those that none did, and those that are declared and refused in every request.
        errors: The largest and the mean error by dtype, cache dtype and result, beside the tolerance.
    """

    subject: Subject
    tests: Sequence[Mapping[str, str]]
    served: tuple[Capability, ...]
    missing: tuple[Capability, ...]
    errors: Sequence[Mapping[str, Any]] = field(factory=tuple)

    @property
    def fraction(self) -> float:
        """The part of the reachable declared values that was exercised."""
        reachable = len(self.served) + len(self.missing)
        return len(self.served) / reachable if reachable else 1.0

    @property
    def outcomes(self) -> Mapping[str, int]:
        """How many tests there are of each outcome."""
        return Counter(test["outcome"] for test in self.tests)

    @property
    def passed(self) -> bool:
        """Whether no test failed, and every reachable declared value was exercised."""
        return not self.outcomes.get("failed") and not self.missing

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values: everything."""
        return {**self.evidence(), "outcomes": dict(self.outcomes), "tests": [dict(test) for test in self.tests]}

    def evidence(self) -> dict[str, Any]:
        """Return plain JSON values: what is known of the subject on this device, without the single tests."""
        unreached = field_values_of(self.subject).unreached
        return {
            "format": FORMAT,
            "backend": self.subject.id,
            "distribution": self.subject.candidate.distribution,
            "device": self.subject.device.to_dict(),
            "features": list(self.subject.features),
            "versions": versions(self.subject),
            "passed": self.passed,
            "fraction": self.fraction,
            "served": [_plain(item) for item in self.served],
            "missing": [_plain(item) for item in self.missing],
            "unreached": [{**_plain(item.capability), "because": item.because} for item in unreached],
            "errors": [dict(error) for error in self.errors],
        }


def report_of(subject: Subject, reports: Iterable[pytest.TestReport]) -> SubjectReport:
    """
    Gather what the tests of a subject have noted.

    Args:
        subject: The subject.
        reports: The final report of each of its tests, one for each test.
    """
    found = list(reports)
    noted = {text for one in found if one.passed for name, text in one.user_properties if name == EXERCISED}
    menu = field_values_of(subject)
    reachable = (*menu.asks, *(item.capability for item in menu.unserved))
    served = tuple(item for item in menu.asks if text_of(item.field, item.value) in noted)
    missing = tuple(item for item in reachable if item not in served)
    return SubjectReport(subject, [_test(one) for one in found], served, missing, _errors(found))


def subject_of(report: pytest.TestReport) -> str | None:
    """Return which subject a test is about, or None for one that is not of the kit."""
    return next((str(value) for name, value in report.user_properties if name == SUBJECT), None)


def versions(subject: Subject) -> dict[str, str]:
    """Return what results depend on: the interpreter, torch, attnplug, and what the variant requires."""
    variant = subject.candidate.variant
    required = [Requirement(text).name for text in variant.requires] if variant else []
    found = {"python": platform.python_version(), "platform": sys.platform}
    for name in dict.fromkeys(("attnplug", "torch", *required)):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _plain(capability: Capability) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(text_of(capability.field, capability.value))
    return plain


def _test(report: pytest.TestReport) -> dict[str, str]:
    outcome = "xfailed" if report.skipped and hasattr(report, "wasxfail") else report.outcome
    crash = getattr(report.longrepr, "reprcrash", None)
    message = crash.message if crash is not None else _reason(report.longrepr)
    return {"id": report.nodeid, "outcome": outcome, "message": "".join(message.splitlines()[:1])}


def _reason(longrepr: object) -> str:
    """Why a test was skipped, or a failure that has no place; nothing for a test that passed."""
    return str(longrepr[2] if isinstance(longrepr, (tuple, list)) else longrepr or "")


def _errors(reports: Iterable[pytest.TestReport]) -> list[dict[str, Any]]:
    """The notes of all tests together: the largest error that stood beside the largest tolerance, and the mean."""
    merged: dict[tuple[str, str, str], dict[str, Any]] = {}
    for note in (
        json.loads(str(text)) for one in reports if one.passed for name, text in one.user_properties if name == ERROR
    ):
        key = (note["dtype"], note["kv_cache_dtype"], note["what"])
        known = merged.setdefault(key, {**note, "count": 0, "mean": 0.0, "max": 0.0, "atol": 0.0})
        count = known["count"] + note["count"]
        known["mean"] = (known["mean"] * known["count"] + note["mean"] * note["count"]) / count
        known["count"] = count
        known["max"], known["atol"] = max(known["max"], note["max"]), max(known["atol"], note["atol"])
    return [merged[key] for key in sorted(merged)]
