"""How to install requirements: a command for a shell, or words where such a command could do something else."""

from __future__ import annotations

from shlex import join, split
from typing import TYPE_CHECKING, Final

from attnplug.manifest.installed import check_requirement

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_SHELL: Final = frozenset("$`\\&|{}")
"""What runs or expands something in a shell where a quote is lost, and what no usual requirement has."""

_OPTIONS: Final = frozenset({"--no-build-isolation", "--no-deps", "--pre", "--upgrade", "-U"})
"""Options of ``pip install`` that fetch from nowhere else."""


def steps_to_install(requirements: Iterable[str]) -> Iterator[str]:
    """
    Yield one command for all requirements that pip may be given, then a sentence for each of the others.

    Requirements come from manifests, which anyone may write. One that names a URL makes pip download and run what is
    there, and one that holds syntax of a shell is safe only as long as nobody copies it without its quotes.
    """
    doubts = [(text, _doubt(text)) for text in requirements]
    offered = [text for text, doubt in doubts if not doubt]
    if offered:
        yield join(("pip", "install", *offered))
    for text, doubt in doubts:
        if doubt:
            yield f"install {text!r} by hand, if you trust it: {doubt}, so that no command is offered"


def is_command(instruction: str) -> bool:
    """
    Whether the words of a manifest are one command that pip may be given: ``pip install`` of requirements without
    doubts, quoted as a shell needs it. A comment is none: what follows it may be cut off, or may not be.
    """
    try:
        words = split(instruction)
    except ValueError:  # a quote that is not closed
        return False
    requirements = [word for word in words[2:] if word not in _OPTIONS]
    return (
        instruction.isprintable()
        and words[:2] == ["pip", "install"]
        and join(words) == instruction
        and bool(requirements)
        and not any(map(_doubt, requirements))
    )


def _doubt(text: str) -> str:
    """Return why a requirement is not offered as a command, or an empty text."""
    if check_requirement(text):
        return "it is not a valid requirement"
    if "@" in text and _names_url(text):
        return "it names a URL"
    if not text.isprintable():
        return "it holds characters that are not printable"
    return "it holds syntax of a shell" if _SHELL & set(text) else ""


def _names_url(text: str) -> bool:
    from packaging.requirements import Requirement  # noqa: PLC0415 - slow to import, and few requirements have an "@"

    return Requirement(text).url is not None
