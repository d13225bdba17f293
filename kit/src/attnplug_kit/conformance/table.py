"""The table at the end of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug_kit.conformance.field_values import field_values_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnplug_kit.conformance.field_values import Capability
    from attnplug_kit.conformance.report import SubjectReport


def lines_of(report: SubjectReport) -> Iterator[str]:
    """Yield the lines that say what was found out about a subject."""
    outcomes = ", ".join(f"{count} {name}" for name, count in sorted(report.outcomes.items()))
    reachable = len(report.served) + len(report.missing)
    yield f"{report.subject.id} on {report.subject.device}: {outcomes}"
    if report.subject.features:
        yield f"every request asked for features={', '.join(report.subject.features)}"
    yield f"declared values exercised: {len(report.served)} of {reachable} ({report.fraction:.0%})"
    for name, text in _by_field(report.served):
        yield f"  {name:<18} {text}"
    for name, text in _by_field(report.missing):
        yield f"  not exercised: {name}={text}"
    for item in field_values_of(report.subject).unreached:
        yield f"  out of reach: {item.capability}: {item.because}"
    yield f"  {'dtype':<10} {'cache':<10} {'result':<8} {'max error':>10} {'mean error':>10} {'atol':>9} {'rtol':>9}"
    for error in report.errors:
        yield (
            f"  {error['dtype']:<10} {error['kv_cache_dtype']:<10} {error['what']:<8} {error['max']:>10.1e} "
            f"{error['mean']:>10.1e} {error['atol']:>9.1e} {error['rtol']:>9.1e}"
        )


def _by_field(capabilities: tuple[Capability, ...]) -> Iterator[tuple[str, str]]:
    names = dict.fromkeys(item.field for item in capabilities)
    for name in names:
        yield name, ", ".join(str(item.value) for item in capabilities if item.field == name)
