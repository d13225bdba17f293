"""
A plugin project: its pyproject.toml, the modules that its entry points name, and whether the wheel has the manifest.

Nothing is imported or built: the settings of the build backend say what goes into a wheel.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from attrs import field, frozen
from packaging.utils import canonicalize_name

from attnplug.manifest import GROUP, MANIFEST, check_requirement, is_module, locate, requirement_name
from attnplug.request import near
from attnplug_kit.check.report import Finding
from attnplug_kit.check.requires import check_dependencies

PYPROJECT: Final = "pyproject.toml"
_CORE: Final = "attnplug"
_TABLES: Final[tuple[tuple[str, ...], ...]] = (
    ("project", "entry-points", GROUP),
    ("tool", "poetry", "plugins", GROUP),
)
_WHOLE_PACKAGES: Final = ("flit_core", "poetry", "pdm", "uv_build", "scikit_build_core", "maturin")
"""Build backends that take every file of a package."""


@frozen
class EntryPoint:
    """
    One entry point of the group.

    Attributes:
        name: The backend's name.
        module: The plugin module, a dotted name.
        line: Its line.
    """

    name: str
    module: str
    line: int | None


@frozen
class Project:
    """
    A project, as its pyproject.toml describes it.

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
        """The distribution's name; empty if there is none."""
        name = self.table("project").get("name") or self.table("tool", "poetry").get("name")
        return name if isinstance(name, str) else ""

    @property
    def distribution(self) -> str | None:
        """The distribution with its version; None if a build computes the version."""
        version = self.table("project").get("version") or self.table("tool", "poetry").get("version")
        return f"{self.name} {version}" if self.name and isinstance(version, str) else None

    def table(self, *keys: str) -> Mapping[str, Any]:
        """Return a table; an empty one if it does not exist."""
        found: Any = self.data
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    def texts(self, *keys: str) -> tuple[str, ...] | None:
        """Return a list of texts; None if it does not exist."""
        found = self.table(*keys[:-1]).get(keys[-1])
        return tuple(each for each in found if isinstance(each, str)) if isinstance(found, list) else None

    def line(self, *keys: str) -> int | None:
        """Return the line of a key."""
        return locate(self.text, keys)

    def finding(self, problem: str, expected: str, fix: str, *keys: str) -> Finding:
        """Return a finding at a key."""
        return Finding(problem, expected, fix, self.path, self.line(*keys))

    def entry_points(self) -> list[EntryPoint]:
        """Return the entry points of the group whose values are texts."""
        return [
            EntryPoint(name, value.strip(), self.line(*table, name))
            for table in _TABLES
            for name, value in self.table(*table).items()
            if isinstance(value, str)
        ]

    def roots(self) -> list[Path]:
        """Return the folders that may contain packages, the likely ones first."""
        packages = self.texts("tool", "hatch", "build", "targets", "wheel", "packages") or ()
        where = self.texts("tool", "setuptools", "packages", "find", "where") or ()
        mapped = self.table("tool", "setuptools", "package-dir").get("")
        found = [Path(package).parent for package in packages] + [Path(each) for each in where]
        found += [Path(mapped)] if isinstance(mapped, str) else []
        return list(dict.fromkeys(self.folder / each for each in (*found, Path("src"), Path())))

    def module(self, name: str) -> Path | None:
        """Return the file of a module, or None."""
        for root in self.roots():
            place = root.joinpath(*name.split("."))
            for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
                if file.is_file():
                    return file
        return None


def check_project(project: Project) -> Iterator[Finding]:
    """Yield what is wrong with the pyproject.toml itself."""
    if not project.name:
        yield project.finding("no name in [project]", "a distribution has a name", "name it", "project")
    yield from _check_group(project)
    yield from _check_dependencies(project)


def check_module(project: Project, point: EntryPoint) -> Iterator[Finding]:
    """Yield that an entry point does not name a module."""
    problem, module = f"{point.name} = {point.module!r}", point.module
    if not is_module(module):
        expected = "the value of the entry point is the dotted name of the plugin module, without an attribute"
        fix = f"write {point.name} = {module.partition(':')[0].strip()!r}"
        yield Finding(problem, expected, fix, project.path, point.line)
    elif project.module(module) is None:
        roots = ", ".join(str(root) for root in project.roots() if root.is_dir())
        expected = f"the module exists; it is not under {roots}"
        fix = "correct the entry point, or write the module"
        yield Finding(problem + near(module, _modules(project)), expected, fix, project.path, point.line)


