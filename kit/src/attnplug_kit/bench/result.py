"""What the benchmarks measured: numbers beside their budgets, what they depend on, and how they are shown."""

from __future__ import annotations

import json
import os
import platform
import statistics
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from attrs import asdict, evolve, field, frozen

from attnplug.commands import (
    PACKAGES,
    SCHEMA_VERSION,
    STYLES,
    ForeignCode,
    Lines,
    console,
    environment,
    is_terminal,
    say,
    styled,
    version_of,
    wrapped,
)
from attnplug.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attnplug.contract import LoadedBackend

Unit = Literal["ms", "us", "x"]

_PER_SECOND: Final = {"ms": 1e3, "us": 1e6, "x": 1.0}
_CPUINFO: Final = Path("/proc/cpuinfo")
_ON_A_BACKEND: Final = {"build", "forward", "dense"}
_DECIDING: Final = (
    "Only budgets of attnplug's own part decide whether a run fails. The backend's part, its `build` and the overhead",
    "of its `forward` over direct library calls, is compared with the same budgets and fails no run.",
)


@frozen
class Measurement:
    """
    One thing that was measured several times.

    Attributes:
        name: The section, as ``attnplug bench NAME`` takes it.
        what: Exactly what was measured.
        samples: Seconds, in the order of measurement; ratios where the unit is ``"x"``.
        unit: The unit to show it in.
        budget: The limit, in that unit; None for a number that is shown for comparison only.
        paired: Whether each sample compares two calls of one round. Their best is chance, and not shown.
        decides: Whether its budget decides the exit code: that of attnplug's own part does, the backend's doesn't.
    """

    name: str
    what: str
    samples: tuple[float, ...]
    unit: Unit
    budget: float | None = None
    paired: bool = False
    decides: bool = True

    @property
    def median(self) -> float:
        """The median in the unit, which is compared with the budget."""
        return statistics.median(self.samples) * _PER_SECOND[self.unit]

    @property
    def best(self) -> float | None:
        """The best in the unit, close to that of a machine without other work; None where it means nothing."""
        return None if self.paired else min(self.samples) * _PER_SECOND[self.unit]

    @property
    def quartiles(self) -> tuple[float, float]:
        """The first and the third quartile, in the unit."""
        if len(self.samples) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.samples, n=4, method="inclusive")
        return low * _PER_SECOND[self.unit], high * _PER_SECOND[self.unit]

    @property
    def within(self) -> bool:
        """Whether the median is within the budget; true without a budget."""
        return self.budget is None or self.median <= self.budget

    @property
    def verdict(self) -> str:
        """The same in a word, or an empty text without a budget."""
        return "" if self.budget is None else "within" if self.within else "over"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "name": self.name,
            "what": self.what,
            "unit": self.unit,
            "median": round(self.median, 4),
            "quartiles": [round(quartile, 4) for quartile in self.quartiles],
            "best": None if self.best is None else round(self.best, 4),
            "budget": self.budget,
            "verdict": self.verdict,
            "decides": self.decides and self.budget is not None,
            "samples": len(self.samples),
        }

    def row(self) -> str:
        """Return it as a row of the page's table."""
        best = "-" if self.best is None else formatted(self.best, self.unit)
        budget = "-" if self.budget is None else f"{self.budget:g} {self.unit}"
        spread = formatted_range(*self.quartiles, self.unit)
        median = formatted(self.median, self.unit)
        return f"| {self.what} | {median} | {spread} | {best} | {budget} | {self.verdict or '-'} |"


def formatted(value: float, unit: Unit) -> str:
    """Return a number with three digits: ``0.123 us``, ``12.3 ms``, ``123 ms``, ``1.23 x``."""
    return f"{_digits(value)} {unit}"


def formatted_range(low: float, high: float, unit: Unit) -> str:
    """Return two of them: ``12.3 to 12.9 ms``."""
    return f"{_digits(low)} to {_digits(high)} {unit}"


def _digits(value: float) -> str:
    size = abs(value)
    return f"{value:.{3 if size < 1 else 2 if size < 10 else 1 if size < 100 else 0}f}"


