"""
Runs the code that the documentation shows: ``python -m tools.snippets README.md``.

- The ``python`` blocks of one page run in order and share a namespace.
- In a ``console`` block every line ``$ attnplug ...`` runs, and what follows it is its output.
- A ``text`` block right after a ``python`` block is that block's output.
- ``...`` in an output matches anything, in a line or as full lines.
- ``<!-- exits: 3 -->`` above a console block announces that its commands exit with 3 and not with 0.
- ``<!-- not run: REASON -->`` above a block is the only way to show code that does not run.
- ``<!-- needs: MODULE -->`` above a block: the page needs a module that some environments cannot have, from there on.
- ``<!-- in: an empty folder -->`` above a console block: from there on, commands run in a temporary folder with a
  separate environment, where ``cd``, ``pip install`` and ``pytest`` run too (`tools.session`).
- ``<!-- in: a new environment -->``: from there on they run in the checkout, in an environment that has what the page
  installs, what that requires, and nothing else.
- ``<!-- shows: FILE -->`` above a block says that the file contains its code; ``<!-- writes: FILE -->`` writes the
  block to the file; ``<!-- edits: FILE -->`` above a ``diff`` block applies it to the file.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import sys
import textwrap
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve, field, frozen

from tools.session import Session, SessionError

if TYPE_CHECKING:
    from collections.abc import Iterator

RUNNABLE = ("python", "console")
FILE_NOTES = ("shows", "writes", "edits")
_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>```+)(?P<language>[\w-]*)(?P<rest>.*)$")
_NOTE = re.compile(r"^ *<!-- (?P<key>not run|needs|exits|in|shows|writes|edits): *(?P<value>.*?) *-->$")


class SnippetError(Exception):
    """A block of the documentation does not do what the page says."""


@frozen
class Block:
    """
    One fenced block.

    Attributes:
        page: The file, as given.
        line: Line of the first line of code, counted from 1.
        language: The word behind the fence.
        code: The text between the fences, without the indentation of the fence.
        expected: What a python block prints, where the page shows it.
        notes: The comments above the block, by their key.
    """

    page: str
    line: int
    language: str
    code: str
    expected: str | None = None
    notes: dict[str, str] = field(factory=dict)

    @property
    def runs(self) -> bool:
        """Whether the block is run at all."""
        return "not run" not in self.notes and (self.language in RUNNABLE or self.file_note is not None)

    @property
    def file_note(self) -> str | None:
        """What the block does with a file: shows, writes or edits it; None without a file."""
        return next((key for key in FILE_NOTES if key in self.notes), None)


def blocks(page: str, text: str) -> list[Block]:
    """
    Return the fenced blocks of a page, each python block with the output that is shown right below it.

    Raises:
        SnippetError: A fence is not closed, or a note has no reason or is above no block.
    """
    found: list[Block] = []
    for block, follows in _fenced(page, text.splitlines()):
        if follows and block.language == "text" and found[-1].language == "python":
            found[-1] = evolve(found[-1], expected=block.code)
        found.append(block)
    return found


def _fenced(page: str, lines: list[str]) -> Iterator[tuple[Block, bool]]:
    """Yield each block, and whether only blank lines separate it from the block before."""
    notes: dict[str, str] = {}
    follows = False
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if fence := _FENCE.match(line):
            end = _closing(page, lines, number, fence["ticks"])
            code = textwrap.dedent("\n".join(lines[number:end]))
            yield Block(page, number + 1, fence["language"], code, notes=notes), follows
            notes, follows, number = {}, True, end + 1
        elif note := _NOTE.match(line):
            notes = {**notes, note["key"]: _value(f"{page}:{number}", note)}
        elif line.strip():
            _no_notes(f"{page}:{number}", notes)
            follows = False
    _no_notes(f"{page}:{number}", notes)


def _closing(page: str, lines: list[str], start: int, ticks: str) -> int:
    for number in range(start, len(lines)):
        if lines[number].strip() == ticks:
            return number
    raise SnippetError(f"{page}:{start} the fence is never closed")


def _value(where: str, note: re.Match[str]) -> str:
    if not note["value"]:
        raise SnippetError(f"{where} the note {note['key']!r} needs a value: <!-- {note['key']}: ... -->")
    return note["value"]


def _no_notes(where: str, notes: dict[str, str]) -> None:
    if notes:
        raise SnippetError(f"{where} the note {next(iter(notes))!r} is not above a block")


def run_page(page: str, text: str) -> int:
    """
    Run the blocks of a page and return how many ran.

    Raises:
        SnippetError: A block raised, printed something else, or exited with another status.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    chosen = [block for block in blocks(page, text) if block.runs]
    with Session() as session:
        for block in chosen:
            if block.file_note is not None:
                _apply_file_note(block, block.file_note, session)
            elif block.language == "python":
                _run_python(block, namespace)
            else:
                _run_console(block, session)
    return len(chosen)


