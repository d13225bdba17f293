"""Doubles in place of kernel libraries, and a plugin registered beside them as a backend that a CPU may run."""

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
from attnplug.selection import process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from types import ModuleType


@frozen(eq=False)
class Doubles:
    """
    The doubles of a plugin's libraries.

    Attributes:
        package: The plugin's package.
        name: What the backend is called that a CPU may run.
        folder: Where the doubles are.
        packages: Their packages.
        changes: Patterns, and what replaces them in the plugin's manifest: another name, no GPU.
        unusable: Why they are not used, where a library is installed that they would be mistaken for; None elsewhere.
        prepare: Called whenever they have been put in place, with the versions.
    """

    package: str
    name: str
    folder: Path
    packages: tuple[str, ...]
    changes: tuple[tuple[str, str], ...]
    unusable: str | None
    prepare: Callable[[Mapping[str, str]], None]
    modules: dict[str, ModuleType] = field(init=False, factory=dict)
    stages: dict[tuple[tuple[str, str], ...], Stage] = field(init=False, factory=dict)

    def stage(self, versions: Mapping[str, str]) -> Stage:
        """Return the stage of these versions, the same in all of a run."""
        key = tuple(versions.items())
        if key not in self.stages:
            self.stages[key] = Stage(self, versions)
        return self.stages[key]

    def close(self) -> None:
        """Remove what the stages have written."""
        while self.stages:
            self.stages.popitem()[1].close()

    def manifest(self) -> str:
        """Return the text of the changed manifest."""
        module = importlib.import_module(self.package)
        text = Path(str(module.__file__)).with_name("attnplug.toml").read_text(encoding="utf-8")
        for pattern, replacement in self.changes:
            text, count = re.subn(pattern, replacement, text, flags=re.MULTILINE)
            assert count, f"attnplug.toml has nothing like {pattern!r} any more"
        return text

    def load(self, requirements: attnplug.Requirements, variant: str, **keywords: Any) -> Any:
        """Return a backend on a double, by the keywords of `attnplug.load`. They have to be in place."""
        return attnplug.load(requirements, Device.cpu(), backend=f"{self.name}/{variant}", **keywords)

    def is_doubled(self, module: str) -> bool:
        """Tell whether a module is one of theirs."""
        return module.partition(".")[0] in self.packages

    def fixture(self, versions: Mapping[str, str], journal: str) -> Any:
        """
        Return a fixture, for a name `doubled`, that puts them in place.

        Args:
            versions: Of the distributions.
            journal: The module in which they write down what they are asked.
        """

        @pytest.fixture
        def doubled() -> Iterator[None]:
            if self.unusable:
                pytest.skip(self.unusable)
            with self.stage(versions).entered():
                importlib.import_module(journal).journal.clear()
                yield

        return doubled

    def generating(self, versions: Mapping[str, str]) -> Any:
        """Return a hook `pytest_generate_tests` with which the kit finds the backend, for tests that use `doubled`."""

        @pytest.hookimpl(wrapper=True)
        def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
            if "doubled" not in metafunc.fixturenames or self.unusable:
                return (yield)
            with self.stage(versions).entered():
                return (yield)

        return pytest_generate_tests


class Stage:
    """
    The process where the libraries are doubles. What it decided is kept from one entry to the next.

    Args:
        doubles: The doubles.
        versions: What the metadata of the distributions says.
    """

    def __init__(self, doubles: Doubles, versions: Mapping[str, str]) -> None:
        self._doubles, self._versions, self._state = doubles, versions, None
        self._folder = TemporaryDirectory(prefix="attnplug-doubles-")
        root = Path(self._folder.name)
        for name, version in versions.items():
            info = root / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        self._manifest = root / "attnplug.toml"
        try:
            self._manifest.write_text(doubles.manifest(), encoding="utf-8")
        except AssertionError:
            self.close()
            raise

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Put the doubles in place while the body runs."""
        outside, path = (process._state, process._by_hand), list(sys.path)
        doubles, modules = self._doubles, self._doubles.modules  # adapters hold on to the modules they were made with
        sys.path[:0] = [self._folder.name, str(doubles.folder)]
        sys.modules.update(modules)
        process._state, process._by_hand = self._state, ()
        try:
            if self._state is None:
                importlib.invalidate_caches()
                attnplug.register(f"{doubles.package}.plugin", manifest=self._manifest)
            doubles.prepare(self._versions)
            yield
        finally:
            self._state = process._state
            sys.path[:] = path
            modules.update({name: sys.modules.pop(name) for name in list(sys.modules) if doubles.is_doubled(name)})
            process._state, process._by_hand = outside

    def close(self) -> None:
        """Remove its files."""
        self._folder.cleanup()
