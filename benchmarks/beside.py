"""
Calls beside each other: their medians, ratios and errors as rows, and the report of a run as Markdown and JSON.

diffusers_host.py and torch_registry.py are written with it.
"""

from __future__ import annotations

import json
import math
import platform
import shlex
import statistics
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch
from attrs import field, frozen

from attnplug.errors import AttnplugError
from attnplug_kit.bench import Contender, host_clock, interleaved, machine, work_clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from pathlib import Path

NATIVE = "native"
"""The contender without attnplug: every ratio is its time divided by that of another."""

CHOSEN = "chosen"
"""The contender that names no backend: attnplug's choice, or native attention where that was measured to be faster."""

DISTRIBUTIONS = (
    *("attnplug", "torch", "triton", "diffusers", "flash-attn", "flash-attn-3", "flash-attn-4", "flashinfer-python"),
    *("nvidia-cutlass-dsl", "vllm"),
)
TOLERANCES = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}
"""Greatest difference from the reference, as a fraction of its greatest value."""

QUERIES = 64
"""Rows of queries that a reference in float64 is computed for."""


@frozen
class Row:
    """
    What was measured of one piece of work.

    Attributes:
        work: Its name.
        part: ``"host"``, the time until the call returns, or ``"work"``, the time on the device.
        microseconds: Contender -> median.
        ratios: Contender -> the median of native time divided by its time, round by round.
        errors: Contender -> greatest difference from the reference, as a fraction of its greatest value.
        refused: Contender -> why it does not run.
        wrong: Contenders whose errors are too great.
        is_steady: Whether every median is known to 1 %.
    """

    work: str
    part: str
    microseconds: dict[str, float]
    ratios: dict[str, float]
    errors: dict[str, float]
    refused: dict[str, str]
    wrong: list[str]
    is_steady: bool


@frozen
class Work:
    """
    Calls that compute the same.

    Attributes:
        name: Its name.
        contenders: The calls, by name; each returns its output.
        dtype: What they compute in.
        reference: What an output is compared with, in float32 or float64; None for nothing, of random outputs.
        rows: What of an output is compared.
        obstacle: Called with a contender's name after its first call: why that ran on something else, or nothing.
    """

    name: str
    contenders: Mapping[str, Contender]
    dtype: torch.dtype
    reference: torch.Tensor | None
    rows: Callable[[Any], torch.Tensor] = lambda output: output
    obstacle: Callable[[str], str] = lambda _: ""

    def measured(self, device: str, repeats: int) -> Iterator[Row]:
        """
        Yield the row of each part.

        Args:
            device: ``"cpu"`` or ``"cuda"``.
            repeats: As for `interleaved`.
        """
        errors, refused, runs = {}, {}, {}
        for name, one in self.contenders.items():
            try:
                output = one.call(one.prepare())
            except (AttnplugError, RuntimeError, ValueError, TypeError) as error:
                refused[name] = _first_sentence(getattr(error, "problem", str(error)))
                continue
            if reason := self.obstacle(name):
                refused[name] = reason
                continue
            runs[name] = _repeated(one)
            if self.reference is not None:
                errors[name] = _error(self.rows(output), self.reference)
        # What is too great for the dtype may be the work's own rounding: then the native call has it, too.
        most = max(TOLERANCES[self.dtype], 3 * errors.get(NATIVE, 0.0))
        wrong = [name for name, error in errors.items() if not error <= most]
        for part, clock in ({"host": host_clock} | ({} if device == "cpu" else {"work": work_clock})).items():
            if not runs:
                return
            samples = interleaved(runs, clock(device), repeats)
            times = {name: statistics.median(seconds) * 1e6 for name, seconds in samples.seconds.items()}
            ratios = {
                name: statistics.median(samples.ratio(NATIVE, name))
                for name in runs
                if NATIVE in runs and name != NATIVE
            }
            yield Row(self.name, part, times, ratios, errors, refused, wrong, samples.steady)


def _repeated(one: Contender) -> Contender:
    """Return the contender with a call before each measured one: models repeat calls, and what is active changed."""

    def prepare() -> Any:
        argument = one.prepare()
        one.call(argument)
        return argument

    return Contender(one.call, prepare)


def _first_sentence(text: str) -> str:
    return text.strip().splitlines()[0].partition(". ")[0]


