"""Checking one path: a manifest by itself, or a project with all its manifests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attnplug.commands import tracked
from attnplug.errors import ManifestError, RequestError
from attnplug.manifest import CONTRACT_API, MANIFEST, Manifest, locate
from attnplug.negotiation import most_evaluations
from attnplug.request import parse_toml
from attnplug_kit.check.exercised import check_evidence, find_unexercised
from attnplug_kit.check.names import OtherBackend, check_names, other_backends
from attnplug_kit.check.project import PYPROJECT, EntryPoint, Project, check_module, check_project, check_wheel
from attnplug_kit.check.report import Finding, Report
from attnplug_kit.check.requires import check_requires
from attnplug_kit.check.rules import check_preferences, check_rules
from attnplug_kit.check.source import check_hooks, check_options
from attnplug_kit.check.tolerant import TolerantReader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from attnplug_kit.unexercised import Unexercised

_LINE: Final = re.compile(r"at line (\d+)")


def examine(path: str, *, shown: bool = False) -> Report:
    """
    Check a manifest, or a plugin project.

    Args:
        path: An attnplug.toml, or the folder of a pyproject.toml.
        shown: Whether a progress bar is shown, on a terminal.

    Raises:
        RequestError: The path is neither.
    """
    place = Path(path)
    project = place.with_name(PYPROJECT) if place.name == PYPROJECT else place / PYPROJECT
    check = _Check(other_backends(), shown=shown)
    if project.is_file():
        check.project(project)
    elif place.is_dir():
        raise RequestError(
            f"the folder {path!r} has no {PYPROJECT}",
            "a project has one, and a manifest is a file",
            f"give the folder of a {PYPROJECT}, or an {MANIFEST}",
        )
    elif place.is_file():
        check.manifest(place, None)
    else:
        raise RequestError(f"{path!r} was given", "there is such a file or folder", f"give a project, or an {MANIFEST}")
    return check.report()


class _Check:
    """Collects the findings."""

    def __init__(self, others: tuple[OtherBackend, ...], *, shown: bool) -> None:
        self.others = others
        self.shown = shown
        self.files: list[str] = []
        self.names: list[str] = []
        self.findings: list[Finding] = []
        self.unexercised: list[Unexercised] = []
        self.evaluations: dict[str, int] = {}

    def report(self) -> Report:
        """Return all of them, in the order of the files and lines."""
        order = {path: place for place, path in enumerate(self.files)}
        found = dict.fromkeys(self.findings)
        ordered = sorted(found, key=lambda f: (order.get(f.path, len(order)), f.path, f.line or 0))
        names = tuple(dict.fromkeys(self.names))
        unexercised = tuple(dict.fromkeys(self.unexercised))
        return Report(tuple(self.files), names, tuple(ordered), unexercised, self.evaluations)

    def project(self, path: Path) -> None:
        """Check a project."""
        read = self.toml(path, "the file", "a pyproject.toml")
        if read is None:
            return
        project = Project(path.parent, *read)
        self.findings += check_project(project)
        for point in project.entry_points():
            self.entry_point(project, point)

    def entry_point(self, project: Project, point: EntryPoint) -> None:
        """Check an entry point, its module and the manifest beside it."""
        self.names.append(point.name)
        problems = list(check_module(project, point))
        self.findings += problems
        file = None if problems else project.module(point.module)
        if file is None:
            return
        self.files.append(str(file))
        self.findings += check_hooks(file)
        package = point.module.partition(".")[0]
        root = file.parents[len(point.module.split(".")) - (0 if file.name == "__init__.py" else 1)]
        manifest = file.with_name(MANIFEST)
        if not manifest.is_file():
            self.findings.append(_missing(project, point, manifest, root))
            return
        self.findings += check_wheel(project, manifest, package)
        self.manifest(manifest, project, point, root / package if (root / package).is_dir() else file)

    def manifest(
        self, path: Path, project: Project | None, point: EntryPoint | None = None, package: Path | None = None
    ) -> None:
        """Check a manifest, with its entry point and package if it belongs to a project."""
        read = self.toml(path, "the manifest", "a TOML 1.0 document")
        if read is None:
            return
        text, data = read
        reader = TolerantReader(text, str(path))
        try:
            manifest = reader.manifest(data)
        except ManifestError as error:  # another major version: its keys may mean anything
            self.findings += [*reader.findings, Finding.of(error)]
            return
        self.findings += reader.findings
        self.names += [] if point else [manifest.name]
        parts: dict[str, Callable[[], Iterable[Finding]]] = {
            "names": lambda: check_names(manifest, text, project.name if project else None, self.others),
            "requirements": lambda: check_requires(manifest, text),
            "version of the contract": lambda: _check_api(manifest, text),
        }
        if point is not None and point.name != manifest.name:
            parts["name of the entry point"] = lambda: [_other_name(manifest, text, point)]
        if package is not None:
            parts["options"] = lambda: check_options(manifest, text, package)
        if not reader.findings:
            self.evaluations |= {f"{manifest.name}/{v.name}": most_evaluations(manifest, v) for v in manifest.variants}
            parts["rules"] = lambda: check_rules(manifest, text)
            parts["orders of preference"] = lambda: check_preferences(manifest, text)
            parts["evidence"] = lambda: self.evidence(manifest, project)
        for part in tracked(tuple(parts), lambda part: f"checking {manifest.name}: {part}", shown=self.shown):
            self.findings += parts[part]()

    def evidence(self, manifest: Manifest, project: Project | None) -> tuple[Finding, ...]:
        """Return the files that verify nothing, and record what no evidence covers, which is no finding."""
        self.unexercised += find_unexercised(manifest, project.distribution if project else None)
        return tuple(check_evidence(manifest))

    def toml(self, path: Path, what: str, form: str) -> tuple[str, dict[str, Any]] | None:
        """Return the text and the data of a file, or record why it cannot be read."""
        self.files.append(str(path))
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            found = Finding(f"{what} cannot be read: {error}", f"it is {form}, in UTF-8", "repair it", str(path))
        else:
            try:
                return text, parse_toml(text)
            except ValueError as error:
                line = _LINE.search(str(error))
                number = int(line[1]) if line else None
                found = Finding(f"it is not TOML: {error}", f"it is {form}", "correct the syntax", str(path), number)
        self.findings.append(found)
        return None


def _missing(project: Project, point: EntryPoint, manifest: Path, root: Path) -> Finding:
    elsewhere = [file.relative_to(project.folder).as_posix() for file in sorted(root.rglob(MANIFEST))]
    hint = f"; there is one at {elsewhere[0]}" if elsewhere else ""
    return Finding(
        f"no {MANIFEST} beside {point.module!r}{hint}",
        f"it is {manifest.relative_to(project.folder).as_posix()}",
        "move it there" if elsewhere else "write it",
        project.path,
        point.line,
    )


def _other_name(manifest: Manifest, text: str, point: EntryPoint) -> Finding:
    return Finding(
        f"name = {manifest.name!r}",
        f"the entry point calls this backend {point.name!r}, and both have one name",
        "use one name in both",
        manifest.path,
        locate(text, ("backend", "name")),
    )


def _check_api(manifest: Manifest, text: str) -> Iterator[Finding]:
    if manifest.is_newer:
        theirs, ours = (".".join(map(str, api)) for api in (manifest.api, CONTRACT_API))
        yield Finding(
            f"api = {theirs!r}",
            f"this core has contract {ours}, and ignores fields that it does not know, misspelt ones too",
            "check with a core of that version",
            manifest.path,
            locate(text, ("api",)),
            "note",
        )
