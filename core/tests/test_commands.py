"""Rows on a terminal of 80 columns, and anywhere else."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections import Counter
from typing import get_args

import pytest
from rich.console import Console

from attnplug.commands import STYLES, Row, plain, table, tracked, wrapped
from attnplug.negotiation.candidate import Availability
from attnplug.negotiation.install import is_command
from attnplug.negotiation.verdict import Status

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


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_long_work_has_a_bar_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    for stream, wanted, shown in ((io.StringIO(), True, False), (_Terminal(), False, False), (_Terminal(), True, True)):
        monkeypatch.setattr("sys.stderr", stream)

        items = tracked(["one[red]", "two\x1b"], "measuring {}".format, shown=wanted)
        assert list(items) == ["one[red]", "two\x1b"]

        assert ("measuring one[red]" in stream.getvalue()) is shown
        assert ("measuring two\\x1b" in stream.getvalue()) is shown
        assert shown or not stream.getvalue()


@pytest.mark.parametrize("no_color", [True, False])
def test_a_bar_counts_on_leaves_the_output_alone_and_honors_no_color(
    monkeypatch: pytest.MonkeyPatch, *, no_color: bool
) -> None:
    error, output = _Terminal(), io.StringIO()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr("sys.stderr", error)
    monkeypatch.setattr("sys.stdout", output)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    else:
        monkeypatch.delenv("NO_COLOR", raising=False)

    for item in tracked(["third"], str, done=2, total=4):
        sys.stdout.write(item)

    assert "2/4" in error.getvalue()
    assert output.getvalue() == "third"
    assert error.getvalue().endswith("\x1b[2K"), "the bar is erased"
    assert bool(re.search(r"\x1b\[(3[0-9]|38;)", error.getvalue())) is not no_color


def test_a_command_is_continued_as_a_shell_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    command = "pip install --no-build-isolation 'flash-attn >=2.7.1,<2.9' 'other >=1'  # its build imports torch, too"

    lines = wrapped(f"fix: {command}", "  ")

    assert max(map(len, lines)) <= 50
    script = "\n".join(lines).replace("fix: pip", "printf '%s|'", 1)
    done = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "install|--no-build-isolation|flash-attn >=2.7.1,<2.9|other >=1|"


@pytest.mark.parametrize(
    ("instruction", "is_one"),
    [
        ("pip install 'acme >=1'", True),
        ("pip install 'acme >=1'  # its build needs torch", False),
        ("pip install --no-build-isolation acme", True),
        ("pip install acme>=1", False),
        ("pip install acme; id", False),
        ("pip install acme && id", False),
        ("pip install 'acme @ https://example.org/a.whl'", False),
        ("pip install --index-url https://example.org acme", False),
        ("pip install 'acme", False),
        ("pip install acme  # \x1b[2J", False),
        ("pip install", False),
        ("from its vendor", False),
    ],
)
def test_an_instruction_is_offered_as_a_command_if_safe(instruction: str, is_one: bool) -> None:
    assert is_command(instruction) is is_one
