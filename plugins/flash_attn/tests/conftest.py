"""
The doubles in place of all FlashAttention libraries, and the plugin registered beside them as one that a CPU may run.

A test or class that uses the fixture `doubled` sees both, when it is collected and when it runs; nothing else does.
Where one of the libraries is installed its double would be mistaken for it, and these tests are left out.
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
import attnplug_flash_attn
from attnplug.request.device import Device
from attnplug.selection import state as process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import ModuleType

HERE: Final = Path(__file__).parent
NAME: Final = "flash_attn_double"
VERSIONS: Final = {"flash-attn": "2.8.3", "vllm": "0.24.0", "flash-attn-3": "3.0.0", "flash-attn-4": "4.0.0b36"}
IS_REAL_HERE: Final = any(find_spec(name) is not None for name in ("flash_attn", "flash_attn_interface", "vllm"))

collect_ignore = ["test_conformance.py"] if IS_REAL_HERE else []  # its tests are made while the doubles are in place


class Stage:
    """The process where the libraries are doubles. What it decided is kept from one entry to the next."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="attnplug-flash-attn-")
        self._state: Any = None
        self._modules: dict[str, ModuleType] = {}  # the doubles' while they are not in place: adapters hold on to them
        self._ops: list[Any] = []
        root = Path(self._folder.name)
        for name, version in VERSIONS.items():
            info = root / f"{name.replace('-', '_')}-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        manifest = Path(attnplug_flash_attn.__file__).with_name("attnplug.toml").read_text(encoding="utf-8")
        self._manifest = root / "attnplug.toml"
        self._manifest.write_text(for_cpu(manifest), encoding="utf-8")

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Put the doubles in place while the body runs."""
        outside, path = (process._state, process._by_hand), list(sys.path)
        sys.path[:0] = [self._folder.name, str(HERE / "doubles")]
        sys.modules.update(self._modules)
        process._state, process._by_hand = self._state, ()
        try:
            self._enter()
            yield
        finally:
            self._state = process._state
            sys.path[:] = path
            self._modules.update({name: sys.modules.pop(name) for name in list(sys.modules) if _is_doubled(name)})
            process._state, process._by_hand = outside

    def _enter(self) -> None:
        if self._state is None:
            importlib.invalidate_caches()
            attnplug.register("attnplug_flash_attn.plugin", manifest=self._manifest)
            self._ops = [importlib.import_module(f"flash_attn_double.{name}").register() for name in _OP_MODULES]

    def close(self) -> None:
        """Remove its files."""
        self._folder.cleanup()


_OP_MODULES: Final = ("vllm_ops", "torch_op")
_stages: list[Stage] = []


def for_cpu(manifest: str) -> str:
    """Return the text of the plugin's manifest for a backend of another name that asks for no GPU."""
    for pattern, replacement in (
        (r'name = "flash_attn", aliases = \[[^]]*\]', f'name = "{NAME}"'),
        (r'^device_type = "cuda"', 'device_type = ["cuda", "cpu"]'),
        (r"^compute_capability = .*$", ""),
    ):
        manifest, count = re.subn(pattern, replacement, manifest, flags=re.MULTILINE)
        assert count, f"attnplug.toml has nothing like {pattern!r} any more"
    return manifest


def _is_doubled(module: str) -> bool:
    return module.partition(".")[0] in ("flash_attn", "flash_attn_interface", "flash_attn_double")


def stage() -> Stage:
    """Return the stage, the same in all of a run."""
    if not _stages:
        _stages.append(Stage())
    return _stages[0]


def pytest_unconfigure() -> None:
    """Remove what the stage has written."""
    while _stages:
        _stages.pop().close()


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    """Let the kit find the backend, for tests that use the doubles."""
    if "doubled" not in metafunc.fixturenames or IS_REAL_HERE:
        return (yield)
    with stage().entered():
        return (yield)


@pytest.fixture
def doubled() -> Iterator[None]:
    """Put the doubles in place of the libraries."""
    if IS_REAL_HERE:
        pytest.skip("a FlashAttention is installed here, and its double would be mistaken for it")
    with stage().entered():
        importlib.import_module("flash_attn_double.journal").journal.clear()
        yield


@pytest.fixture
def journal(doubled: None) -> Any:
    """Return what the doubles have been asked, by this test alone."""
    return importlib.import_module("flash_attn_double.journal").journal


@pytest.fixture
def load_doubled(doubled: None) -> Callable[..., Any]:
    """Return what loads a backend on a double, by requirements, variant and the keywords of `attnplug.load`."""

    def load(requirements: attnplug.Requirements, variant: str, **keywords: Any) -> Any:
        return attnplug.load(requirements, Device.cpu(), backend=f"{NAME}/{variant}", **keywords)

    return load
