"""
The dry run of a release: builds every wheel and sdist, checks them, and installs each alone, in a fresh environment,
for its smoke test. ``make release-check`` runs it; nothing is uploaded. ``make wheels`` builds the wheels alone.

Environments share one copy of torch, which they see through a path file. That of core alone has none, and is installed
from a folder of downloaded wheels, without an index. Everything else is installed anew, in the versions of
constraints.txt. What was built stays in ``build/release/dist``.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

from tools.archives import Project, read_project, sdist_problems, version_problems, wheel_problems
from tools.compatibility import distributions

ROOT: Final = Path(__file__).parents[1]
WORK: Final = ROOT / "build" / "release"
DIST: Final = WORK / "dist"
WHEELS: Final = ROOT / "build" / "wheels"
_CORE: Final = "attnplug"
_PINS: Final = ROOT / "constraints.txt"
_SMOKE: Final = ROOT / "tools" / "smoke.py"


def projects(root: Path = ROOT) -> list[Project]:
    """Return the distributions of the workspace, core first."""
    return [read_project(root / each.folder) for each in distributions(root)]


def build(project: Project, target: Path) -> tuple[Path, Path]:
    """Build the sdist, and from it the wheel, as an installer that starts from the sdist would. Return both."""
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(target), str(project.folder)])
    stem = f"{project.package}-{project.version}"
    return target / f"{stem}.tar.gz", target / f"{stem}-py3-none-any.whl"


def plan_installs(found: list[Project]) -> list[tuple[str, list[str]]]:
    """Return what is tested, as a requirement, with the distributions that are installed for it: itself and core."""
    alone = [(project.name, list(dict.fromkeys([_CORE, project.name]))) for project in found]
    return [alone[0], (f"{_CORE}[torch]", [_CORE]), *alone[1:]]


class Environments:
    """
    Fresh environments below one folder.

    Args:
        folder: The folder.
        arguments: What pip is given besides, such as an index.
    """

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self._folder = folder
        self._arguments = arguments

    def make(self, name: str, wheels: list[Path], shared: Path | None) -> Path:
        """
        Make an environment with these wheels, and return its Python.

        Args:
            name: The name of its folder.
            wheels: What is installed, with everything that it requires.
            shared: An environment whose packages are visible too.
        """
        shutil.rmtree(self._folder / name, ignore_errors=True)
        _run([sys.executable, "-m", "venv", str(self._folder / name)])
        python = self._folder / name / "bin" / "python"
        if shared is not None:
            (_packages(python) / "shared.pth").write_text(f"{_packages(shared)}\n", encoding="utf-8")
        # Of Python 3.11 and older the environment has an old setuptools, which would hide the one that torch requires.
        _run([str(python), "-m", "pip", "--quiet", "uninstall", "--yes", "setuptools"])
        self.install(python, *map(str, wheels))
        return python

    def install(self, python: Path, *requirements: str) -> None:
        """Install requirements in the versions of constraints.txt, as far as they are not there."""
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet", "install", "--no-compile"]
        if requirements:
            _run([*pip, "-c", str(_PINS), *self._arguments, *requirements])

    def make_offline(self, name: str, wheel: Path) -> Path:
        """
        Make an environment without a network, as docs/install.md says, and return its Python.

        It downloads the requirements of a wheel into a folder, then installs from this folder without an index.
        """
        wheelhouse = self._folder / f"{name}-wheelhouse"
        shutil.rmtree(wheelhouse, ignore_errors=True)
        python = self.make(name, [], None)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
        _run([*pip, "download", "--dest", str(wheelhouse), "-c", str(_PINS), *self._arguments, str(wheel)])
        _run(
            [*pip, "install", "--no-compile", "--no-index", "--find-links", str(wheelhouse), name],
            PIP_CONFIG_FILE=os.devnull,
        )
        shutil.rmtree(wheelhouse)
        return python

    def torch(self) -> Path:
        """Return the Python of the environment that has torch; it is kept for the next run."""
        python = self._folder / "torch" / "bin" / "python"
        if not (self._folder / "torch" / ".ready").exists():
            python = self.make("torch", [], None)
            self.install(python, "torch")
            (self._folder / "torch" / ".ready").touch()
        return python


def _packages(python: Path) -> Path:
    (found,) = python.parents[1].glob("lib/python3*/site-packages")
    return found


def _run(command: list[str], *, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a command without this process's settings, and with these variables; print its output where it fails."""
    hidden = ("ATTNPLUG_", "PYTHONPATH", "COV", "PYTEST")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    environment |= {"XDG_CONFIG_HOME": str(WORK / "no-configuration"), **variables}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)  # noqa: S603 - Python's own
    if done.returncode and check:
        print(done.stdout + done.stderr)
        raise SystemExit(f"{shlex.join(command)} exits with {done.returncode}")
    return done


