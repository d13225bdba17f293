"""Whether a wheel will contain the manifest, as far as the settings of the build backend tell. Nothing is built."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Final

from packaging.utils import canonicalize_name

from attnplug.manifest import MANIFEST
from attnplug_kit.check.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from attnplug_kit.check.project import Project

_WHOLE: Final = ("flit_core", "poetry", "pdm", "uv_build", "scikit_build_core", "maturin")
"""Build backends that take every file of a package."""


def check_wheel(project: Project, manifest: Path, package: str) -> Iterator[Finding]:
    """
    Yield that the manifest will not be in the wheel.

    Args:
        project: The project.
        manifest: The file.
        package: The top-level package.
    """
    system = project.table("build-system")
    backend = str(system.get("build-backend", "setuptools.build_meta"))
    kind = re.split(r"[.:]", backend)[0]
    if kind == "hatchling":
        why, fix = _hatch(project, manifest, package)
    elif kind == "setuptools":
        why, fix = _setuptools(project, manifest)
    elif kind in _WHOLE:
        return
    else:
        expected = f"whether {backend!r} puts data beside modules into a wheel is not known here"
        yield _finding(project, manifest, expected, "build a wheel, and look inside", "build-system").note()
        return
    if why:
        yield _finding(project, manifest, why, fix, "tool", "hatch" if kind == "hatchling" else "setuptools")


def _hatch(project: Project, manifest: Path, package: str) -> tuple[str, str]:
    """Say why hatchling leaves the manifest out, and the fix."""
    build, wheel = ("tool", "hatch", "build"), ("tool", "hatch", "build", "targets", "wheel")
    file = manifest.relative_to(project.folder).as_posix()

    def setting(name: str) -> tuple[str, ...] | None:
        found = project.texts(*wheel, name)
        return project.texts(*build, name) if found is None else found

    forced = (*project.table(*build, "force-include"), *project.table(*wheel, "force-include"))
    if _matches(file, [*forced, *(setting("artifacts") or ())]):
        return "", ""
    listed = {name: found for name in ("only-include", "packages", "include") if (found := setting(name)) is not None}
    if _matches(file, setting("exclude") or ()):
        return "`exclude` of hatchling leaves it out", "exclude less"
    ignored = () if project.table(*build).get("ignore-vcs") is True else _ignored(project.folder)
    if _matches(file, ignored):
        return ".gitignore leaves it out, which hatchling heeds", f"add !{MANIFEST} to .gitignore"
    for name, patterns in listed.items():
        if not _matches(file, patterns):
            return f"`{name}` of hatchling is {list(patterns)}", f"add {file!r} to it, or its package"
    expected = canonicalize_name(project.name).replace("-", "_") or package
    by_name = (
        "" if listed or package == expected else f"hatchling takes the package {expected!r}, as the project is named"
    )
    return by_name, "list the package: [tool.hatch.build.targets.wheel] packages = [...]"


def _setuptools(project: Project, manifest: Path) -> tuple[str, str]:
    """Say why setuptools leaves the manifest out, and the fix."""
    own = ("tool", "setuptools")
    excluded = _globs(project, manifest, "exclude-package-data")
    if excluded:
        return f"`exclude-package-data` of setuptools contains {excluded!r}", "exclude less"
    if _globs(project, manifest, "package-data"):
        return "", ""
    requires = " ".join(project.texts("build-system", "requires") or ())
    if project.table(*own).get("include-package-data") is not False:
        if re.search(r"setuptools[-_](scm|git)", requires) or _is_in_template(project.folder):
            return "", ""
        return (
            "setuptools takes modules only, and neither `package-data` nor MANIFEST.in names it",
            f'add [tool.setuptools.package-data] "*" = ["{MANIFEST}"]',
        )
    return (
        "`include-package-data` of setuptools is false, and `package-data` does not name it",
        f'add [tool.setuptools.package-data] "*" = ["{MANIFEST}"]',
    )


def _globs(project: Project, manifest: Path, setting: str) -> str:
    """Return the pattern of a setting about package data that means the manifest, or an empty text."""
    for package, patterns in project.table("tool", "setuptools", setting).items():
        depth = 0 if package in ("*", "") else package.count(".") + 1
        for pattern in patterns if isinstance(patterns, list) else ():
            names = manifest.parts[-1 - pattern.count("/") :]
            place = manifest.parts[: -len(names)][-depth:] if depth else ()
            if fnmatch("/".join(names), pattern) and ".".join(place) == ("" if depth == 0 else package):
                return str(pattern)
    return ""


def _is_in_template(folder: Path) -> bool:
    template = folder / "MANIFEST.in"
    lines = template.read_text(encoding="utf-8", errors="replace").splitlines() if template.is_file() else []
    words = [line.split() for line in lines]
    return any(
        line and (line[0] == "graft" or ("include" in line[0] and any(fnmatch(MANIFEST, _name(w)) for w in line[1:])))
        for line in words
    )


def _name(pattern: str) -> str:
    return pattern.rpartition("/")[2]


def _ignored(folder: Path) -> list[str]:
    """Return the patterns of .gitignore; one that is taken back later does not count."""
    file = folder / ".gitignore"
    lines = [line.strip() for line in file.read_text("utf-8", errors="replace").splitlines()] if file.is_file() else []
    if any(line.startswith("!") and fnmatch(MANIFEST, _name(line[1:])) for line in lines):
        return []
    return [line for line in lines if line and not line.startswith(("#", "!"))]


def _matches(file: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern of the kind that .gitignore has means a file, or a folder that it is in."""
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


def _finding(project: Project, manifest: Path, expected: str, fix: str, *keys: str) -> Finding:
    line = project.line(*keys) or project.line("build-system")
    given = (
        f"{manifest.relative_to(project.folder).as_posix()} {'may be' if keys == ('build-system',) else 'is'} missing"
    )
    return Finding(f"{given} from the wheel", expected, fix, project.path, line)
