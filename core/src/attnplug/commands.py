"""
What a command of ``attnplug`` is written with: exit codes, output, rows, errors, and versions.

A distribution adds a command by an entry point in the group ``attnplug.commands``: the name is the command's, the value
A distribution adds a command by an entry point in the group ``attnplug.commands``: the name is the command, the value
The built-in commands ``list``, ``explain`` and ``doctor`` cannot be replaced.
"""

from __future__ import annotations

import platform
import re
import shutil
import sys
from importlib import metadata
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from attnplug.errors import AttnplugError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from rich.console import Console
    from rich.table import Table


OK: Final = 0
"""The answer is yes."""

NO: Final = 1
"""The answer is no: nothing can serve, something is broken, a budget is missed."""

WRONG: Final = 2
"""The question is wrong: an unknown option, impossible requirements, a setting that does not parse."""

INTERRUPTED: Final = 130
"""The user stopped it (128 + SIGINT)."""

PIPE_CLOSED: Final = 141
"""Whoever read the output went away (128 + SIGPIPE), as ``head`` does."""


WIDEST: Final = 120
"""Columns beyond which lines are hard to read."""


def say(text: str = "") -> None:
    """Write a line."""
    sys.stdout.write(f"{text}\n")


def say_json(data: Any) -> None:
    """Write one JSON document."""
    import json  # noqa: PLC0415 - only for those who ask for JSON

    say(json.dumps(data, indent=2))


def complain(text: str) -> None:
    """Write a line to standard error."""
    sys.stderr.write(f"{text}\n")


def is_terminal() -> bool:
    """Whether a person reads the output: then tables and colors, otherwise plain text."""
    return sys.stdout.isatty()


def console() -> Console:
    """Return rich's view of the terminal, which honors NO_COLOR, TERM and COLUMNS."""
    from rich.console import Console  # noqa: PLC0415 - costs 60 ms, and plain output does without

    found = Console(highlight=False)
    found.width = min(found.width, WIDEST)
    return found


def make_printable() -> None:
    """Let text through that the output's encoding does not have, as escapes, instead of failing half-way."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def report_error(error: AttnplugError, *, as_json: bool) -> None:
    """Write an error: to standard error, and as JSON to standard output too where JSON was asked for."""
    if as_json:
        say_json({"error": describe_error(error)})
    if _is_strict():
        import traceback  # noqa: PLC0415 - for plugin authors, on request

        traceback.print_exception(error)
    else:
        complain(str(error) if error.problem.startswith("attnplug ") else f"attnplug: {error}")


def describe_error(error: AttnplugError) -> Mapping[str, Any]:
    """Return an error as plain JSON values."""
    place = {name: value for name in ("path", "line") if (value := getattr(error, name, None))}
    sentences = {"problem": error.problem, "expected": error.expected, "fix": error.fix}
    return {"type": type(error).__name__, **sentences, **place}


def _is_strict() -> bool:
    """Read the strict setting once more: what is reported may be a setting that does not parse."""
    from attnplug.request.settings import Settings  # noqa: PLC0415 - only errors come by here

    try:
        return Settings.read().strict
    except AttnplugError:
        return False


STYLES: Final = {
    "ready": "green",
    "chosen": "bold green",
    "eligible": "cyan",
    "loaded": "green",
    "not asked": "dim",
    "missing_dependency": "yellow",
    "absent": "dim",
    "refused": "red",
    "broken": "bold red",
    "failed": "bold red",
}
"""How each status looks, where colors are shown."""

_INDENT: Final = "    "


@frozen
class Row:
    """
    One candidate.

    Attributes:
        id: ``backend/variant``.
        status: Its availability, or its verdict.
        lines: What is to be said about it, a sentence each.
        distribution: The distribution that offers it, with its version.
    """

    id: str
    status: str
    lines: tuple[str, ...]
    distribution: str = ""


def say_rows(rows: Sequence[Row], heading: str) -> None:
    """
    Write rows.

    Args:
        rows: The candidates.
        heading: What the column of sentences is about.
    """
    if is_terminal():
        console().print(table(rows, heading))
    else:
        say("\n\n".join("\n".join(plain(row)) for row in rows))


def table(rows: Sequence[Row], heading: str) -> Table:
    """Return rows as a table that stays readable at 80 columns."""
    from rich.markup import escape  # noqa: PLC0415 - only a terminal needs rich
    from rich.table import Table  # noqa: PLC0415 - likewise

    found = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    found.add_column("candidate", max_width=26, overflow="fold")
    found.add_column("status", no_wrap=True)
    found.add_column(heading, overflow="fold")
    for row in rows:
        lines = [_styled(escape(line)) for line in row.lines]
        lines += [f"[dim]{escape(row.distribution)}[/]"] if row.distribution else []
        space = "" if row is rows[-1] else "\n"
        status = f"[{STYLES[row.status]}]{readable(row.status)}[/]"
        found.add_row(f"[bold]{escape(row.id)}[/]", status, "\n".join(lines) + space)
    return found


def _styled(line: str) -> str:
    """Let the eye find the fix."""
    head, colon, rest = line.partition(": ")
    return f"[green]{head}[/]{colon}{rest}" if head == "fix" else line


def plain(row: Row) -> Iterator[str]:
    """Yield a row as lines of text."""
    yield f"{row.id}  {readable(row.status)}" + (f"  ({row.distribution})" if row.distribution else "")
    for line in row.lines:
        yield from wrapped(line, _INDENT)


def wrapped(text: str, indent: str = "") -> list[str]:
    """Return a sentence as lines of the terminal's width, but no more than 120 columns."""
    return wrap(
        text,
        min(shutil.get_terminal_size().columns, WIDEST),
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    ) or [indent]


