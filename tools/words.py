"""
The word lint: finds the phrases of words.toml in the files of this repository.

    python -m tools.words               in every file that git tracks or would add
    python -m tools.words docs core     in those below some paths
    python -m tools.words --count       how often, per phrase and per folder

The exit status is 1 where a phrase is found.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections import Counter
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from tools.toml import read_toml

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

ROOT: Final = Path(__file__).parents[1]
LIST: Final = Path(__file__).with_name("words.toml")

# Between two words of CamelCase.
_HUMP: Final = r"(?<=[a-z0-9])(?=[A-Z])"
# One line break inside a sentence, with the quotes of a string that goes on below and the marker of a comment.
_BREAK: Final = r"""[ \t]*["']?[ \t]*\\?\r?\n[ \t]*(?:\#+:?|//|>)?[ \t]*(?:[rbf]{0,2}["'])?[ \t]*"""
_GAP: Final = rf"(?:[ \t]+|[_-]|\\n[ ]*|{_BREAK}|{_HUMP})"
# A letter or digit beside a phrase makes it another word. The "n" of an escaped line break does not.
_BEFORE: Final = re.compile(rf"(?<![A-Za-z0-9])|(?<=\\[nrt])|{_HUMP}")
_AFTER: Final = rf"(?:(?![A-Za-z0-9])|{_HUMP})"
# What a pattern consists of: escapes and heads of groups, classes, letters.
_TOKEN: Final = re.compile(r"(?P<kept>\\.|\(\?(?:[:!=]|<[!=]))|(?P<klass>\[[^\]]*\])|(?P<letter>[A-Za-z])|(?P<gap> )")
# The colon of a comment's marker (#:) ends none.
_SENTENCE_END: Final = re.compile(r"(?<!#)[.:;!?|](?=\s)|\n[ \t]*\n")
# A changelog keeps the words of its releases.
_RELEASE: Final = re.compile(r"^## \[\d", re.MULTILINE)


@frozen
class Phrase:
    """
    One phrase of the list.

    Attributes:
        phrase: The phrase, as messages call it.
        write: What to write instead.
        row: The row of the glossary that it is from.
        pattern: What it matches.
        near: What its sentence has to match, too; None where any sentence counts.
        exempt: Globs of paths that may have it.
    """

    phrase: str
    write: str
    row: str
    pattern: re.Pattern[str]
    near: re.Pattern[str] | None = None
    exempt: tuple[str, ...] = ()

    def find(self, text: str) -> Iterator[int]:
        """Yield where the phrase begins."""
        for found in _matches(self.pattern, text):
            if self.near is None or any(_matches(self.near, _sentence(text, *found.span()))):
                yield found.start()


@frozen
class Hit:
    """One phrase in one file, at a line that counts from 1; None is the file's name."""

    path: str
    line: int | None
    phrase: Phrase

    def __str__(self) -> str:
        place = f"{self.path}:{self.line}" if self.line is not None else f"{self.path}:1: the file's name"
        return f'{place}: "{self.phrase.phrase}": write "{self.phrase.write}"'


@frozen
class Words:
    """
    The list.

    Attributes:
        phrases: The phrases.
        exempt: Globs of paths that are not read.
    """

    phrases: tuple[Phrase, ...]
    exempt: tuple[str, ...]

    @classmethod
    def read(cls, path: Path = LIST) -> Words:
        """Return the list of a file."""
        data = read_toml(path)
        return cls(tuple(map(_phrase, data["phrases"])), tuple(data.get("exempt", ())))

    def check(self, path: str, text: str) -> Iterator[Hit]:
        """Yield the phrases of a file and of its name, line by line."""
        if any(fnmatch(path, glob) for glob in self.exempt):
            return
        if Path(path).name == "CHANGELOG.md":
            text = _RELEASE.split(text, maxsplit=1)[0]
        phrases = [phrase for phrase in self.phrases if not any(fnmatch(path, glob) for glob in phrase.exempt)]
        yield from (Hit(path, None, phrase) for phrase in phrases if any(phrase.find(path)))
        places = sorted((at, index) for index, phrase in enumerate(phrases) for at in phrase.find(text))
        yield from (Hit(path, text.count("\n", 0, at) + 1, phrases[index]) for at, index in places)


def _phrase(data: Mapping[str, Any]) -> Phrase:
    near = data.get("near")
    return Phrase(
        phrase=data["phrase"],
        write=data["write"],
        row=data["row"],
        pattern=compile_pattern(data.get("pattern") or re.escape(data["phrase"]).replace(r"\ ", " ")),
        near=None if near is None else compile_pattern(near),
        exempt=tuple(data.get("exempt", ())),
    )


def compile_pattern(text: str) -> re.Pattern[str]:
    """
    Compile a pattern of the list: a letter is either case of it, a space is any gap between words.

    The flag for either case would keep `re` from looking for the first letter alone: 10 s instead of 2 s for all files.
    """
    return re.compile(f"(?:{_TOKEN.sub(_translate, text)}){_AFTER}")


def _translate(token: re.Match[str]) -> str:
    if token["letter"]:
        return f"[{token[0].lower()}{token[0].upper()}]"
    if token["klass"]:
        return f"(?i:{token[0]})"
    return _GAP if token["gap"] else token[0]


def _matches(pattern: re.Pattern[str], text: str) -> Iterator[re.Match[str]]:
    """Yield the matches that begin a word."""
    at = 0
    while found := pattern.search(text, at):
        begins = _BEFORE.match(text, found.start()) is not None
        at = found.end() if begins else found.start() + 1
        if begins:
            yield found


def _sentence(text: str, start: int, end: int) -> str:
    """Return the sentence, or the cell of a table, around a place."""
    before = [found.end() for found in _SENTENCE_END.finditer(text, 0, start)]
    after = _SENTENCE_END.search(text, end)
    return text[before[-1] if before else 0 : after.start() if after else len(text)]


def files(root: Path, paths: Sequence[str] = ()) -> Iterator[tuple[str, str]]:
    """
    Yield path and text of every text file that git tracks or would add, by path.

    Args:
        root: The repository.
        paths: Files and folders, from the current folder; the whole repository by default.

    Raises:
        CalledProcessError: The folder is not a git repository, or a path is outside of it.
    """
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--"]
    command += [str(Path(path).resolve(strict=True)) for path in paths]
    listed = subprocess.run(command, cwd=root, capture_output=True, check=True, text=True).stdout  # noqa: S603 - git alone
    for name in sorted(set(filter(None, listed.split("\0")))):
        path = root / name
        if path.is_file() and not path.is_symlink():
            content = path.read_bytes()
            if b"\0" not in content:
                yield name, content.decode("utf-8", errors="replace")


def counts(hits: Iterable[Hit]) -> Iterator[str]:
    """Yield how often each phrase is found, and in which folders."""
    found = list(hits)
    yield from _table(Counter(hit.phrase.phrase for hit in found))
    yield ""
    yield from _table(Counter("/".join(Path(hit.path).parts[:-1][:2]) or "." for hit in found))
    yield f"\n{len(found):6} in all"


def _table(counted: Counter[str]) -> Iterator[str]:
    yield from (f"{count:6} {name}" for name, count in sorted(counted.items(), key=lambda item: (-item[1], item[0])))


def main(arguments: Sequence[str], root: Path = ROOT) -> int:
    """Print what is found, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.words", description="Find the phrases of tools/words.toml.")
    parser.add_argument("paths", nargs="*", metavar="PATH", help="files and folders; every file by default")
    parser.add_argument("--count", action="store_true", help="print counts per phrase and per folder")
    options = parser.parse_args(arguments)
    words = Words.read()
    try:
        hits = [hit for path, text in files(root, options.paths) for hit in words.check(path, text)]
    except FileNotFoundError as error:
        parser.error(str(error))
    except subprocess.CalledProcessError as error:
        parser.error(error.stderr.strip())
    print("\n".join(counts(hits) if options.count else map(str, hits)) or "no phrase of tools/words.toml is found")
    return 1 if hits else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
