"""
Checks of built distributions, wheels and sdists: what a user of an index would get, compared with the sources.

`problems` is a list of sentences, empty where all is well: `python -m tools.release` prints them.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
import tarfile
from configparser import ConfigParser
from email import message_from_bytes
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Final
from zipfile import ZipFile

from attrs import frozen
from markdown import markdown  # type: ignore[import-untyped] # it has no types, and one call here
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools.toml import read_toml

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from email.message import Message

LARGEST: Final = 2**22
"""Bytes of an archive at most: there is no compiled part, and evidence is the largest."""

_STRAY: Final = re.compile(
    r"(^|/)(\.(?!gitignore$)|__pycache__|conftest\.py$|tests?/)|\.(py[cod]|so|log|orig|rej|egg-info)$|~$"
)
_IN_SDIST: Final = ("src", "tests", "README.md", "LICENSE", "pyproject.toml", "PKG-INFO", ".gitignore")
_MANIFEST: Final = "attnplug.toml"


@frozen
class Project:
    """
    The sources of one distribution.

    Attributes:
        folder: Its folder.
        metadata: The table ``[project]`` of its pyproject.toml.
    """

    folder: Path
    metadata: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The distribution's name."""
        return str(self.metadata["name"])

    @property
    def version(self) -> str:
        """Its version."""
        return str(self.metadata["version"])

    @property
    def package(self) -> str:
        """The package that it installs."""
        return self.name.replace("-", "_")

    @property
    def entry_points(self) -> dict[str, dict[str, str]]:
        """Its entry points by group, scripts included."""
        scripts = {"console_scripts": self.metadata["scripts"]} if "scripts" in self.metadata else {}
        return {**scripts, **self.metadata.get("entry-points", {})}


def read_project(folder: Path) -> Project:
    """Read the metadata of a distribution's sources."""
    return Project(folder, read_toml(folder / "pyproject.toml")["project"])


def wheel_problems(wheel: Path, project: Project) -> list[str]:
    """Return what is wrong with a wheel."""
    with ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    info = f"{project.package}-{project.version}.dist-info"
    metadata = message_from_bytes(files.get(f"{info}/METADATA", b""))
    found = [
        *_size(wheel),
        *_tag(wheel, project),
        *(f"the file {name!r} has no place in a wheel" for name in _strays_of_wheel(files, project, info)),
        *_metadata(metadata, project),
        *_licence(files.get(f"{info}/licenses/LICENSE"), project),
        *_entry_points(files, info, project),
        *_record(files, info),
    ]
    if f"{project.package}/py.typed" not in files:
        found.append(f"{project.package}/py.typed is missing: type checkers ignore the annotations")
    return [f"{wheel.name}: {each}" for each in found]


def sdist_problems(sdist: Path, project: Project) -> list[str]:
    """Return what is wrong with an sdist."""
    root = f"{project.package}-{project.version}"
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
        names = [member.name for member in members if member.isfile()]
        read = {
            name: stream.read()
            for name in (f"{root}/PKG-INFO", f"{root}/LICENSE")
            if name in names and (stream := archive.extractfile(name)) is not None
        }
    inside = [name.partition("/")[2] for name in names]
    strays = [
        name
        for name in inside
        if name.split("/")[0] not in _IN_SDIST or _STRAY.search(re.sub(r"^tests/", "", name).replace("/tests/", "/"))
    ]
    found = [
        *_size(sdist),
        *(f"{member.name!r} is neither a file nor a folder" for member in members if not member.isreg()),
        *(f"{name!r} is outside of {root!r}" for name in names if not name.startswith(f"{root}/")),
        *(f"the file {name!r} has no place in an sdist" for name in strays if not _is_test_support(name)),
        *(
            f"{name!r} is missing"
            for name in ("PKG-INFO", "README.md", "LICENSE", "pyproject.toml")
            if name not in inside
        ),
        *_metadata(message_from_bytes(read.get(f"{root}/PKG-INFO", b"")), project),
        *_licence(read.get(f"{root}/LICENSE"), project),
    ]
    if not any(name.startswith("tests/") for name in inside):
        found.append("it has no tests")
    return [f"{sdist.name}: {each}" for each in found]


def version_problems(projects: Iterable[Project]) -> list[str]:
    """Return which distribution requires a version of another one that is not the workspace's."""
    projects = tuple(projects)
    versions = {canonicalize_name(project.name): project.version for project in projects}
    return [
        f"{project.name} requires {requirement}, and the workspace has {versions[canonicalize_name(requirement.name)]}"
        for project in projects
        for requirement in _requirements(project)
        if canonicalize_name(requirement.name) in versions
        and not requirement.specifier.contains(versions[canonicalize_name(requirement.name)], prereleases=True)
    ]


