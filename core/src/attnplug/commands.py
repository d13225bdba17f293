"""
What a command of ``attnplug`` is written with: exit codes, output, rows, errors and versions.

A distribution adds a command by an entry point in the group ``attnplug.commands``. Its name is the command, its value a
module with ``SUMMARY`` (a line of text for ``--help``), ``add_arguments(parser)`` and ``run(arguments)``, which returns
the exit code. The built-in commands ``list``, ``explain`` and ``doctor`` cannot be replaced.

Everything here escapes what could steer a terminal (`escaped`), and reads no markup in any text: what a command prints
holds names, summaries and paths that others have written.
"""

from __future__ import annotations

import re
import sys
from typing import TYPE_CHECKING, Any, Final, TypeVar

from attrs import frozen

from attnplug._columns import shortened, width, wrapped
from attnplug._escape import escaped, escaped_lines
from attnplug._foreign import ForeignCode
from attnplug._install import install_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from attnplug.errors import AttnplugError

__all__ = [
    "INTERRUPTED",
    "NO",
    "OK",
    "PACKAGES",
    "PIPE_CLOSED",
    "SCHEMA_VERSION",
    "STYLES",
    "WRONG",
    "ForeignCode",
    "Lines",
    "Row",
    "abbreviated",
    "complain",
    "console",
    "describe_error",
    "environment",
    "escaped",
    "install_text",
    "is_terminal",
    "plain",
    "readable",
    "say",
    "say_json",
    "say_rows",
    "say_styled",
    "shortened",
    "styled",
    "table",
    "tracked",
    "version_of",
    "width",
    "wrapped",
]

T = TypeVar("T")

OK: Final = 0
"""Everything requested is supported, or there is nothing to report."""

NO: Final = 1
"""Something requested cannot be served, something is broken, a budget is missed."""

WRONG: Final = 2
"""The request is wrong: an unknown option, impossible requirements, a setting that does not parse."""

INTERRUPTED: Final = 130
"""The user stopped it (128 + SIGINT)."""

PIPE_CLOSED: Final = 141
"""The reader of the output closed it (128 + SIGPIPE), as ``head`` does."""

PACKAGES: Final = ("attnplug", "torch", "triton", "transformers", "nvidia-ml-py")
"""The distributions whose versions matter to every backend. What a plugin requires is reported with the plugin."""

STYLES: Final = {
    "ready": "green",
    "chosen": "bold green",
    "eligible": "cyan",
    "loaded": "green",
    "not_loaded": "dim",
    "missing_dependency": "yellow",
    "absent": "dim",
    "other_device": "dim",
    "refused": "red",
    "broken": "bold red",
    "failed": "bold red",
}
"""The style of each status, where colors are shown."""

SCHEMA_VERSION: Final = 1
"""The version of every JSON document: it counts up where a key goes, or means something else. New keys do not count."""

_INDENT: Final = "    "
_NUMBER: Final = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def say(text: str = "") -> None:
    """Write a line, or several."""
    sys.stdout.write(f"{escaped_lines(text)}\n")


def say_json(data: Mapping[str, Any]) -> None:
    """
    Write one JSON document, with its `SCHEMA_VERSION` first. Its texts are escaped as elsewhere, since ``jq -r`` prints
    them as they are.
    """
    import json  # noqa: PLC0415 - only where JSON is requested

    say(json.dumps(_escaped_json({"schema_version": SCHEMA_VERSION, **data}), indent=2))


class Lines(str):
    """A text that may have several lines, such as an error's: `say_json` keeps its line breaks."""

    __slots__ = ()


def _escaped_json(data: Any) -> Any:
    if isinstance(data, str):
        return escaped_lines(data) if isinstance(data, Lines) else escaped(data)
    if isinstance(data, dict):
        return {_escaped_json(key): _escaped_json(value) for key, value in data.items()}
    return [_escaped_json(item) for item in data] if isinstance(data, (list, tuple)) else data


def complain(text: str) -> None:
    """Write a line to standard error, or several."""
    sys.stderr.write(f"{escaped_lines(text)}\n")


def is_terminal() -> bool:
    """Whether a person reads the output: then tables and colors, otherwise plain text."""
    return sys.stdout.isatty()


def console() -> Console:
    """
    Return rich's view of the terminal, which honors NO_COLOR, TERM and COLUMNS. A text has no markup, and is escaped;
    what has a style is made by `styled`.
    """
    from rich.console import Console  # noqa: PLC0415 - costs 60 ms, and plain output does without

    class EscapingConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(escaped_lines(text), **options)

    return EscapingConsole(highlight=False, markup=False, emoji=False, width=width())