def check_archives(found: list[Project], target: Path) -> list[str]:
    """Build all distributions into an empty folder, and return what is wrong with them."""
    shutil.rmtree(target, ignore_errors=True)
    problems = version_problems(found)
    for project in found:
        sdist, wheel = build(project, target)
        problems += [*sdist_problems(sdist, project), *wheel_problems(wheel, project)]
    expected = 2 * len(found)
    files = len(list(target.iterdir()))
    return [*problems, *([f"{files} files were built, not {expected}"] if files != expected else [])]


def check_installs(found: list[Project], target: Path, environments: Environments) -> list[str]:
    """Install each distribution alone, run its smoke test, and return what failed."""
    wheels = {each.name: target / f"{each.package}-{each.version}-py3-none-any.whl" for each in found}
    problems = []
    for name, installed in plan_installs(found):
        start = time.monotonic()
        if name == _CORE:
            python = environments.make_offline(name, wheels[name])
        else:
            folder = name.replace("[", "-with-").replace("]", "")
            python = environments.make(folder, [wheels[each] for each in installed], environments.torch())
        for command in ([str(python), "-m", "pip", "check"], [str(python), "-I", str(_SMOKE), name]):
            done = _run(command, check=False)
            problems += [f"{name}: {done.stdout}{done.stderr}".strip()] if done.returncode else []
        print(f"{name}: installed alone and tested in {time.monotonic() - start:.0f} s", flush=True)
        shutil.rmtree(python.parents[1])
    return problems


def make_wheels(found: list[Project], target: Path) -> list[Path]:
    """Build wheels into an empty folder, with a page of links for ``pip install --find-links``; return the wheels."""
    shutil.rmtree(target, ignore_errors=True)
    for project in found:
        build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(target)]
        _run([*build, str(project.folder)])
    wheels = sorted(target.glob("*.whl"))
    links = (
        f'<a href="{wheel.name}#sha256={hashlib.sha256(wheel.read_bytes()).hexdigest()}">{wheel.name}</a><br>'
        for wheel in wheels
    )
    (target / "index.html").write_text("<!DOCTYPE html><title>attnplug</title>\n" + "\n".join(links) + "\n", "utf-8")
    return wheels


def main() -> int:
    """Build, check, install and test; print what is wrong, and return the exit status."""
    start = time.monotonic()
    found = projects()
    if sys.argv[1:] == ["wheels"]:
        wheels = make_wheels(found, WHEELS)
        where = WHEELS.relative_to(ROOT)
        print(f"{len(wheels)} wheels in {where}: pip install --find-links {where} attnplug attnplug-transformers")
        return 0
    problems = check_archives(found, DIST)
    print(f"{2 * len(found)} archives built and checked in {time.monotonic() - start:.0f} s", flush=True)
    if not problems:
        arguments = shlex.split(os.environ.get("PIP_ARGS", ""))
        problems = check_installs(found, DIST, Environments(WORK / "environments", arguments))
    print("\n".join(problems) or f"ready to release, after {time.monotonic() - start:.0f} s: {DIST.relative_to(ROOT)}")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
