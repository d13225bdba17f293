"""
Plugins: what installed distributions offer, each with the manifest beside its module; and those that this core knows
by name, installed or not.

A manifest is found through the import system's answer for the *top-level* package. Python imports a package to find
what is inside it, so looking for the plugin module itself would already run the plugin's code.
"""

from __future__ import annotations

import importlib
import os
from errno import ENOENT
from functools import lru_cache, partial
from importlib.machinery import ExtensionFileLoader, SourceFileLoader, SourcelessFileLoader
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs
from attrs import field, frozen

from attnplug._foreign import ForeignCode
from attnplug._install import is_on_index
from attnplug._version import __version__
from attnplug.discovery.distribution import CORE, LONGEST, Entry
from attnplug.errors import ApiVersionError, ManifestError
from attnplug.manifest.line_numbers import locate
from attnplug.manifest.reader import LARGEST, parse_manifest, unreadable
from attnplug.manifest.schema import MANIFEST, Manifest, is_module
from attnplug.manifest.supports import parse_conditions
from attnplug.negotiation.ranking import DefaultOrder
from attnplug.negotiation.reason import Fix, Reason
from attnplug.request.files import decoded, read_bytes, read_capped, too_large
from attnplug.request.settings import parse_toml

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec


_CHECKOUT: Final = Path(__file__).resolve().parents[4]  # where core is installed from one in place
BUILT_IN: Final = Entry("torch", "attnplug.torch_backend.plugin", CORE, __version__)
MOST_BYTES: Final = 2**22
"""Bytes of all manifests that are read at most: 400 of the length of the longest known one. They take 6 s."""

BY_HAND: Final = "registered by hand"
"""The distribution of a plugin that `attnplug.register` has added: no distribution has this name."""

_OF_FILES: Final = (SourceFileLoader, SourcelessFileLoader, ExtensionFileLoader)
"""Loaders that find nothing where the file system has nothing."""

_KNOWN: Final = Path(__file__).with_name("known.toml")


@frozen
class Plugin:
    """
    One backend that one distribution offers. Nothing of its code has run.

    Attributes:
        name: The backend's name.
        module: Dotted name of the plugin module.
        distribution: The distribution that offers it; `BY_HAND` where none does.
        version: That distribution's version.
        manifest: What it declares; None where there is a problem.
        problem: Why it cannot be used at all: ``broken`` (its manifest is malformed or missing) or ``api`` (another
            major version of the contract).
        fix: The fix of the problem.
        built_in: Whether it is part of the core.
        error: The problem as an exception, for the strict setting.
    """

    name: str
    module: str
    distribution: str
    version: str
    manifest: Manifest | None = None
    problem: Reason | None = None
    fix: str = ""
    built_in: bool = False
    error: ManifestError | None = field(default=None, eq=False, repr=False)

    @property
    def label(self) -> str:
        """The distribution with its version."""
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def is_by_hand(self) -> bool:
        """Whether this process has registered it, and no distribution offers it."""
        return self.distribution == BY_HAND

    @property
    def part(self) -> str:
        """What to repair: the distribution with its version, or the module of one that was registered by hand."""
        return f"the module {self.module!r}" if self.is_by_hand else self.label


def read_plugins(entries: Sequence[Entry]) -> tuple[Plugin, ...]:
    """
    Read the manifests of entries, and of the built-in backend, which no metadata offers, and none removes.

    Where they might have more than `MOST_BYTES`, the smallest are read: a large one keeps no ordinary one out.
    """
    built_in = read_plugin(BUILT_IN, built_in=True)
    if len(entries) * LARGEST <= MOST_BYTES:
        return (built_in, *map(read_plugin, entries))
    left, found = MOST_BYTES, []
    for size, entry in sorted(((_size(entry), entry) for entry in entries), key=lambda pair: pair[0]):
        left -= size
        found.append(read_plugin(entry) if left >= 0 else _left_out(entry))
    return (built_in, *found)


def _size(entry: Entry) -> int:
    """Return the size of a manifest, of one in an archive the most that it may have; 0 where it does not read."""
    try:
        with reading("looking for it", passing=(ManifestError, OSError)):
            return _place(_top_level(entry.module), entry.module).stat().st_size
    except NotADirectoryError:
        return LARGEST
    except (ManifestError, OSError):
        return 0


