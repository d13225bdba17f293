"""Measures step by step within a time limit, and writes the results after each step."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from attrs import evolve

import attnplug
from attnplug import NoBackendError
from attnplug.errors import DeviceError, PluginLoadError
from attnplug_kit.bench import Result, formatted, machine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from attnplug_kit.bench import SectionResult, Target

    Steps = Iterable[tuple[str, Callable[[], SectionResult]]]

NOT_HERE = 3
"""The exit status of a script without the library or the GPU that it measures."""

_COMMON_LAYER = {"head_size": 128, "num_q_heads": 32, "num_kv_heads": 8, "dtype": "bfloat16"}


def is_here(target: Target, requirements: attnplug.Requirements | None = None) -> bool:
    """Return whether a backend supports a layer here, by default a common one; print why it does not."""
    try:
        target.load(requirements or attnplug.Requirements(**_COMMON_LAYER))
    except NoBackendError as error:
        verdicts = error.explanation.verdicts if error.explanation is not None else ()
        reasons = [str(reason) for one in verdicts if one.id == target.backend for reason in one.reasons]
        print(f"not here: {'; '.join(reasons) or error}", flush=True)
    except (DeviceError, PluginLoadError) as error:
        print(f"not here: {error.problem}", flush=True)
    else:
        return True
    return False


def measure_all(steps: Steps, command: str, file: Path, seconds: float) -> Result:
    """
    Measure, and write after each step.

    Args:
        steps: Descriptions and measurements, the most important first.
        command: The command that the result names.
        file: The file of the result, without its suffix.
        seconds: The time after which no step begins; the remaining steps are failures.
    """
    end, found = time.monotonic() + seconds, Result(command=command, machine=machine())
    for what, measure in steps:
        found = _with(found, what, measure if time.monotonic() < end else _no_time)
        for suffix in (".md", ".json"):
            found.write(file.with_suffix(suffix))
    return found


def _no_time() -> SectionResult:
    raise TimeoutError("no time was left")


def _with(result: Result, what: str, measure: Callable[[], SectionResult]) -> Result:
    """Return a result with the measurements of one more step."""
    try:
        found = measure()
    except Exception as error:  # noqa: BLE001 - the next step may succeed
        failure = f"{what}: {type(error).__name__}: {error}"
        print(f"FAILED {failure}", flush=True)
        return evolve(result, failures=(*result.failures, failure))
    for one in found.measurements:
        budget = "" if one.budget is None else f"  ({one.verdict}, budget {one.budget:g})"
        print(f"{formatted(one.median, one.unit):>10}  {one.what}{budget}", flush=True)
    return result + found  # type: ignore[no-any-return]
