"""A result as a person reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.commands import STYLES, console, is_terminal, say, wrapped
from attnplug_kit.bench.measurement import told, told_range

if TYPE_CHECKING:
    from attnplug_kit.bench.measurement import Measurement
    from attnplug_kit.bench.result import Result


def show(result: Result) -> None:
    """Write a result."""
    for name, value in result.facts():
        say("\n".join(wrapped(f"{name}: {value}")))
    for measurement in result.measurements:
        say()
        _show(measurement)
    if result.remarks():
        say()
    for remark in result.remarks():
        say("\n".join(wrapped(remark)))


def _style(measurement: Measurement) -> str:
    """Return the status that a verdict looks like; what fails no run is no alarm."""
    return "ready" if measurement.within else "broken" if measurement.decides else "missing_dependency"


def _show(measurement: Measurement) -> None:
    unit, best = measurement.unit, measurement.best
    head = f"{measurement.name:13} {told(measurement.median, unit):>9}"
    least = "" if best is None else f"  best {told(best, unit)}"
    budget = "" if measurement.budget is None else f"  budget {measurement.budget:g} {unit}"
    if is_terminal():
        style = STYLES[_style(measurement)]
        console().print(f"[bold]{head}[/][dim]{least}[/]{budget}  [{style}]{measurement.verdict}[/]")
    else:
        say(f"{head}{least}{budget}  {measurement.verdict}".rstrip())
    spread = f"quartiles {told_range(*measurement.quartiles, unit)}"
    say("\n".join(wrapped(f"{measurement.what} ({spread})", "    ")))
