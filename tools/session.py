"""Where the commands of a page run: here, or in a temporary folder with a separate environment."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, final

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import forked
from tools.toml import read_toml

if TYPE_CHECKING:
    from types import TracebackType

EMPTY = "an empty folder"
NEW = "a new environment"
_MODULES = ("attnplug", "pytest", "pip")
# Nothing is fetched: what a page installs needs nothing that is not here.
_INSTALL = ("--quiet", "--disable-pip-version-check", "--no-index", "--no-build-isolation")
# Settings and measurements of this run, which a temporary folder does not inherit.
_OURS = ("ATTNPLUG_", "COV", "PYTEST")


class SessionError(Exception):
    """A page requests what a session does not support."""


@final
class Session:
    """
    The folder and the Python that commands run with.

    In an empty folder the environment sees all that is installed here, and what is installed there is visible only
    there. A new environment has what is installed there and what that requires, and commands run in the checkout.
    """

    def __init__(self) -> None:
        self.folder = Path()
        self._environment = ""
        self._python = sys.executable
        self._site: Path | None = None  # of a new environment
        self._home: TemporaryDirectory[str] | None = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._home is not None:
            self._home.cleanup()

    def enter(self, place: str) -> None:
        """
        Go on in `EMPTY` or in `NEW`.

        Raises:
            SessionError: It is another place.
        """
        if place not in {EMPTY, NEW}:
            raise SessionError(f"commands run in {EMPTY!r} or {NEW!r} only")
        if self._home is not None:
            self._home.cleanup()
        self._home = TemporaryDirectory()
        home = Path(self._home.name).resolve()
        python, site = _make_environment(home / "environment")
        self._python, self._environment, self._site = str(python), "", site
        self.folder = Path(__file__).parents[1]
        if place == EMPTY:
            self._see_what_is_here(site)
            self.folder = home / "work"
            self.folder.mkdir()

    def _see_what_is_here(self, site: Path) -> None:
        self._site = None
        (site / "here.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n", "utf-8")
        self._environment = f"import site, sys; site.addsitedir({str(site)!r}); sys.executable = {self._python!r}"

    def run(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        """
        Run a command, with the width and without the colors that a page can show.

        Raises:
            SessionError: The command does not run here.
        """
        name, arguments = words[0] if words else "", words[1:]
        if self._home is None and name != "attnplug":
            raise SessionError("only attnplug runs here")
        if name == "cd" and len(arguments) == 1 and (self.folder / arguments[0]).is_dir():
            self.folder = (self.folder / arguments[0]).resolve()
            return subprocess.CompletedProcess(words, 0, "", "")
        if name not in _MODULES or (name == "pip" and arguments[:1] != ["install"]):
            raise SessionError("only attnplug, pytest, pip install and cd to a folder run there")
        outside = {name: value for name, value in os.environ.items() if not (self._home and name.startswith(_OURS))}
        plain = {**outside, "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb", "PYTHONDONTWRITEBYTECODE": "1"}
        if self._home is not None:
            plain["PYTEST_ADDOPTS"] = "-p no:randomly"  # a reader's pytest keeps the order of the files
        if self._site is not None:
            return self._run_in_new_environment(self._site, name, arguments, plain)
        if name != "pip":
            program = f"{self._environment}\nimport runpy; runpy.run_module({name!r}, None, '__main__', alter_sys=True)"
            return forked.run("-c", program, *arguments, cwd=self.folder, env=plain)
        command = [self._python, "-m", "pip", "install", *_INSTALL, *arguments[1:]]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False, env=plain)  # noqa: S603 - the project's own pages

    def _run_in_new_environment(
        self, site: Path, name: str, arguments: list[str], plain: dict[str, str]
    ) -> subprocess.CompletedProcess[str]:
        """Install projects of the checkout, with links for what they require; or run another command."""
        command = [self._python, "-m", name, *arguments]
        if name == "pip":
            given = [one for one in arguments[1:] if one != "--no-deps"]
            command = [sys.executable, "-m", "pip", "install", *_INSTALL, "--no-deps", "--target", str(site), *given]
            for requirement in [] if "--no-deps" in arguments else map(_requirement_of, given):
                for distribution in closure(requirement):
                    link(distribution, site)
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, check=False, env=plain)  # noqa: S603 - likewise

    def read(self, name: str) -> str:
        """Return the text of a file."""
        return self._place(name).read_text("utf-8")

    def write(self, name: str, text: str) -> None:
        """Replace a file, in the page's temporary folder only."""
        if self._home is None or self._site is not None:
            raise SessionError(f"a page writes files only in {EMPTY}")
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")

    def edit(self, name: str, diff: str) -> None:
        """
        Change a file as a diff says, whose lines begin with a blank, a minus or a plus. ``@@`` begins another place.

        Raises:
            SessionError: What the diff starts from is not there, or is there more than once.
        """
        text = self.read(name)
        for place in f"{diff}\n".split("@@\n"):
            lines = place.splitlines()
            old, new = ("".join(f"{line[1:]}\n" for line in lines if line[:1] in ("", " ", own)) for own in "-+")
            if text.count(old) != 1:
                raise SessionError(
                    f"it is in the file {text.count(old)} times\n--- the page\n{old}\n--- the file\n{text}"
                )
            text = text.replace(old, new)
        self.write(name, text)

    def _place(self, name: str) -> Path:
        file = self.folder / name
        if not file.is_file():
            raise SessionError("there is no such file")
        return file


def _make_environment(folder: Path) -> tuple[Path, Path]:
    """Make an empty environment; return its Python, and its folder of packages."""
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return python, Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())  # noqa: S603 - just made


def _requirement_of(argument: str) -> str:
    """Return the requirement that a folder of the checkout is, with its extras: ``./core[torch]``."""
    folder, bracket, extras = argument.partition("[")
    project = read_toml(Path(__file__).parents[1] / folder / "pyproject.toml")["project"]
    return f"{project['name']}{bracket}{extras}"


def closure(*requirements: str) -> list[metadata.Distribution]:
    """Return the installed distributions that these require, directly or not, without those of this repository."""
    found: dict[str, metadata.Distribution] = {}
    waiting, seen = [Requirement(text) for text in requirements], set()
    while waiting:
        required = waiting.pop()
        if (key := (required.name, frozenset(required.extras))) in seen:
            continue
        seen.add(key)
        distribution = metadata.distribution(required.name)
        found[canonicalize_name(required.name)] = distribution
        extras = ("", *required.extras)
        listed = map(Requirement, distribution.requires or ())
        waiting += [r for r in listed if not r.marker or any(r.marker.evaluate({"extra": extra}) for extra in extras)]
    return [found[name] for name in found if not name.startswith("attnplug")]


def link(distribution: metadata.Distribution, site: Path) -> None:
    """Put links to all that a distribution installed into another environment."""
    for name in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        target = site / name
        if not target.is_symlink():  # distributions may share a namespace package
            target.symlink_to(Path(str(distribution.locate_file(name))))