def styled(*parts: str | tuple[str, str]) -> Text:
    """Return a line for `console`, from texts and from (text, style) pairs, each escaped."""
    from rich.text import Text  # noqa: PLC0415 - only a terminal needs rich

    pairs = ((part, "") if isinstance(part, str) else part for part in parts)
    return Text.assemble(*((escaped(text), style) for text, style in pairs))


def say_styled(lines: Iterable[Sequence[str | tuple[str, str]]]) -> None:
    """Write lines of texts and of (text, style) pairs, as `styled` takes them; off a terminal without the styles."""
    if is_terminal():
        to = console()
        for line in lines:
            to.print(styled(*line), soft_wrap=True)
    else:
        say("\n".join("".join(escaped(p if isinstance(p, str) else p[0]) for p in line) for line in lines))


def tracked(
    items: Sequence[T], named: Callable[[T], str], *, shown: bool = True, done: int = 0, total: int | None = None
) -> Iterator[T]:
    """
    Yield items of long work, with a progress bar on standard error where that is a terminal. It is drawn between items
    only: nothing runs beside the work. It is erased after the last item, so that the output can follow.

    Args:
        items: The items.
        named: What the bar says while an item is at work.
        shown: Whether there is a bar at all; not where JSON is printed.
        done: How many items were at work before these.
        total: How many there are in all; by default `done` and these.
    """
    if not shown or not sys.stderr.isatty():
        yield from items
        return
    from rich.console import Console  # noqa: PLC0415 - only a terminal needs rich
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn  # noqa: PLC0415 - likewise

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn())
    # Standard output is left alone: rich would write it to the bar's console, which is standard error.
    with Progress(
        *columns, console=Console(stderr=True), auto_refresh=False, transient=True, redirect_stdout=False
    ) as bar:
        task = bar.add_task("", completed=done, total=done + len(items) if total is None else total)
        for item in items:
            bar.update(task, description=escaped(named(item)), refresh=True)
            yield item
            bar.advance(task)


def describe_error(error: AttnplugError) -> Mapping[str, Any]:
    """Return an error as plain JSON values."""
    place = {name: value for name in ("path", "line") if (value := getattr(error, name, None))}
    parts = {"problem": Lines(error.problem), "expected": Lines(error.expected), "fix": Lines(error.fix)}
    return {"type": type(error).__name__, **parts, **place}


@frozen
class Row:
    """
    One candidate.

    Attributes:
        id: ``backend/variant``.
        status: Its availability, or its verdict.
        lines: What there is to say about it, a sentence each.
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
    from rich.table import Table  # noqa: PLC0415 - only a terminal needs rich
    from rich.text import Text  # noqa: PLC0415 - likewise

    found = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    found.add_column("candidate", max_width=26, overflow="fold")
    found.add_column("status", no_wrap=True)
    found.add_column(styled(heading), overflow="fold")
    for row in rows:
        lines = [_with_fix_styled(line) for line in row.lines]
        lines += [styled((row.distribution, "dim"))] if row.distribution else []
        lines += [] if row is rows[-1] else [Text()]
        status = styled((readable(row.status), STYLES[row.status]))
        found.add_row(styled((row.id, "bold")), status, Text("\n").join(lines))
    return found


def _with_fix_styled(line: str) -> Text:
    head, colon, rest = line.partition(": ")
    return styled((head, "green"), f"{colon}{rest}") if head == "fix" else styled(line)


def plain(row: Row) -> Iterator[str]:
    """Yield a row as lines of text."""
    yield escaped(f"{row.id}  {readable(row.status)}" + (f"  ({row.distribution})" if row.distribution else ""))
    for line in row.lines:
        yield from wrapped(line, _INDENT)


def readable(status: str) -> str:
    """Return a status as words."""
    return status.replace("_", " ")


def abbreviated(names: Sequence[str]) -> str:
    """Return the names of layers, those that differ in one number only written once, with their number."""
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


def environment() -> dict[str, Any]:
    """Return the environment as plain JSON values. Nothing is imported to find a version."""
    import platform  # noqa: PLC0415 - few commands report it

    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "platform": platform.platform(),
        "versions": {name: version for name in PACKAGES if (version := version_of(name))},
    }


def version_of(name: str) -> str:
    """Return the installed version of a distribution, or an empty text."""
    from importlib import metadata  # noqa: PLC0415 - costs 20 ms, and `list --json` has a budget

    with ForeignCode("looking for it raises"):  # a finder on sys.meta_path may raise anything
        return metadata.version(name) or ""
    return ""
