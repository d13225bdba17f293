"""Lines that fit the terminal: how wide it is, sentences over several lines, and what is cut to one."""

from __future__ import annotations

from typing import Final

from attnplug._escape import escaped

PIPED: Final = 100
"""Columns where the output is no terminal, and COLUMNS is not set."""

WIDEST: Final = 120
"""Columns of a sentence at most: longer lines are hard to read."""

_COMMANDS: Final = ("pip install ", "fix: pip install ", "then pip install ")
_NO_BREAK: Final = "\u00a0"  # where textwrap does not break; escaped text has none
_QUOTES: Final = "'\""


def width() -> int:
    """Return the columns of the terminal, which COLUMNS overrides; `PIPED` where there is none."""
    from shutil import get_terminal_size  # noqa: PLC0415 - JSON does without, and has a budget

    return get_terminal_size((PIPED, 24)).columns


def wrapped(text: str, indent: str = "", columns: int | None = None) -> list[str]:
    """
    Return a sentence as lines. A command is continued as a shell reads it, so that it can be copied as it stands.

    Args:
        text: The sentence, or the command, which may follow ``fix:`` or ``then``.
        indent: What each line begins with; those after the first have two spaces more.
        columns: The most columns of a line; by default those of the terminal, but no more than `WIDEST`.
    """
    most = min(width(), WIDEST) if columns is None else columns
    return _command(text, indent, most) if text.startswith(_COMMANDS) else _lines(escaped(text), indent, most)


def _lines(text: str, indent: str, columns: int) -> list[str]:
    from textwrap import wrap  # noqa: PLC0415 - as above

    return wrap(
        text,
        columns,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    ) or [indent]


def _command(text: str, indent: str, columns: int) -> list[str]:
    command, mark, comment = escaped(text).partition("  # ")
    lines = _lines(_with_whole_quotes(command), indent, columns - len(" \\"))
    found = [line.replace(_NO_BREAK, " ") for line in lines]
    found[:-1] = [f"{line} \\" for line in found[:-1]]
    if mark and len(found[-1]) + len(mark) + len(comment) <= columns:
        found[-1] += mark + comment
    elif mark:  # a comment ends with its line, whatever it ends with
        found += [f"{indent}  # {line}" for line in _lines(comment, "", columns - len(indent) - 4)]
    return found


def shortened(text: str, columns: int) -> str:
    """Return one line of no more than so many columns, with an ellipsis where something is cut."""
    line = escaped(text)
    return line if len(line) <= columns else f"{line[: max(columns - 1, 0)].rstrip()}…"


def _with_whole_quotes(command: str) -> str:
    """Return a command whose quoted arguments have no space that a line may end at."""
    found, quote = [], ""
    for character in command:
        if character in _QUOTES and quote in ("", character):
            quote = "" if quote else character
        found.append(_NO_BREAK if quote and character == " " else character)
    return "".join(found)