def readable(status: str) -> str:
    """Return a status as words."""
    return status.replace("_", " ")


_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def abbreviated(names: Sequence[str]) -> str:
    """Return the names of layers, those that differ in one number alone written once, with how many they are."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        found = _NUMBER.search(name)
        template = name if found is None else f"{name[: found.start()]}{{}}{name[found.end() :]}"
        numbers.setdefault(template, []).extend([int(found[0])] if found else [])
    written = [template.replace("{}", _progression(ids)) if ids else template for template, ids in numbers.items()]
    return f"{', '.join(written)} ({len(names)} layer{'s' * (len(names) != 1)})"


def _progression(numbers: Sequence[int]) -> str:
    """Write numbers with every run of three or more in equal steps as ``first..last`` or ``first..last..step``."""
    if len(numbers) == 1:
        return str(numbers[0])
    parts: list[str] = []
    rest = sorted(numbers)
    while rest:
        length = _run(rest)
        parts.append(_written(rest[:length]) if length > 2 else str(rest[0]))
        rest = rest[length if length > 2 else 1 :]
    return f"{{{','.join(parts)}}}"


def _run(numbers: Sequence[int]) -> int:
    """Return how many of the first numbers lie in equal steps."""
    if len(numbers) < 3:
        return 1
    step = numbers[1] - numbers[0]
    return next((i for i in range(1, len(numbers)) if numbers[i] - numbers[i - 1] != step), len(numbers))


def _written(run: Sequence[int]) -> str:
    step = run[1] - run[0]
    return f"{run[0]}..{run[-1]}" if step == 1 else f"{run[0]}..{run[-1]}..{step}"


PACKAGES: Final = ("attnplug", "torch", "triton", "transformers", "nvidia-ml-py")
"""The distributions whose versions matter to every backend. What a plugin requires is told with the plugin."""


def environment() -> dict[str, Any]:
    """Return the environment as plain JSON values. Nothing is imported to find a version."""
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "versions": {name: version for name in PACKAGES if (version := version_of(name))},
    }


def version_of(name: str) -> str:
    """Return the installed version of a distribution, or an empty text."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""
