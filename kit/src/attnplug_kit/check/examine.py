"""Checking one path: a manifest by itself, or a project with all its manifests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attnplug.errors import ManifestError, RequestError
from attnplug.manifest import CONTRACT_API, MANIFEST, Manifest, locate
from attnplug.request import parse_toml
from attnplug_kit.check.finding import Finding, Report
from attnplug_kit.check.names import Taken, check_names, taken
from attnplug_kit.check.preferences import check_preferences
from attnplug_kit.check.project import PYPROJECT, Offer, Project, check_module, check_project, find_module
from attnplug_kit.check.requires import check_requires
from attnplug_kit.check.rules import check_rules
from attnplug_kit.check.source import check_hooks, check_options
from attnplug_kit.check.tolerant import TolerantReader
from attnplug_kit.check.wheel import check_wheel

if TYPE_CHECKING:
    from collections.abc import Iterator

_LINE: Final = re.compile(r"at line (\d+)")


def examine(path: str) -> Report:
    """
    Check a manifest, or a plugin project.

    Raises:
        RequestError: There is neither at the path.
    """
    place = Path(path)
    project = place.with_name(PYPROJECT) if place.name == PYPROJECT else place / PYPROJECT
    check = _Check(taken())
    if place.is_dir() or place.name == PYPROJECT:
        if not project.is_file():
            raise RequestError(
                f"the folder {path!r} was given",
                f"a project has a {PYPROJECT}, and a manifest is a file",
                f"give the folder of a {PYPROJECT}, or an {MANIFEST}",
            )
        check.project(project)
    elif place.is_file():
        check.manifest(place, None)
    else:
        raise RequestError(
            f"{path!r} was given", "there is no such file or folder", f"give a project, or an {MANIFEST}"
        )
    return check.report()


class _Check:
    """What has been found so far."""

    def __init__(self, others: tuple[Taken, ...]) -> None:
        self.others = others
        self.files: list[str] = []
        self.names: list[str] = []
        self.findings: list[Finding] = []

    def report(self) -> Report:
        """Return all of it, in the order of the files that were looked at."""
        order = {path: place for place, path in enumerate(self.files)}
        found = dict.fromkeys(self.findings)
        ordered = sorted(found, key=lambda f: (order.get(f.path, len(order)), f.path, f.line or 0))
        return Report(tuple(self.files), tuple(dict.fromkeys(self.names)), tuple(ordered))

    def project(self, path: Path) -> None:
        """Check a project."""
        read = self.toml(path, "the file", "a pyproject.toml")
        if read is None:
            return
        project = Project(path.parent, *read)
        self.findings += check_project(project)
        for offer in project.offers():
            self.offer(project, offer)

    def offer(self, project: Project, offer: Offer) -> None:
        """Check where one entry point leads."""
        self.names.append(offer.name)
        problems = list(check_module(project, offer))
        self.findings += problems
        file = None if problems else find_module(project, offer.module)
        if file is None:
            return
        self.files.append(str(file))
        self.findings += check_hooks(file)
        package = offer.module.partition(".")[0]
        root = file.parents[len(offer.module.split(".")) - (0 if file.name == "__init__.py" else 1)]
        manifest = file.with_name(MANIFEST)
        if not manifest.is_file():
            self.findings.append(_missing(project, offer, manifest, root))
            return
        self.findings += check_wheel(project, manifest, package)
        self.manifest(manifest, project.name, offer, root / package if (root / package).is_dir() else file)

    def manifest(
        self, path: Path, distribution: str | None, offer: Offer | None = None, package: Path | None = None
    ) -> None:
        """Check a manifest, of which more is known where it belongs to a project."""
        read = self.toml(path, "the manifest", "a TOML 1.0 document")
        if read is None:
            return
        text, data = read
        reader = TolerantReader(text, str(path))
        try:
            manifest = reader.manifest(data)
        except ManifestError as error:  # another major version: nothing is known of the rest
            self.findings += [*reader.findings, Finding.of(error)]
            return
        self.findings += reader.findings
        self.names += [] if offer else [manifest.name]
        self.findings += check_names(manifest, text, distribution, self.others)
        self.findings += check_requires(manifest, text)
        self.findings += _about_api(manifest, text)
        if offer is not None and offer.name != manifest.name:
            self.findings.append(_other_name(manifest, text, offer))
        if package is not None:
            self.findings += check_options(manifest, text, package)
        if not reader.findings:
            self.findings += check_rules(manifest, text)
            self.findings += check_preferences(manifest, text)

    def toml(self, path: Path, what: str, form: str) -> tuple[str, dict[str, Any]] | None:
        """Read a file, or tell why not."""
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


def _missing(project: Project, offer: Offer, manifest: Path, root: Path) -> Finding:
    elsewhere = [file.relative_to(project.folder).as_posix() for file in sorted(root.rglob(MANIFEST))]
    told = f"; there is one at {elsewhere[0]}" if elsewhere else ""
    return Finding(
        f"no {MANIFEST} beside {offer.module!r}{told}",
        f"it is looked for at {manifest.relative_to(project.folder).as_posix()}",
        "move it there" if elsewhere else "write it",
        project.path,
        offer.line,
    )


def _other_name(manifest: Manifest, text: str, offer: Offer) -> Finding:
    return Finding(
        f"name = {manifest.name!r}",
        f"the entry point calls this backend {offer.name!r}, and the two agree",
        "use one name in both",
        manifest.path,
        locate(text, ("backend", "name")),
    )


def _about_api(manifest: Manifest, text: str) -> Iterator[Finding]:
    if manifest.is_newer:
        theirs, ours = (".".join(map(str, api)) for api in (manifest.api, CONTRACT_API))
        yield Finding(
            f"api = {theirs!r}",
            f"this core speaks {ours}, and passes over fields that it does not know: a misspelt one among them too",
            "check with a core of that version",
            manifest.path,
            locate(text, ("api",)),
            "note",
        )