def _modules(project: Project) -> list[str]:
    """Return the modules two levels deep, for near matches."""
    found: set[str] = set()
    for root in project.roots():
        for file in (*root.glob("*.py"), *root.glob("*/*.py")):
            parts = file.relative_to(root).with_suffix("").parts
            found.add(".".join(part for part in parts if part != "__init__"))
    return sorted(found)


def _check_group(project: Project) -> Iterator[Finding]:
    listed = [(table, name, value) for table in _TABLES for name, value in project.table(*table).items()]
    for table, name, value in listed:
        if not isinstance(value, str):
            yield project.finding(f"{name} = {value!r}", "an entry point is a text", "name a module", *table, name)
    if listed:
        return
    if "entry-points" in (project.texts("project", "dynamic") or ()):
        expected = f"a plugin has one in the group {GROUP!r}; dynamic ones are known after a build only"
        fix = f'list it in [project.entry-points."{GROUP}"]'
        yield project.finding("the entry points are dynamic", expected, fix, "project", "dynamic").note()
        return
    groups = tuple(project.table("project", "entry-points"))
    likely = near(GROUP, groups) if groups else ""
    yield project.finding(
        f"no entry point in the group {GROUP!r}" + likely.replace("did you mean", "is it"),
        "core finds a backend by it: its name, and its plugin module",
        f'add [project.entry-points."{GROUP}"]',
        "project",
        "entry-points",
        *([likely.split("'")[1]] if likely else []),
    )


def _check_dependencies(project: Project) -> Iterator[Finding]:
    listed = project.texts("project", "dependencies") or ()
    yield from check_dependencies(listed, project.path, project.line("project", "dependencies"))
    names = {canonicalize_name(requirement_name(text)) for text in listed if not check_requirement(text)}
    dynamic = project.texts("project", "dynamic") or ()
    if project.name and _CORE not in (*names, project.name) and "dependencies" not in dynamic:
        yield project.finding(
            f"no {_CORE!r} in the dependencies",
            "a plugin depends on the core; otherwise pip installs it without, or with a core of another contract",
            f'depend on "{_CORE}", with the versions that it was tested with',
            "project",
            "dependencies",
        ).note()


def check_wheel(project: Project, manifest: Path, package: str) -> Iterator[Finding]:
    """
    Yield that the wheel will not have the manifest.

    Args:
        project: The project.
        manifest: The file.
        package: The top-level package.
    """
    backend = str(project.table("build-system").get("build-backend", "setuptools.build_meta"))
    kind, file = re.split(r"[.:]", backend)[0], manifest.relative_to(project.folder).as_posix()
    if kind in _WHOLE_PACKAGES:
        return
    if kind not in ("hatchling", "setuptools"):
        expected = f"the wheel has the manifest; whether {backend!r} packs data beside modules is unknown here"
        fix = "build a wheel, and look inside"
        yield project.finding(f"{file} may be missing from the wheel", expected, fix, "build-system").note()
        return
    why, fix = _hatch(project, file, package) if kind == "hatchling" else _setuptools(project, manifest)
    if why:
        keys = ("tool", "hatch" if kind == "hatchling" else "setuptools")
        line = project.line(*keys) or project.line("build-system")
        expected = f"the wheel has every manifest; {why}"
        yield Finding(f"{file} is missing from the wheel", expected, fix, project.path, line)


