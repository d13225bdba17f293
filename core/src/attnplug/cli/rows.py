"""Candidates as a list that reads well: a table on a terminal, plain text elsewhere."""

from __future__ import annotations

import shutil
from textwrap import wrap
from typing import TYPE_CHECKING, Final

from attrs import frozen

from attnplug.cli.output import WIDEST, console, is_terminal, say

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.table import Table

STYLES: Final = {
    "ready": "green",
    "chosen": "bold green",
    "eligible": "cyan",
    "loaded": "green",
    "not asked": "dim",
    "lacks_dependency": "yellow",
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
        status: Its standing, or its verdict.
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
    """Let the eye find the way out."""
    head, colon, rest = line.partition(": ")
    return f"[green]{head}[/]{colon}{rest}" if head == "way out" else line


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