def _apply_file_note(block: Block, how: str, session: Session) -> None:
    """Compare a file with the block, or change it as the block says."""
    name = block.notes[how]
    where = f"{block.page}:{block.line} {how} {name}"
    try:
        if how == "shows":
            text = session.read(name)
            if not any(matches(f"...{textwrap.indent(block.code, ' ' * depth)}...", text) for depth in range(0, 17, 4)):
                raise SnippetError(f"{where}: it is not in the file\n--- the page\n{block.code}\n--- the file\n{text}")
        elif how == "writes":
            session.write(name, f"{block.code}\n")
        else:
            session.edit(name, block.code)
    except SessionError as error:
        raise SnippetError(f"{where}: {error}") from error


def _run_python(block: Block, namespace: dict[str, Any]) -> None:
    printed = io.StringIO()
    lines_above = "\n" * (block.line - 1)  # so that a traceback names the line of the page
    try:
        with redirect_stdout(printed):
            exec(compile(lines_above + block.code, block.page, "exec", dont_inherit=True), namespace)  # noqa: S102 - the project's own pages
    except Exception as error:
        raise SnippetError(f"{block.page}:{block.line} raised {type(error).__name__}: {error}") from error
    if block.expected is not None:
        _compare(f"{block.page}:{block.line}", block.expected, printed.getvalue())


def _run_console(block: Block, session: Session) -> None:
    if "in" in block.notes:
        _enter(block, session)
    for command, expected in commands(block):
        where = f"{block.page}:{block.line} {command}"
        try:
            done = session.run(shlex.split(command, comments=True))
        except SessionError as error:
            raise SnippetError(f"{where}: {error}; mark the block <!-- not run: reason -->") from error
        wanted = int(block.notes.get("exits", "0"))
        if done.returncode != wanted:
            raise SnippetError(f"{where}: exits with {done.returncode}, not {wanted}\n{done.stdout}{done.stderr}")
        if expected:
            _compare(where, expected, done.stdout + done.stderr)


def _enter(block: Block, session: Session) -> None:
    try:
        session.enter(block.notes["in"])
    except SessionError as error:
        raise SnippetError(f"{block.page}:{block.line} <!-- in: {block.notes['in']} -->: {error}") from error


def commands(block: Block) -> list[tuple[str, str]]:
    """Return each command of a console block with the output that is shown below it; a backslash continues it."""
    found: list[tuple[str, str]] = []
    for part in re.split(r"^\$ ", block.code, flags=re.MULTILINE)[1:]:
        command, _, output = part.replace("\\\n", " ").partition("\n")
        found.append((command, output.strip("\n")))
    return found


def _compare(where: str, expected: str, printed: str) -> None:
    if not matches(expected, printed):
        raise SnippetError(f"{where} printed something else\n--- the page\n{expected}\n--- the run\n{printed}")


def matches(expected: str, printed: str) -> bool:
    """Return whether the page shows this output; ``...`` matches anything, blanks at line ends do not count."""
    wanted, got = ("\n".join(line.rstrip() for line in text.strip("\n").splitlines()) for text in (expected, printed))
    pattern = ".*?".join(re.escape(piece) for piece in wanted.split("..."))
    return re.fullmatch(pattern, got, flags=re.DOTALL) is not None


def main(pages: list[str]) -> int:
    """Run the pages, print what failed, and return the exit status."""
    os.environ["COLUMNS"] = "100"  # what pages show, whatever the terminal of the run
    try:
        for page in pages:
            print(f"{page}: {run_page(page, Path(page).read_text('utf-8'))} blocks ran")
    except SnippetError as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
