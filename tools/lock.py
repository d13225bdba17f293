"""
The hashes of the pinned environment: ``constraints.lock`` has what ``constraints.txt`` pins, with the SHA-256 of every
file that the package index has of it, so that ``pip install --require-hashes`` takes no other file.

``python -m tools.lock`` says where the two differ, and needs no network; ``python -m tools.lock --write`` makes the
lock anew with uv, from the index that pip uses. torch is not in it: which build of it is right depends on the machine.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from packaging.requirements import Requirement

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT: Final = Path(__file__).parents[1]
PINS: Final = ROOT / "constraints.txt"
LOCK: Final = ROOT / "constraints.lock"
UNLOCKED: Final = frozenset({"torch"})
PYTHONS: Final = ("3.10.14", "3.11.9")
"""The environments that constraints.txt distinguishes: before Python 3.11, and from there on."""

_HEAD: Final = """\
# What constraints.txt pins, with the SHA-256 of each file that the index has: `python -m tools.lock --write` makes it.
# torch is left out: its builds for CPU, CUDA and ROCm are different files of one version. `pip hash` prints its hash.
"""
_HASH: Final = re.compile(r"--hash=sha256:[0-9a-f]{64}")


def pins(text: str) -> dict[str, str]:
    """Return the version of each pin of constraints.txt by its name, with the marker where it has one."""
    lines = (line for line in text.splitlines() if line.strip() and not line.startswith("#"))
    return _versions(lines, UNLOCKED)


def locked(text: str) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return the version and the hashes of each entry of the lock, by its name with its marker."""
    entries = [line for line in text.replace("\\\n", " ").splitlines() if line.strip() and not line.startswith("#")]
    found = {}
    for entry in entries:
        ((key, version),) = _versions([_HASH.sub("", entry)], frozenset()).items()
        found[key] = (version, tuple(_HASH.findall(entry)))
    return found


def problems(pinned: str, lock: str) -> list[str]:
    """Return how the lock differs from the pins, a sentence each."""
    wanted, found = pins(pinned), locked(lock)
    return [
        *(f"{key} is pinned and not locked" for key in wanted if key not in found),
        *(f"{key} is locked and not pinned" for key in found if key not in wanted),
        *(
            f"{key} is pinned to {wanted[key]} and locked to {version}"
            for key, (version, _) in found.items()
            if wanted.get(key, version) != version
        ),
        *(f"{key} has no hash" for key, (_, hashes) in found.items() if not hashes),
    ]


def _versions(lines: Iterable[str], without: frozenset[str]) -> dict[str, str]:
    found = {}
    for requirement in map(Requirement, lines):
        if requirement.name not in without:
            marker = f"; {requirement.marker}" if requirement.marker else ""
            found[f"{requirement.name}{marker}"] = str(requirement.specifier).removeprefix("==")
    return found


def write(pinned: str) -> str:
    """
    Return the lock, with the hashes of all files that the index has of each version.

    Raises:
        SystemExit: uv is missing, or it fails.
    """
    uv = shutil.which("uv")
    if uv is None:
        raise SystemExit("uv is not on PATH: it reads the hashes; install it into an environment apart")
    hashes: dict[str, tuple[str, ...]] = {}
    lines = [line for line in pinned.splitlines() if line.partition("==")[0] not in UNLOCKED]
    for python in PYTHONS:
        hashes |= {f"{key}=={version}": each for key, (version, each) in locked(_compiled(uv, lines, python)).items()}
    entries = []
    for key, version in pins(pinned).items():
        name, separator, marker = key.partition("; ")
        found = hashes[f"{name}=={version}"]
        entries.append(" \\\n    ".join([f"{name}=={version}{separator}{marker}", *sorted(found)]))
    return _HEAD + "\n".join(entries) + "\n"


def _compiled(uv: str, lines: list[str], python: str) -> str:
    options = ["--no-deps", "--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url"]
    options += ["--only-binary=:all:", "--no-python-downloads", f"--python-version={python}"]
    # The index and its files are those of pip, whose settings uv does not read.
    indexes = [f"--extra-index-url={url}" for url in _pip_setting("global.extra-index-url")]
    links = [f"--find-links={place}" for place in _pip_setting("global.find-links")]
    with TemporaryDirectory() as folder:
        source = Path(folder, "constraints.in")
        source.write_text("\n".join(lines), encoding="utf-8")
        command = [uv, "pip", "compile", str(source), *options]
        command += [
            "--python-platform=x86_64-unknown-linux-gnu",
            "--index-strategy=unsafe-best-match",
            *indexes,
            *links,
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - uv, as found on PATH
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def _pip_setting(name: str) -> list[str]:
    command = [sys.executable, "-m", "pip", "config", "get", name]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()  # noqa: S603 - pip


def main(arguments: list[str]) -> int:
    """Check or write the lock, and return the exit status."""
    if arguments == ["--write"]:
        LOCK.write_text(write(PINS.read_text("utf-8")), encoding="utf-8")
    found = problems(PINS.read_text("utf-8"), LOCK.read_text("utf-8") if LOCK.exists() else "")
    print("\n".join(found) or f"{LOCK.name} has what {PINS.name} pins")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
