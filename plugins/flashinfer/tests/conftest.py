"""
The fake in place of FlashInfer, and the plugin registered beside it as a backend that a CPU may run.

A test or class that uses the fixture `fakes` sees both, when it is collected and when it runs; nothing else does.
Where FlashInfer itself is installed the fake would be mistaken for it, and these tests are left out.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from plugins.flashinfer.tests.real import FLASHINFER
from tests.backends.fakes import FakeLibraries

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import attnplug

DISTRIBUTION: Final = "flashinfer-python"
VERSIONS: Final = {DISTRIBUTION: "0.6.12"}
IS_REAL_HERE: Final = find_spec("flashinfer") is not None
JOURNAL: Final = "flashinfer.journal"

collect_ignore = ["test_conformance.py"] if IS_REAL_HERE else []  # its tests are made while the fake is in place


def _tell_version(versions: Mapping[str, str]) -> None:
    importlib.import_module("flashinfer").__version__ = versions[DISTRIBUTION]


FAKES: Final = FakeLibraries(
    package="attnplug_flashinfer",
    name="flashinfer_fake",
    folder=Path(__file__).with_name("fakes"),
    packages=("flashinfer",),
    changes=(
        (r'name = "flashinfer", aliases = \[[^]]*\]', 'name = "flashinfer_fake"'),
        (r'^device_type = "cuda"', 'device_type = ["cuda", "cpu"]'),
        (r'compute_capability = ("[^"]*"|\{[^}]*\}),? ?', ""),
        # The fake needs no workspace, and every test of the kit would fill a new one with zeros.
        (r"^min = 128\ndefault = 256$", "min = 1\ndefault = 1"),
    ),
    skip_reason="FlashInfer is installed here, and its fake would be mistaken for it" if IS_REAL_HERE else None,
    prepare=_tell_version,
)

pytest_generate_tests = FAKES.collection_hook(VERSIONS)
fakes = FAKES.fixture(VERSIONS, JOURNAL)


def pytest_unconfigure() -> None:
    """Remove what the stages have written."""
    FAKES.close()


@pytest.fixture
def journal(fakes: None) -> Any:
    """Return what the fake has been asked, by this test alone."""
    return importlib.import_module(JOURNAL).journal


@pytest.fixture
def load_fake(fakes: None) -> Callable[..., Any]:
    """Return what loads a backend on the fake, by requirements, variant and the keywords of `attnplug.load`."""

    def load(requirements: attnplug.Requirements, variant: str = "fa2", **keywords: Any) -> Any:
        return FAKES.load(requirements, variant, **keywords)

    return load


@pytest.fixture
def library_at() -> Callable[[str], Any]:
    """Return what puts the fake in place of the release of a version, as a context."""
    if FAKES.skip_reason:
        pytest.skip(FAKES.skip_reason)
    return lambda version: FAKES.environment({DISTRIBUTION: version}).active()


@pytest.fixture
def load_real(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Return what loads the plugin on FlashInfer itself, by requirements, variant and options; for tests on a GPU."""
    FLASHINFER.register(monkeypatch)
    return lambda requirements, variant="fa2", **options: FLASHINFER.load(requirements, variant, **options)
