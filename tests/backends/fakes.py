"""Fakes in place of kernel libraries, and a plugin registered on them as a backend that supports the CPU."""

from __future__ import annotations

import importlib
import re
import sys
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
from attrs import field, frozen

import attnplug
from attnplug.request.device import Device
from attnplug.selection.process import PROCESS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from types import ModuleType


@frozen(eq=False)
class FakeLibraries:
    """
    The fakes of the libraries of a plugin.

    Attributes:
        package: The plugin's package.
        name: The name of the backend that supports the CPU.
        folder: The folder of the fakes.
        packages: The packages of the fakes.
        changes: Patterns in the plugin's manifest and their replacements: another name, no GPU.
        skip_reason: Why the fakes are not used: a library is installed that they would replace. None elsewhere.
        prepare: Called with the versions after each activation; returns what is called when it ends, or None.
    """

    package: str
    name: str
    folder: Path
    packages: tuple[str, ...]
    changes: tuple[tuple[str, str], ...]
    skip_reason: str | None
    prepare: Callable[[Mapping[str, str]], Callable[[], None] | None]
    modules: dict[str, ModuleType] = field(init=False, factory=dict)
    environments: dict[tuple[tuple[str, str], ...], FakeEnvironment] = field(init=False, factory=dict)

    def environment(self, versions: Mapping[str, str]) -> FakeEnvironment:
        """Return the environment of these versions, one per process."""
        key = tuple(versions.items())
        if key not in self.environments:
            self.environments[key] = FakeEnvironment(self, versions)
        return self.environments[key]

    def close(self) -> None:
        """Remove the files of all environments."""
        while self.environments:
            self.environments.popitem()[1].close()

    def manifest(self) -> str:
        """Return the text of the changed manifest."""
        return edited_manifest(self.package, self.changes)

    def load(self, requirements: attnplug.Requirements, variant: str, **keywords: Any) -> Any:
        """Return a backend on active fakes, by the keywords of `attnplug.load`."""
        return attnplug.load(requirements, Device.cpu(), backend=f"{self.name}/{variant}", **keywords)

    def is_fake(self, module: str) -> bool:
        """Return whether a module is part of the fakes."""
        return module.partition(".")[0] in self.packages

    def fixture(self, versions: Mapping[str, str], journal: str) -> Any:
        """
        Return a fixture, to be named `fakes`, that activates the fakes.

        Args:
            versions: The versions of the distributions.
            journal: The module in which the fakes record their calls.
        """

        @pytest.fixture
        def fakes() -> Iterator[None]:
            if self.skip_reason:
                pytest.skip(self.skip_reason)
            with self.environment(versions).active():
                importlib.import_module(journal).journal.clear()
                yield

        return fakes

    def collection_hook(self, versions: Mapping[str, str]) -> Any:
        """Return a hook `pytest_generate_tests` that activates the fakes where the kit collects tests with `fakes`."""

        @pytest.hookimpl(wrapper=True)
        def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
            if "fakes" not in metafunc.fixturenames or self.skip_reason:
                return (yield)
            with self.environment(versions).active():
                return (yield)

        return pytest_generate_tests


def manifest_of(package: str) -> Path:
    """Return the path of a plugin's manifest."""
    return Path(str(importlib.import_module(package).__file__)).with_name("attnplug.toml")


def edited_manifest(package: str, changes: Iterable[tuple[str, str]]) -> str:
    """Return the text of a plugin's manifest after changes, each a pattern that must match and its replacement."""
    text = manifest_of(package).read_text(encoding="utf-8")
    for pattern, replacement in changes:
        text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
        assert count, f"attnplug.toml has nothing like {pattern!r} any more"
    return text


class FakeEnvironment:
    """
    The process state where the libraries are fakes. Its decisions are kept between activations.

    Args:
        fakes: The fakes.
        versions: The versions in the metadata of the distributions.
    """

    def __init__(self, fakes: FakeLibraries, versions: Mapping[str, str]) -> None:
        self._fakes, self._versions, self._state = fakes, versions, None
        self._folder = TemporaryDirectory(prefix="attnplug-fakes-")
        root = Path(self._folder.name)
        for name, version in versions.items():
            info = root / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        self._manifest = root / "attnplug.toml"
        try:
            self._manifest.write_text(fakes.manifest(), encoding="utf-8")
        except AssertionError:
            self.close()
            raise

    @contextmanager
    def active(self) -> Iterator[None]:
        """Put the fakes in place of the libraries while the body runs."""
        outside, path = PROCESS.state, list(sys.path)
        fakes, modules = self._fakes, self._fakes.modules  # adapters keep the modules that they were made with
        sys.path[:0] = [self._folder.name, str(fakes.folder)]
        sys.modules.update(modules)
        PROCESS.state = self._state
        undo = None
        try:
            if self._state is None:
                importlib.invalidate_caches()
                attnplug.register(f"{fakes.package}.plugin", manifest=self._manifest)
            undo = fakes.prepare(self._versions)
            yield
        finally:
            if undo is not None:
                undo()
            self._state = PROCESS.state
            sys.path[:] = path
            modules.update({name: sys.modules.pop(name) for name in list(sys.modules) if fakes.is_fake(name)})
            PROCESS.state = outside

    def close(self) -> None:
        """Remove its files."""
        self._folder.cleanup()