def _error(output: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the greatest difference, as a fraction of the greatest value; infinity where a value is not finite."""
    if output.shape != reference.shape:
        message = f"an output of {tuple(output.shape)}, where {tuple(reference.shape)} was expected"
        raise ValueError(message)
    difference = float((output.to(reference.dtype) - reference).abs().max() / reference.abs().max())
    return difference if math.isfinite(difference) else math.inf


def sampled(tokens: int) -> torch.Tensor:
    """Return the indices of the queries that are compared, first and last included."""
    return torch.linspace(0, tokens - 1, min(tokens, QUERIES)).long().unique()


def attend_in_float64(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: torch.Tensor,
    *,
    mask: torch.Tensor | None = None,
    is_causal: bool = False,
) -> torch.Tensor:
    """
    Return the attention of some queries by a softmax that is written out, one sequence and head after another.

    Args:
        query: ``(batch, heads, queries, size)``.
        key: ``(batch, heads, keys, size)``.
        value: ``(batch, heads, keys, size)``.
        rows: Indices of queries.
        mask: Boolean, expands to ``(batch, heads, queries, keys)``.
        is_causal: Whether query i attends to the keys up to i.
    """
    rows = rows.to(query.device)
    visible = None
    if mask is not None:
        visible = mask.expand(*query.shape[:3], key.shape[2])[:, :, rows]
    elif is_causal:
        visible = (torch.arange(key.shape[2], device=query.device) <= rows[:, None]).expand(*query.shape[:2], -1, -1)
    output = query.new_zeros((*query.shape[:2], len(rows), value.shape[3]), dtype=torch.float64)
    for one in range(query.shape[0]):
        for head in range(query.shape[1]):
            scores = query[one, head, rows].double() @ key[one, head].double().T * query.shape[3] ** -0.5
            if visible is not None:
                scores = scores.masked_fill(~visible[one, head], -torch.inf)
            output[one, head] = scores.softmax(-1) @ value[one, head].double()
    return output


@frozen
class Report:
    """
    The rows of a run.

    Attributes:
        title: Of the page.
        about: What was measured, in sentences.
        device: ``"cpu"`` or ``"cuda"``.
        names: The contenders, in the order of the columns.
        rows: The rows so far.
    """

    title: str
    about: str
    device: str
    names: tuple[str, ...]
    rows: list[Row] = field(factory=list)

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows, and print each."""
        for row in rows:
            if not self.rows:
                print("\n".join(self._heads()))
            self.rows.append(row)
            print(self._line(row), flush=True)

    def failures(self) -> list[str]:
        """Return a sentence for each wrong result; and one where nothing ran beside native calls."""
        found = {
            f"{row.work}: {name} has an error of {row.errors[name]:.1e} ({NATIVE}: {row.errors.get(NATIVE, 0):.1e})"
            for row in self.rows
            for name in row.wrong
        }
        if not any(row.ratios for row in self.rows):
            found.add("nothing ran beside native calls")
        return sorted(found)

    def to_json(self) -> str:
        """Return all of it as JSON."""
        rows = [{name: getattr(row, name) for name in Row.__slots__ if name != "__weakref__"} for row in self.rows]
        return json.dumps({"machine": self._machine(), "command": command(), "rows": rows}, indent=1) + "\n"

    def to_markdown(self) -> str:
        """Return a page: device, versions, command, the table, and what was refused or is wrong."""
        facts = [f"- {name}: {text}" for name, text in self._machine().items()]
        lines = [f"# {self.title}", "", self.about, "", *facts, f"- command: `{command()}`", ""]
        lines += [*self._heads(), *map(self._line, self.rows), ""]
        unsteady = sorted({f"{row.work}, {row.part}" for row in self.rows if not row.is_steady})
        refused = sorted({(row.work, *one) for row in self.rows for one in row.refused.items()})
        lines += [f"- {work}: {name} does not run it: {why}" for work, name, why in refused]
        lines += [f"- medians that are not known to 1 %: {'; '.join(unsteady)}"] if unsteady else []
        lines += [f"- WRONG: {one}" for one in self.failures()]
        return "\n".join(lines).rstrip() + "\n"

    def write(self, markdown: Path | None, data: Path | None) -> int:
        """Write the files that were requested; return the exit code, 1 where a result is wrong."""
        if markdown:
            markdown.write_text(self.to_markdown(), encoding="utf-8")
        if data:
            data.write_text(self.to_json(), encoding="utf-8")
        for one in self.failures():
            print(f"WRONG: {one}", file=sys.stderr)
        return int(bool(self.failures()))

    def _heads(self) -> list[str]:
        ratios = [f"{NATIVE} / {name}" for name in self.names if name != NATIVE]
        heads = [
            "work",
            "part",
            *(f"{name}, us" for name in self.names),
            *ratios,
            *(f"{one}: error" for one in self.names),
        ]
        return [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]

    def _line(self, row: Row) -> str:
        times = [f"{row.microseconds[name]:.1f}" if name in row.microseconds else "-" for name in self.names]
        ratios = [f"{row.ratios[name]:.2f}" if name in row.ratios else "-" for name in self.names if name != NATIVE]
        errors = [f"{row.errors[name]:.1e}" if name in row.errors else "-" for name in self.names]
        return f"| {' | '.join([row.work, row.part, *times, *ratios, *errors])} |"

    def _machine(self) -> dict[str, str]:
        versions = {name: found for name in DISTRIBUTIONS if (found := _version(name))}
        here = machine()
        name = torch.cuda.get_device_name() if self.device == "cuda" else here["processor"]
        return {
            "device": f"{name}{f', CUDA {torch.version.cuda}' if self.device == 'cuda' else ', 1 thread'}",
            "versions": ", ".join(f"{one} {found}" for one, found in versions.items()),
            "Python": platform.python_version(),
            "load": f"{here['load']} on {here['processors']} processors",
        }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def command() -> str:
    """Return the command of this process, without folders."""
    return shlex.join(["python", *(one.rpartition("/")[2] if one.startswith("/") else one for one in sys.argv)])