def _left_out(entry: Entry) -> Plugin:
    error = ManifestError(
        f"the manifests of installed distributions have more than {MOST_BYTES:,} bytes",
        "the smallest are read, up to so many",
        "uninstall distributions that nobody uses",
    )
    return broken(Plugin(entry.name, entry.module, entry.distribution, entry.version), error)


def read_plugin(entry: Entry, *, built_in: bool = False) -> Plugin:
    """Read the manifest of an entry. What is wrong with it, whatever that is, becomes the plugin's problem."""
    plugin = Plugin(entry.name, entry.module, entry.distribution, entry.version, built_in=built_in)
    try:
        with reading(f"reading the {MANIFEST} of {entry.module!r}", passing=(ManifestError,)):
            return attrs.evolve(plugin, manifest=_read(entry))
    except ManifestError as error:
        return broken(plugin, error)


def reading(what: str, *, passing: tuple[type[Exception], ...] = ()) -> ForeignCode:
    """Return a context of an action on a plugin, such as "reading it": an unforeseen exception is a ManifestError."""
    refuse = partial(
        ManifestError,
        expected="whatever a distribution contains can be read",
        fix="install it in another version, and report this to its author",
    )
    return ForeignCode(f"{what} raises", refuse, passing=passing)


def broken(plugin: Plugin, error: ManifestError) -> Plugin:
    """Return a plugin that cannot be used, with the reason."""
    return attrs.evolve(plugin, manifest=None, problem=_problem(plugin, error), fix=error.fix, error=error)


def find_manifest(module: str) -> Path:
    """
    Return the path of a plugin module's manifest: beside the module, or inside it if it is a package.

    Args:
        module: Dotted name; nothing is imported. The file may be absent.

    Raises:
        ManifestError: The name is not that of a module, or its top-level package cannot be found.
    """
    return _place(_top_level(module), module)


def _read(entry: Entry) -> Manifest:
    if entry.problem:
        raise ManifestError(
            entry.problem,
            f"the metadata of {entry.distribution!r} can be read, as that of every distribution",
            f"install {entry.distribution!r} again, or in another version",
        )
    spec = _top_level(entry.module)
    path = _place(spec, entry.module)
    try:
        text = decoded(_content(spec, path))
    except (OSError, UnicodeDecodeError) as error:
        raise unreadable(path, error) from error
    manifest = parse_manifest(text, str(path))
    if manifest.name != entry.name:
        raise ManifestError(
            f"name = {manifest.name!r}",
            f"the entry point of {entry.distribution!r} calls this backend {entry.name!r}, and the two agree",
            f"use one name in both, and install {entry.distribution!r} again",
            manifest.path,
            locate(text, ("backend", "name")),
        )
    return manifest


def _content(spec: ModuleSpec, path: Path) -> bytes:
    """Read a manifest from the file system, or through the loader of a package that is not there."""
    try:
        return read_bytes(path, LARGEST)
    except (FileNotFoundError, NotADirectoryError):
        loader: Any = spec.loader
        if not hasattr(loader, "get_data") or isinstance(loader, _OF_FILES):
            raise
        archive = getattr(loader, "archive", None)
        return _from_loader(loader, path) if archive is None else _from_archive(archive, path)


def _from_archive(archive: str, path: Path) -> bytes:
    """Read a file of an archive, whose compressed files may be of any size."""
    from zipfile import ZipFile  # noqa: PLC0415 - few packages are in archives

    try:
        with ZipFile(archive) as files, files.open(path.relative_to(archive).as_posix()) as stream:
            return read_capped(stream.read, path, LARGEST)
    except KeyError:
        raise FileNotFoundError(ENOENT, os.strerror(ENOENT), str(path)) from None


def _from_loader(loader: Any, path: Path) -> bytes:
    content: bytes = loader.get_data(str(path))
    if len(content) > LARGEST:
        raise too_large(path, LARGEST)
    return content