def _hatch(project: Project, file: str, package: str) -> tuple[str, str]:
    """Return why hatchling leaves a file out, or an empty text, and the fix."""
    build, wheel = ("tool", "hatch", "build"), ("tool", "hatch", "build", "targets", "wheel")

    def setting(name: str) -> tuple[str, ...] | None:
        found = project.texts(*wheel, name)
        return project.texts(*build, name) if found is None else found

    forced = (*project.table(*build, "force-include"), *project.table(*wheel, "force-include"))
    if _matches(file, [*forced, *(setting("artifacts") or ())]):
        return "", ""
    if _matches(file, setting("exclude") or ()):
        return "`exclude` of hatchling leaves it out", "exclude less"
    ignored = () if project.table(*build).get("ignore-vcs") is True else _ignored(project.folder)
    if _matches(file, ignored):
        return ".gitignore leaves it out, and hatchling uses that", f"add !{MANIFEST} to .gitignore"
    listed = {name: found for name in ("only-include", "packages", "include") if (found := setting(name)) is not None}
    for name, patterns in listed.items():
        if not _matches(file, patterns):
            return f"`{name}` of hatchling is {list(patterns)}", f"add {file!r} to it, or its package"
    default = canonicalize_name(project.name).replace("-", "_") or package
    if listed or package == default:
        return "", ""
    fix = "list the package: [tool.hatch.build.targets.wheel] packages = [...]"
    return f"hatchling takes the package {default!r}, by the project's name", fix


def _setuptools(project: Project, manifest: Path) -> tuple[str, str]:
    """Return why setuptools leaves the manifest out, or an empty text, and the fix."""
    excluded = _package_data(project, manifest, "exclude-package-data")
    if excluded:
        return f"`exclude-package-data` of setuptools contains {excluded!r}", "exclude less"
    if _package_data(project, manifest, "package-data"):
        return "", ""
    fix = f'add [tool.setuptools.package-data] "*" = ["{MANIFEST}"]'
    if project.table("tool", "setuptools").get("include-package-data") is False:
        return "`include-package-data` of setuptools is false, and `package-data` does not name it", fix
    requires = " ".join(project.texts("build-system", "requires") or ())
    if re.search(r"setuptools[-_](scm|git)", requires) or _is_in_template(project.folder):
        return "", ""
    return "setuptools takes modules only, and neither `package-data` nor MANIFEST.in names it", fix


def _package_data(project: Project, manifest: Path, setting: str) -> str:
    """Return the pattern of a setting about package data that matches the manifest, or an empty text."""
    for package, patterns in project.table("tool", "setuptools", setting).items():
        depth = 0 if package in ("*", "") else package.count(".") + 1
        for pattern in patterns if isinstance(patterns, list) else ():
            names = manifest.parts[-1 - pattern.count("/") :]
            place = manifest.parts[: -len(names)][-depth:] if depth else ()
            if fnmatch("/".join(names), pattern) and ".".join(place) == ("" if depth == 0 else package):
                return str(pattern)
    return ""


def _is_in_template(folder: Path) -> bool:
    words = [line.split() for line in _lines(folder / "MANIFEST.in")]
    return any(
        line and (line[0] == "graft" or ("include" in line[0] and any(map(_matches_manifest, line[1:]))))
        for line in words
    )


def _ignored(folder: Path) -> list[str]:
    """Return the patterns of .gitignore, or none if a later one includes the manifest again."""
    lines = [line.strip() for line in _lines(folder / ".gitignore")]
    if any(line.startswith("!") and _matches_manifest(line[1:]) for line in lines):
        return []
    return [line for line in lines if line and not line.startswith(("#", "!"))]


def _matches_manifest(pattern: str) -> bool:
    return fnmatch(MANIFEST, pattern.rpartition("/")[2])


def _lines(file: Path) -> list[str]:
    return file.read_text("utf-8", errors="replace").splitlines() if file.is_file() else []


def _matches(file: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern as in .gitignore matches a file, or a folder that contains it."""
    parts = file.split("/")
    heads = ["/".join(parts[: end + 1]) for end in range(len(parts))]
    for pattern in patterns:
        bare = pattern.strip("/").removeprefix("./").removesuffix("/**").removesuffix("/*")
        anchored = "/" in pattern.rstrip("/")
        if any(fnmatch(each, bare.removeprefix("**/")) for each in ([*heads] if anchored else [*parts, *heads])):
            return True
        if bare in ("", ".") or (
            pattern.startswith("**/") and any(fnmatch(p, bare.removeprefix("**/")) for p in parts)
        ):
            return True
    return False
