"""
Installs the fake in place of FlashInfer, and registers the plugin as a backend for CPUs.

Both are in effect only for tests and classes that use the fixture `fakes`, during collection and during the run.
Where FlashInfer itself is installed these tests are skipped, since the fake has the same import name.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from packaging.version import Version

from plugins.flashinfer.tests.real import FLASHINFER
from tests.backends.fakes import FakeLibraries

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import attnplug

DISTRIBUTION: Final = "flashinfer-python"
VERSIONS: Final = {DISTRIBUTION: "0.6.12"}
IS_REAL_HERE: Final = find_spec("flashinfer") is not None
JOURNAL: Final = "flashinfer.journal"

collect_ignore = ["test_conformance.py"] if IS_REAL_HERE else []  # its parameters are collected from the fake


def _set_version(versions: Mapping[str, str]) -> Callable[[], None] | None:
    """Set the version, and put the wrapper for latents of 0.7 into place where it is that or newer."""
    library = importlib.import_module("flashinfer")
    library.__version__ = versions[DISTRIBUTION]
    if Version(library.__version__) < Version("0.7"):
        return None
    newer, patch = importlib.import_module("flashinfer.structural"), pytest.MonkeyPatch()
    patch.setattr(library.mla, "MLAPlanMetadata", newer.MLAPlanMetadata, raising=False)
    patch.setattr(library, "BatchMLAPagedAttentionWrapper", newer.BatchMLAPagedAttentionWrapper)
    return patch.undo


FAKES: Final = FakeLibraries(
    package="attnplug_flashinfer",
    name="flashinfer_fake",
    folder=Path(__file__).with_name("fakes"),
    packages=("flashinfer",),
    changes=(
        (r'name = "flashinfer", aliases = \[[^]]*\]', 'name = "flashinfer_fake"'),
        (r'^device_type = "cuda"', 'device_type = ["cuda", "cpu"]'),
        (r'compute_capability = ("[^"]*"|\{[^}]*\}),? ?', ""),
        # The fake needs no workspace, and zeroing 256 MiB per test takes longer than the test.
        (r"^min = 128\ndefault = 256$", "min = 1\ndefault = 1"),
    ),
    skip_reason="FlashInfer is installed, and the fake has its import name" if IS_REAL_HERE else None,
    prepare=_set_version,
)

pytest_generate_tests = FAKES.collection_hook(VERSIONS)
fakes = FAKES.fixture(VERSIONS, JOURNAL)


def pytest_unconfigure() -> None:
    """Remove the folders of the fakes."""
    FAKES.close()


@pytest.fixture
def journal(fakes: None) -> Any:
    """Return the calls that this test makes of the fake."""
    return importlib.import_module(JOURNAL).journal


@pytest.fixture
def load_fake(fakes: None) -> Callable[..., Any]:
    """Return a function that loads a backend on the fake: requirements, variant, and keywords of `attnplug.load`."""

    def load(requirements: attnplug.Requirements, variant: str = "fa2", **keywords: Any) -> Any:
        return FAKES.load(requirements, variant, **keywords)

    return load


@pytest.fixture
def library_at() -> Callable[[str], Any]:
    """Return a function from a version to a context in which the fake has that version."""
    if FAKES.skip_reason:
        pytest.skip(FAKES.skip_reason)
    return lambda version: FAKES.environment({DISTRIBUTION: version}).active()


@pytest.fixture
def load_real(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return a function that loads the plugin on FlashInfer itself, on a GPU: requirements, variant, options."""
    FLASHINFER.register(monkeypatch)
    return lambda requirements, variant="fa2", **options: FLASHINFER.load(requirements, variant, **options)