def _top_level(module: str) -> ModuleSpec:
    name = module.partition(".")[0]
    if len(module) > LONGEST:
        raise ManifestError(
            f"the entry point has a value of {len(module):,} characters",
            f"it is the dotted name of the plugin module, and a name has at most {LONGEST} characters",
            "correct the entry point",
        )
    if not is_module(module):
        raise ManifestError(
            f"the entry point has the value {module!r}",
            "it is the dotted name of the plugin module",
            "correct the entry point",
        )
    with ForeignCode(
        f"looking for {name!r} fails:",
        lambda reason: ManifestError(f"the plugin module is {module!r}", reason, "repair its installation"),
    ):
        spec = find_spec(name) or _find_again(name)
    if spec is None:
        raise ManifestError(
            f"the plugin module is {module!r}",
            f"there is no package {name!r} on sys.path",
            "install its distribution again",
        )
    return spec


def _find_again(name: str) -> ModuleSpec | None:
    """Look again without the import system's cache of folders, which lacks what was installed this very second."""
    importlib.invalidate_caches()
    return find_spec(name)


def _place(spec: ModuleSpec, module: str) -> Path:
    parts = module.split(".")[1:]
    roots = [Path(root) for root in spec.submodule_search_locations or ()]
    if not roots:
        return Path(spec.origin or module).with_name(MANIFEST)  # a single module, no package
    return next((path for root in roots if (path := _beside(root, parts)).is_file()), _beside(roots[0], parts))


def _beside(root: Path, parts: list[str]) -> Path:
    inside = root.joinpath(*parts)
    return (inside if inside.is_dir() or not parts else inside.parent) / MANIFEST


def _problem(plugin: Plugin, error: ManifestError) -> Reason:
    where = f"{error.path}:{error.line}" if error.line is not None else error.path
    problem = f"{where}: {error.problem}" if where else error.problem
    if isinstance(error, ApiVersionError):
        return Reason("api", plugin.name, None, error.expected, problem)
    return Reason(
        "broken",
        plugin.name,
        None,
        f"{plugin.label} has no valid manifest",
        f"{problem}; {error.expected}",
    )


@frozen
class KnownPlugin:
    """
    A plugin that is known by name, installed or not.

    Attributes:
        name: The backend's name.
        aliases: What hosts call it.
        summary: One line about it.
        install: The distribution, as pip takes it.
        folder: Its folder in a checkout of attnplug; empty where it has none.
    """

    name: str
    aliases: tuple[str, ...]
    summary: str
    install: str
    folder: str = ""

    @property
    def fix(self) -> Fix:
        """How to install it: from the package index, else from the checkout that core runs from, else from another."""
        if is_on_index() or not self.folder:
            return Fix(install=(self.install,))
        from shlex import quote  # noqa: PLC0415 - few decisions show what is absent

        found = _CHECKOUT / self.folder
        if not found.is_dir():
            return Fix(action=f"in a checkout of attnplug: pip install ./{self.folder}")
        inside = found.is_relative_to(Path.cwd())
        return Fix(action=f"pip install {quote(f'./{found.relative_to(Path.cwd())}' if inside else str(found))}")


@frozen
class Known:
    """The content of ``known.toml``: plugins, and the default orders of backends for some devices."""

    plugins: tuple[KnownPlugin, ...] = ()
    orders: tuple[DefaultOrder, ...] = ()


@lru_cache(maxsize=1)
def read_known() -> Known:
    """Return the content of ``known.toml``."""
    return parse_known(_KNOWN.read_text(encoding="utf-8"))


def parse_known(text: str) -> Known:
    """
    Parse the text of such a file.

    Raises:
        ManifestError: A condition is about an unknown field, or its value is not allowed.
        ValueError: It is not TOML.
        KeyError: A key is missing.
    """
    data = parse_toml(text)
    plugins = (
        KnownPlugin(
            name,
            tuple(table["aliases"]),
            table["summary"],
            table["install"],
            table.get("folder", ""),
        )
        for name, table in sorted(data.get("plugins", {}).items())
    )
    orders = (
        DefaultOrder(
            parse_conditions(_fail, table["when"], ("order", i, "when")), tuple(table["order"]), table["because"]
        )
        for i, table in enumerate(data.get("order", []))
    )
    return Known(tuple(plugins), tuple(orders))


def _fail(_: object, problem: str, expected: str, fix: str) -> ManifestError:
    return ManifestError(problem, expected, fix, str(_KNOWN))
