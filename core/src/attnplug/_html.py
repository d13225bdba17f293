"""
Tables for notebooks. They have no scripts, no links and no colors: text and lines take those of the notebook, light or
dark.

What others wrote is escaped twice: what is not printable, as on a terminal, then what means something in HTML.
"""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Final

from attnplug._escape import escaped

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

Cell = str | tuple[str, ...]
"""A text, or its lines."""

_PLAIN: Final = 'style="border-collapse:collapse;color:inherit;background:transparent"'
_CELL: Final = 'style="text-align:left;vertical-align:top;border-bottom:1px solid currentColor;padding:.2em .6em"'


def text(value: str) -> str:
    """Return one line of text as HTML."""
    return escape(escaped(value))


def block(title: str, lines: Iterable[str], *parts: str) -> str:
    """Return a title, lines of text below it, and parts that are HTML already."""
    said = "".join(f"<div>{text(line)}</div>" for line in lines)
    return f"<div {_PLAIN}><strong>{text(title)}</strong>{said}{''.join(parts)}</div>"


def table(heads: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Return a table, or nothing without rows."""
    body = "".join(f"<tr>{''.join(f'<td {_CELL}>{_cell(each)}</td>' for each in row)}</tr>" for row in rows)
    head = "".join(f"<th {_CELL}>{text(each)}</th>" for each in heads)
    return f"<table {_PLAIN}><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if body else ""


def folded(title: str, inner: str, *, unfolded: bool = False) -> str:
    """Return HTML that a click on the title opens and folds; nothing without content."""
    return f"<details{' open' * unfolded}><summary>{text(title)}</summary>{inner}</details>" if inner else ""


def _cell(value: Cell) -> str:
    lines = (value,) if isinstance(value, str) else value
    return "<br>".join(map(text, lines))
