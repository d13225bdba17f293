"""A new plugin project: its name, the names that follow from it, and its files."""

from __future__ import annotations

import re
from importlib import resources
from typing import TYPE_CHECKING, Final

from attrs import frozen

from attnplug.errors import RequestError
from attnplug.negotiation import AUTO
from attnplug.request import near
from attnplug_kit.check.names import other_backends

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FILES: Final = {
    "README.md": "README.md.in",
    "pyproject.toml": "pyproject.toml.in",
    ".gitignore": "gitignore.in",
    "src/{{package}}/__init__.py": "__init__.py.in",
    "src/{{package}}/attnplug.toml": "attnplug.toml.in",
    "src/{{package}}/plugin.py": "plugin.py.in",
    "src/{{package}}/backend.py": "backend.py.in",
    "tests/test_conformance.py": "test_conformance.py.in",
}
"""Each file of a project, with its template."""

_VALID: Final = re.compile(r"[a-z][a-z0-9]*(?:_[a-z0-9]+)*")
_PREFIX: Final = re.compile(r"^attnplug_")


@frozen
class Name:
    """
    The name of a new backend.

    Attributes:
        name: The backend's, such as ``"flash_attn"``.
    """

    name: str

    @property
    def distribution(self) -> str:
        """The name for pip, in the normalized spelling of PEP 503."""
        return f"attnplug-{self.name.replace('_', '-')}"

    @property
    def package(self) -> str:
        """The import name."""
        return f"attnplug_{self.name}"

    @property
    def class_prefix(self) -> str:
        """The beginning of its classes' names."""
        return "".join(word.capitalize() for word in self.name.split("_"))


def new_name(text: str) -> tuple[Name, str]:
    """
    Return the name, and a similar name of another backend, or an empty text.

    Raises:
        RequestError: The name is invalid, or another backend has it.
    """
    _check_form(text)
    others = other_backends()
    for other in others:
        if text in (other.name, *other.aliases):
            raise RequestError(
                f"the name {text!r} was given",
                f"a name belongs to one distribution; that is {'an alias of ' * (text != other.name)}{other}",
                "choose another name",
            )
    similar = near(text, tuple(each.name for each in others))
    return Name(text), similar.partition("'")[2].partition("'")[0]


def _check_form(text: str) -> None:
    if _VALID.fullmatch(text) and text != AUTO and not _PREFIX.match(text):
        return
    meant = _PREFIX.sub("", re.sub(r"[^a-z0-9]+", "_", text.lower())).strip("_")
    valid = _VALID.fullmatch(meant) and meant != AUTO
    raise RequestError(
        f"the name {text!r} was given",
        "it has lower-case letters, digits and single underscores, begins with a letter and without attnplug; "
        f"{AUTO!r} means any backend",
        f"attnplug new {meant}" if valid else "choose another name, such as acme",
    )


def render(name: Name) -> dict[str, str]:
    """Return the text of each file, by its path in the project."""
    words = {
        "name": name.name,
        "distribution": name.distribution,
        "package": name.package,
        "class": name.class_prefix,
    }
    templates = resources.files("attnplug_kit.new").joinpath("template")
    return {
        _filled(path, words): _filled(templates.joinpath(template).read_text(encoding="utf-8"), words)
        for path, template in FILES.items()
    }


def write(folder: Path, files: Mapping[str, str]) -> None:
    """
    Write a project into a folder that does not exist yet, or is empty.

    Raises:
        RequestError: The folder is not empty, or cannot be written. Nothing is left half done.
    """
    made: list[Path] = []
    try:
        _check_empty(folder)
        for path, text in files.items():
            _write(folder / path, text, made)
    except OSError as error:
        for each in reversed(made):
            each.rmdir() if each.is_dir() else each.unlink()
        raise RequestError(
            f"the project cannot be written to {str(folder)!r}: {error.strerror or error}",
            "it is a folder that can be created and written",
            "name another one: --path DIR",
        ) from error


def _write(file: Path, text: str, made: list[Path]) -> None:
    """Write a file, and record what is new: the file, and the folders above it."""
    for folder in reversed([each for each in file.parents if not each.exists()]):
        folder.mkdir()
        made.append(folder)
    with file.open("x", encoding="utf-8") as opened:
        made.append(file)
        opened.write(text)


def _check_empty(folder: Path) -> None:
    if not folder.exists() and not folder.is_symlink():
        return
    found = sorted(child.name for child in folder.iterdir())
    if found:
        raise RequestError(
            f"the project cannot be written to {str(folder)!r}, which contains {found[0]!r}",
            "the folder is new or empty: nothing is overwritten",
            "name another one: --path DIR",
        )


def _filled(text: str, words: Mapping[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(f"{{{{{word}}}}}", value)
    return text