@frozen
class SectionResult:
    """
    The result of one section, or of several: add them.

    Attributes:
        measurements: The numbers.
        setup: What numbers of a backend depend on besides: its variant, device, dtype, threads.
        notes: What could not be measured, or not precisely, and why; a sentence each.
        failures: Steps that failed while others were measured; a sentence each.
    """

    measurements: tuple[Measurement, ...] = ()
    setup: Mapping[str, str] = field(factory=dict)
    notes: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()

    def __add__(self, other: SectionResult) -> Any:
        return evolve(
            self,
            measurements=self.measurements + other.measurements,
            setup={**self.setup, **other.setup},
            notes=tuple(dict.fromkeys(self.notes + other.notes)),
            failures=self.failures + other.failures,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, samples included: ``SectionResult.from_dict(data)`` in another process."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> SectionResult:
        """Read what `to_dict` wrote."""
        numbers = [Measurement(**{**number, "samples": tuple(number["samples"])}) for number in data["measurements"]]
        return cls(tuple(numbers), data["setup"], tuple(data["notes"]), tuple(data["failures"]))


class ResultCollector:
    """
    Collects the results of steps. A step that fails is recorded, and the others are measured all the same.

    Args:
        section: The section's name.
    """

    def __init__(self, section: str) -> None:
        self._section = section
        self._found = SectionResult()
        self._errors: list[BaseException] = []

    def add(self, what: str, measure: Callable[[], SectionResult]) -> None:
        """
        Measure one step.

        Args:
            what: The step in words.
            measure: Measures it.
        """
        with ForeignCode(f"{self._section}, {what}:") as code:
            self._found += measure()
        if code.error is not None:  # of a backend, its library or its device: the next step may work
            self._found += SectionResult(failures=(code.problem,))
            self._errors.append(code.error)

    def result(self) -> SectionResult:
        """
        Return all of it.

        Raises:
            BaseException: Nothing was measured: what the first step raised.
        """
        if self._errors and not self._found.measurements:
            raise self._errors[0]
        return self._found


@frozen(kw_only=True)
class Result(SectionResult):
    """
    A run of the benchmarks.

    Attributes:
        command: The command of the run.
        machine: What the numbers depend on, as `machine` returns it.
    """

    command: str
    machine: Mapping[str, Any]

    @property
    def within(self) -> bool:
        """Whether nothing failed, and every budget that decides is kept."""
        return not self.failures and all(one.within for one in self.measurements if one.decides)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "command": self.command,
            "machine": dict(self.machine),
            "setup": dict(self.setup),
            "measurements": [measurement.to_dict() for measurement in self.measurements],
            "notes": list(self.notes),
            "failures": [Lines(failure) for failure in self.failures],
        }

    def facts(self) -> list[tuple[str, str]]:
        """Return what the numbers depend on, as names and texts."""
        versions = ", ".join(f"{name} {version}" for name, version in self.machine["versions"].items())
        return [
            ("processor", f"{self.machine['processor']}, {self.machine['processors']} of them"),
            ("load before", str(self.machine["load"])),
            ("system", str(self.machine["system"])),
            ("Python", str(self.machine["python"])),
            ("versions", versions),
            ("installed distributions", str(self.machine["distributions"])),
            *self.setup.items(),
            ("command", f"`{self.command}`"),
        ]

    def remarks(self) -> list[str]:
        """Return the failures and the notes, each on one line."""
        failed = [f"failed: {' '.join(failure.split())}" for failure in self.failures]
        return [*failed, *(f"note: {note}" for note in self.notes)]

    def page(self) -> str:
        """Return the result as Markdown."""
        informs = any(one.budget is not None and not one.decides for one in self.measurements)
        return "\n".join(
            [
                self._title(),
                "",
                "Written by `attnplug bench`; not edited by hand. The median is compared with the budget; half of the",
                "samples are between the quartiles.",
                *(["", *_DECIDING] if informs else []),
                "",
                "| what | value |",
                "| --- | --- |",
                *(f"| {name} | {value} |" for name, value in self.facts()),
                "",
                "| what | median | quartiles | best | budget | verdict |",
                "| --- | --- | --- | --- | --- | --- |",
                *(measurement.row() for measurement in self.measurements),
                "",
                *(f"- {remark.removeprefix('note: ')}" for remark in self.remarks()),
                *([""] if self.remarks() else []),
            ]
        )

    def _title(self) -> str:
        names = {measurement.name for measurement in self.measurements}
        if "host" in self.setup:
            return f"# A step of {self.setup['host']}, natively and through attnplug"
        if names <= _ON_A_BACKEND:
            return f"# Build and forward of {self.setup.get('backend', 'a backend').partition(',')[0]}"
        return "# Budgets" if names & _ON_A_BACKEND else "# Budgets of the selection"

    def _document(self) -> str:
        return json.dumps({"schema_version": SCHEMA_VERSION, **self.to_dict()}, indent=2) + "\n"

    def write(self, file: Path) -> None:
        """
        Write the result, as Markdown or JSON by the file's suffix.

        Raises:
            RequestError: The suffix is another one, or the file cannot be written.
        """
        text = self.page() if check_suffix(file) == ".md" else self._document()
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise RequestError(
                f"--output {str(file)!r} cannot be written: {error.strerror}", "", "name another file"
            ) from error


