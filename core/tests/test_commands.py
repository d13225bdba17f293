"""Rows on a terminal of 80 columns, and anywhere else."""

from __future__ import annotations

import io
from collections import Counter
from typing import TYPE_CHECKING, get_args

from rich.console import Console

from attnplug.commands import STYLES, Row, plain, table
from attnplug.negotiation.candidate import Availability
from attnplug.negotiation.verdict import Status

if TYPE_CHECKING:
    import pytest

LONG = Row(
    "some_long_backend_name/and_a_variant",
    "missing_dependency",
    (
        "- does not support [red]head_size=512[/red]; supported: multiples of 8 up to 256",
        f"- {'x' * 90}",
        "fix: run on cuda:9.0",
    ),
    "a-distribution 1.0",
)
SHORT = Row("torch/sdpa", "ready", ("torch's own kernels",))


def _drawn(*rows: Row, **options: object) -> str:
    console = Console(width=80, file=io.StringIO(), color_system=None, **options)
    console.print(table(rows, "why"))
    return console.file.getvalue()


def _joined(text: str) -> str:
    return "".join(text.split())


def test_a_table_fits_80_columns_and_loses_nothing() -> None:
    drawn = _drawn(LONG)

    assert max(map(len, drawn.splitlines())) <= 80
    for letters in (*LONG.lines, LONG.distribution, LONG.id, "missing dependency"):
        assert Counter(_joined(letters)) <= Counter(_joined(drawn))


def test_the_text_of_a_plugin_is_no_markup() -> None:
    assert "[red]head_size=512[/red]" in _drawn(LONG)


def test_rows_are_separated_by_a_blank_line() -> None:
    lines = _drawn(LONG, SHORT).splitlines()

    assert lines[-1].split() == ["torch/sdpa", "ready", "torch's", "own", "kernels"]
    assert not lines[-2].strip()


def test_plain_text_wraps_with_an_indent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")

    lines = list(plain(LONG))

    assert lines[0] == "some_long_backend_name/and_a_variant  missing dependency  (a-distribution 1.0)"
    assert lines[1:] == [
        "    - does not support [red]head_size=512[/red]; supported:",
        "      multiples of 8 up to 256",
        "    -",
        f"      {'x' * 90}",  # a path stays in one piece, so that it can be copied
        "    fix: run on cuda:9.0",
    ]


def test_every_status_has_a_style() -> None:
    assert {*get_args(Availability), *get_args(Status)} <= set(STYLES)
