"""A plugin project: its pyproject.toml, and where that leads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen
from packaging.utils import canonicalize_name

from attnplug.manifest import GROUP, check_requirement, is_module, locate, requirement_name
from attnplug.request import near
from attnplug_kit.check.finding import Finding
from attnplug_kit.check.requires import check_dependencies

_CORE: Final = "attnplug"
PYPROJECT: Final = "pyproject.toml"
_PLACES: Final[tuple[tuple[str, ...], ...]] = (
    ("project", "entry-points", GROUP),
    ("tool", "poetry", "plugins", GROUP),
)


@frozen
class Offer:
    """
    One entry point of the group.

    Attributes:
        name: The backend's name.
        module: The plugin module, a dotted name.
        line: Where it stands.
    """

    name: str
    module: str
    line: int | None


@frozen
class Project:
    """
    A project, as its pyproject.toml tells.

    Attributes:
        folder: Its folder.
        text: The text of that file.
        data: Its tables.
    """

    folder: Path
    text: str
    data: Mapping[str, Any] = field(repr=False)

    @property
    def path(self) -> str:
        """The file."""
        return str(self.folder / PYPROJECT)

    @property
    def name(self) -> str:
        """The distribution's name; empty where it is not told."""
        name = self.table("project").get("name") or self.table("tool", "poetry").get("name")
        return name if isinstance(name, str) else ""

    def table(self, *keys: str) -> Mapping[str, Any]:
        """Return a table inside; an empty one where it is not there."""
        found: Any = self.data
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def texts(self, *keys: str) -> tuple[str, ...] | None:
        """Return a list of texts inside; None where it is not there."""
        found = self.table(*keys[:-1]).get(keys[-1])
        return tuple(each for each in found if isinstance(each, str)) if isinstance(found, list) else None

    def line(self, *keys: str) -> int | None:
        """Return where a key stands."""
        return locate(self.text, keys)

    def offers(self) -> list[Offer]:
        """Return the entry points of the group whose values are texts."""
        return [
            Offer(name, value.strip(), self.line(*place, name))
            for place in _PLACES
            for name, value in self.table(*place).items()
            if isinstance(value, str)
        ]

    def roots(self) -> list[Path]:
        """Return the folders in which packages may lie, the likely ones first."""
        packages = self.texts("tool", "hatch", "build", "targets", "wheel", "packages") or ()
        where = self.texts("tool", "setuptools", "packages", "find", "where") or ()
        mapped = self.table("tool", "setuptools", "package-dir").get("")
        told = [Path(package).parent for package in packages] + [Path(each) for each in where]
        told += [Path(mapped)] if isinstance(mapped, str) else []
        return list(dict.fromkeys(self.folder / each for each in (*told, Path("src"), Path())))


def check_project(project: Project) -> Iterator[Finding]:
    """Yield what is wrong with the pyproject.toml itself."""
    if not project.name:
        yield _finding(project, "no name in [project]", "a distribution has a name", "name it", "project")
    yield from _check_group(project)
    yield from _check_dependencies(project)


def check_module(project: Project, offer: Offer) -> Iterator[Finding]:
    """Yield that an entry point leads to no module."""
    if not is_module(offer.module):
        yield Finding(
            f"{offer.name} = {offer.module!r}",
            "the value of the entry point is the dotted name of the plugin module, without an attribute",
            f"write {offer.name} = {offer.module.partition(':')[0].strip()!r}",
            project.path,
            offer.line,
        )
    elif find_module(project, offer.module) is None:
        yield Finding(
            f"{offer.name} = {offer.module!r}{near(offer.module, _modules(project))}",
            f"there is no such module under {', '.join(str(root) for root in project.roots() if root.is_dir())}",
            "correct the entry point, or write the module",
            project.path,
            offer.line,
        )


def find_module(project: Project, module: str) -> Path | None:
    """Return the file of a module, or None. Nothing is imported."""
    for root in project.roots():
        place = root.joinpath(*module.split("."))
        for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
            if file.is_file():
                return file
    return None


def _modules(project: Project) -> list[str]:
    """List modules two levels deep, for near matches."""
    found: set[str] = set()
    for root in project.roots():
        for file in (*root.glob("*.py"), *root.glob("*/*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            found.add(".".join(part for part in parts if part != "__init__"))
    return sorted(found)


def _check_group(project: Project) -> Iterator[Finding]:
    if any(project.table(*place) for place in _PLACES):
        for place in _PLACES:
            for name, value in project.table(*place).items():
                if not isinstance(value, str):
                    yield _finding(
                        project, f"{name} = {value!r}", "an entry point is a text", "name a module", *place, name
                    )
        return
    dynamic = project.texts("project", "dynamic") or ()
    if "entry-points" in dynamic:
        found = _finding(
            project,
            "the entry points are dynamic",
            f"what they are is known once the project is built; a plugin has one in the group {GROUP!r}",
            f'list it in [project.entry-points."{GROUP}"]',
            "project",
            "dynamic",
        )
        yield found.note()
        return
    groups = tuple(project.table("project", "entry-points"))
    likely = near(GROUP, groups) if groups else ""
    yield _finding(
        project,
        f"no entry point in the group {GROUP!r}" + likely.replace("did you mean", "is it"),
        "that is how a backend is found: its name, and its plugin module",
        f'add [project.entry-points."{GROUP}"]',
        "project",
        "entry-points",
        *([likely.split("'")[1]] if likely else []),
    )


def _check_dependencies(project: Project) -> Iterator[Finding]:
    listed = project.texts("project", "dependencies")
    line = project.line("project", "dependencies")
    yield from check_dependencies(listed or (), project.path, line)
    names = {canonicalize_name(requirement_name(text)) for text in listed or () if not check_requirement(text)}
    dynamic = project.texts("project", "dynamic") or ()
    if project.name and _CORE not in (*names, project.name) and "dependencies" not in dynamic:
        found = _finding(
            project,
            f"no {_CORE!r} among the dependencies",
            "pip then installs the plugin without the core, or beside one of another contract",
            f'depend on "{_CORE}", with the versions that it was tested with',
            "project",
            "dependencies",
        )
        yield found.note()


def _finding(project: Project, given: str, expected: str, fix: str, *keys: str) -> Finding:
    return Finding(given, expected, fix, project.path, project.line(*keys))