def check_suffix(file: Path) -> str:
    """
    Return the suffix of a file for a result.

    Raises:
        RequestError: It is neither that of Markdown nor of JSON.
    """
    if file.suffix not in (".md", ".json"):
        raise RequestError(
            f"--output {str(file)!r} was given", "a result is written as .md or .json", "name such a file"
        )
    return file.suffix


def show(result: Result) -> None:
    """Write a result to the terminal."""
    for name, value in result.facts():
        say("\n".join(wrapped(f"{name}: {value}")))
    for measurement in result.measurements:
        say()
        _show(measurement)
    if result.remarks():
        say()
    for remark in result.remarks():
        say("\n".join(wrapped(remark)))


def _show(measurement: Measurement) -> None:
    unit, best = measurement.unit, measurement.best
    head = f"{measurement.name:13} {formatted(measurement.median, unit):>9}"
    least = "" if best is None else f"  best {formatted(best, unit)}"
    budget = "" if measurement.budget is None else f"  budget {measurement.budget:g} {unit}"
    if is_terminal():
        # A budget that fails no run is shown as a warning, not as an error.
        status = "ready" if measurement.within else "broken" if measurement.decides else "missing_dependency"
        verdict = (measurement.verdict, STYLES[status])
        console().print(styled((head, "bold"), (least, "dim"), f"{budget}  ", verdict))
    else:
        say(f"{head}{least}{budget}  {measurement.verdict}".rstrip())
    spread = f"quartiles {formatted_range(*measurement.quartiles, unit)}"
    say("\n".join(wrapped(f"{measurement.what} ({spread})", "    ")))


def machine() -> dict[str, Any]:
    """Return what numbers depend on as plain JSON values; nothing that identifies the machine or its user."""
    return {
        "processor": _processor(),
        "processors": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "load": round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "versions": environment()["versions"],
        "distributions": sum(1 for _ in metadata.distributions()),
    }


def _processor() -> str:
    """Return the processor's model: from a file on Linux, from `platform` elsewhere."""
    try:
        lines = _CPUINFO.read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return found or platform.processor() or "unknown"


def setup_of(backend: LoadedBackend) -> dict[str, str]:
    """Return what numbers of a backend depend on, as names and texts."""
    import torch  # noqa: PLC0415 - it is imported by now: a backend is loaded

    agreement = backend.agreement
    device, dtype = backend.device_properties, agreement.requirements.dtype
    libraries = _libraries(backend)
    toolkit = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    return {
        "backend": f"{backend.id}, {dtype}, blocks of {agreement.block_size}, layout {agreement.kv_layout}, "
        f"{agreement.kv_cache_form} KV cache",
        **({"libraries": libraries} if libraries else {}),
        "device": f"{device} with {toolkit}" if device.type == "cuda" else str(device),
        "torch threads": str(torch.get_num_threads()),
    }


def _libraries(backend: LoadedBackend) -> str:
    """Return the installed versions of what the variant requires besides the packages that every result names."""
    from attnplug import registry  # noqa: PLC0415 - likewise
    from attnplug.manifest import requirement_name  # noqa: PLC0415 - likewise

    variants = [one.variant for one in registry().candidates() if one.id == backend.id and one.variant is not None]
    names = {requirement_name(required) for variant in variants for required in variant.requires} - {*PACKAGES}
    return ", ".join(f"{name} {version}" for name in sorted(names) if (version := version_of(name)))
