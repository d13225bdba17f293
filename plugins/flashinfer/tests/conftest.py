"""
The double in place of FlashInfer, and the plugin registered beside it as a backend that a CPU may run.

A test or class that uses the fixture `doubled` sees both, when it is collected and when it runs; nothing else does.
Where FlashInfer itself is installed the double would be mistaken for it, and these tests are left out.
"""

from __future__ import annotations

import importlib
import re
import sys
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final

import pytest

import attnplug
import attnplug_flashinfer
from attnplug.request.device import Device
from attnplug.selection import state as process
from plugins.flashinfer.tests.real import FLASHINFER

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

HERE: Final = Path(__file__).parent
NAME: Final = "flashinfer_double"
VERSION: Final = "0.6.12"
IS_REAL_HERE: Final = find_spec("flashinfer") is not None

collect_ignore = ["test_conformance.py"] if IS_REAL_HERE else []  # its tests are made while the double is in place


class Stage:
    """
    The process where the library is the double, in some version. What it decided is kept from one entry to the next.

    Args:
        version: What the metadata of ``flashinfer-python`` says.
    """

    def __init__(self, version: str = VERSION) -> None:
        self._folder = TemporaryDirectory(prefix="attnplug-flashinfer-")
        self._version = version
        self._state: Any = None
        root = Path(self._folder.name)
        info = root / f"flashinfer_python-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: flashinfer-python\nVersion: {version}\n")
        manifest = Path(attnplug_flashinfer.__file__).with_name("attnplug.toml").read_text(encoding="utf-8")
        self._manifest = root / "attnplug.toml"
        self._manifest.write_text(for_cpu(manifest), encoding="utf-8")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Put the double in place while the body runs."""
        outside, path = (process._state, process._by_hand), list(sys.path)
        sys.path[:0] = [self._folder.name, str(HERE / "double")]
        sys.modules.update(_double)
        process._state, process._by_hand = self._state, ()
        try:
            self._enter()
            yield
        finally:
            self._state = process._state
            sys.path[:] = path
            _double.update({name: sys.modules.pop(name) for name in list(sys.modules) if _is_of_the_double(name)})
            process._state, process._by_hand = outside

    def _enter(self) -> None:
        if self._state is None:
            importlib.invalidate_caches()
            attnplug.register("attnplug_flashinfer.plugin", manifest=self._manifest)
        importlib.import_module("flashinfer").__version__ = self._version

    def close(self) -> None:
        """Remove its files."""
        self._folder.cleanup()


def for_cpu(manifest: str) -> str:
    """
    Return the text of the plugin's manifest for a backend of another name that asks for no GPU.

    Its workspace is small: the double needs none, and every test of the kit would fill a new one with zeros.
    """
    for pattern, replacement in (
        (r'name = "flashinfer", aliases = \[[^]]*\]', f'name = "{NAME}"'),
        (r'^device_type = "cuda"', 'device_type = ["cuda", "cpu"]'),
        (r'compute_capability = ("[^"]*"|\{[^}]*\}),? ?', ""),
        (r"^min = 128\ndefault = 256$", "min = 1\ndefault = 1"),
    ):
        manifest, count = re.subn(pattern, replacement, manifest, flags=re.MULTILINE)
        assert count, f"attnplug.toml has nothing like {pattern!r} any more"
    return manifest


def _is_of_the_double(module: str) -> bool:
    return module.partition(".")[0] == "flashinfer"


_double: dict[str, ModuleType] = {}  # its modules while it is not in place: the plugin's were made with these
_stages: dict[str, Stage] = {}


def stage(version: str = VERSION) -> Stage:
    """Return the stage of a version, the same in all of a run."""
    if version not in _stages:
        _stages[version] = Stage(version)
    return _stages[version]


def pytest_unconfigure() -> None:
    """Remove what the stages have written."""
    while _stages:
        _stages.popitem()[1].close()


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Let the kit find the backend, for tests that use the double."""
    if "doubled" not in metafunc.fixturenames or IS_REAL_HERE:
        return (yield)
    with stage().entered():
        return (yield)


@pytest.fixture
def doubled() -> Iterator[None]:
    """Put the double in place of the library."""
    if IS_REAL_HERE:
        pytest.skip("FlashInfer is installed here, and its double would be mistaken for it")
    with stage().entered():
        importlib.import_module("flashinfer.journal").journal.clear()
        yield


@pytest.fixture
def journal(doubled: None) -> Any:
    """Return what the double has been asked, by this test alone."""
    return importlib.import_module("flashinfer.journal").journal


@pytest.fixture
def load_doubled(doubled: None) -> Callable[..., Any]:
    """Return what loads a backend on the double, by requirements, variant and the keywords of `attnplug.load`."""

    def load(requirements: attnplug.Requirements, variant: str = "fa2", **keywords: Any) -> Any:
        return attnplug.load(requirements, Device.cpu(), backend=f"{NAME}/{variant}", **keywords)

    return load


@pytest.fixture
def library_at() -> Callable[[str], Any]:
    """Return what puts the double in place of the release of a version, as a context."""
    if IS_REAL_HERE:
        pytest.skip("FlashInfer is installed here, and its double would be mistaken for it")
    return lambda version: stage(version).entered()


@pytest.fixture
def load_real(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return what loads the plugin on FlashInfer itself, by requirements, variant and options; for tests on a GPU."""
    FLASHINFER.offer(monkeypatch)
    return lambda requirements, variant="fa2", **options: FLASHINFER.load(requirements, variant, **options)