def _requirements(project: Project) -> list[Requirement]:
    extras = project.metadata.get("optional-dependencies", {})
    listed = [*project.metadata.get("dependencies", ()), *(text for each in extras.values() for text in each)]
    return [Requirement(text) for text in listed]


def _size(archive: Path) -> Iterator[str]:
    size = archive.stat().st_size
    if size > LARGEST:
        yield f"it has {size} bytes, more than {LARGEST}"


def _tag(wheel: Path, project: Project) -> Iterator[str]:
    expected = f"{project.package}-{project.version}-py3-none-any.whl"
    if wheel.name != expected:
        yield f"its name is not {expected!r}"


def _strays_of_wheel(files: Iterable[str], project: Project, info: str) -> Iterator[str]:
    for name in files:
        top = PurePosixPath(name).parts[0]
        if top not in (project.package, info) or (top == project.package and _STRAY.search(name)):
            yield name


def _is_test_support(name: str) -> bool:
    return name.startswith("tests/") and name.rpartition("/")[2] == "conftest.py"


def _metadata(metadata: Message, project: Project) -> Iterator[str]:
    expected = {
        "Name": project.name,
        "Version": project.version,
        "Summary": project.metadata["description"],
        "License-Expression": project.metadata["license"],
        "License-File": "LICENSE",
        "Requires-Python": project.metadata["requires-python"],
        "Description-Content-Type": "text/markdown",
    }
    for key, value in expected.items():
        if metadata[key] != value:
            yield f"its metadata has {key}: {metadata[key]!r}, and pyproject.toml has {value!r}"
    required = {str(requirement) for requirement in _requirements(project)}
    listed = {_without_extra(Requirement(text)) for text in metadata.get_all("Requires-Dist", [])}
    if listed != required:
        yield f"its metadata requires {sorted(listed)}, and pyproject.toml {sorted(required)}"
    yield from readme_problems(str(metadata.get_payload()), project)


def _without_extra(requirement: Requirement) -> str:
    """Return a requirement as pyproject.toml has it: the extra that it is of is part of its marker."""
    text = str(requirement.marker or "")
    text = re.sub(r"( and )?extra == [\"'][^\"']+[\"']", "", text).strip().removeprefix("(").removesuffix(")")
    requirement.marker = None
    return str(Requirement(f"{requirement}; {text}" if text else str(requirement)))


def readme_problems(text: str, project: Project) -> Iterator[str]:
    """Yield what an index would not show: it renders the README, and has none of the files that it links to."""
    if text.strip() != (project.folder / "README.md").read_text("utf-8").strip():
        yield "its description is not the README"
    html = markdown(text, extensions=["tables", "fenced_code"])
    if not re.match(r"<h1>[^<]+</h1>\s*<p>", html):
        yield "its README does not begin with a title and a sentence"
    for link in re.findall(r"(?:href|src)=\"([^\"]*)\"", html):
        if not link.startswith(("https://", "#")):
            yield f"its README links to {link!r}, which an index does not have"


def _licence(text: bytes | None, project: Project) -> Iterator[str]:
    if text != (project.folder / "LICENSE").read_bytes():
        yield "the licence is missing, or another one than in the sources"


def _entry_points(files: Mapping[str, bytes], info: str, project: Project) -> Iterator[str]:
    parser = ConfigParser(delimiters=("=",), interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign] # names of entry points keep their case
    parser.read_string(files.get(f"{info}/entry_points.txt", b"").decode())
    found = {group: dict(parser[group]) for group in parser.sections()}
    if found != project.entry_points:
        yield f"its entry points are {found}, and pyproject.toml has {project.entry_points}"
    for group, entries in found.items():
        for name, value in entries.items():
            path = value.partition(":")[0].strip().replace(".", "/")
            if not {f"{path}.py", f"{path}/__init__.py"} & files.keys():
                yield f"the module of the entry point {name!r} in {group!r} is missing: {value!r}"
            elif group == "attnplug.backends" and f"{path.rpartition('/')[0]}/{_MANIFEST}" not in files:
                yield f"{_MANIFEST} of the backend {name!r} is missing"


def _record(files: Mapping[str, bytes], info: str) -> Iterator[str]:
    rows = {row[0]: row[1] for row in csv.reader(io.StringIO(files.get(f"{info}/RECORD", b"").decode())) if row}
    for name, content in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        if name != f"{info}/RECORD" and rows.get(name) != f"sha256={digest}":
            yield f"RECORD has another hash of {name!r}, or none"
