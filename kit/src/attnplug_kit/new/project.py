"""The files of a new plugin project."""

from __future__ import annotations

from importlib import resources
from typing import TYPE_CHECKING, Final

from attnplug.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from attnplug_kit.new.name import Name

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
"""Each file of a project, and the template that it is made from."""


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
        RequestError: Something is there, or the folder cannot be written.
    """
    made: list[Path] = []
    try:
        _check_empty(folder)
        for path, text in files.items():
            _write(folder / path, text, made)
    except OSError as error:
        _unmake(made)
        raise RequestError(
            f"the project was to be written to {str(folder)!r}: {error.strerror or error}",
            "it is a folder that can be made and written",
            "name another one: --path DIR",
        ) from error


def _write(file: Path, text: str, made: list[Path]) -> None:
    """Write a file, and note what is new: the file, and the folders above it."""
    for folder in reversed([each for each in file.parents if not each.exists()]):
        folder.mkdir()
        made.append(folder)
    with file.open("x", encoding="utf-8") as opened:
        made.append(file)
        opened.write(text)


def _unmake(made: list[Path]) -> None:
    """Leave nothing half done."""
    for path in reversed(made):
        if path.is_dir():
            path.rmdir()
        else:
            path.unlink()


def _check_empty(folder: Path) -> None:
    if not folder.exists() and not folder.is_symlink():
        return
    found = sorted(child.name for child in folder.iterdir())
    if found:
        raise RequestError(
            f"the project was to be written to {str(folder)!r}, which has {found[0]!r} in it",
            "nothing is overwritten: the folder is a new one, or empty",
            "name another one: --path DIR",
        )


def _filled(text: str, words: Mapping[str, str]) -> str:
    for word, value in words.items():
        text = text.replace(f"{{{{{word}}}}}", value)
    return text
