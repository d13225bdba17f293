"""
Installs the fake in place of sgl-flash-mla, and registers the plugin as a backend for CPUs.

Both are in effect only for tests and classes that use the fixture `fakes`, during collection and during the run.
Where the library itself is installed these tests are skipped, since the fake has the same import name.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.backends.fakes import FakeLibraries

if TYPE_CHECKING:
    from collections.abc import Callable

    import attnplug

VERSIONS: Final = {"sgl-flash-mla": "1.0.0"}
IS_REAL_HERE: Final = find_spec("flash_mla") is not None
JOURNAL: Final = "flash_mla.journal"

collect_ignore = ["test_conformance.py"] if IS_REAL_HERE else []  # its parameters are collected from the fake

FAKES: Final = FakeLibraries(
    package="attnplug_flashmla",
    name="flashmla_fake",
    folder=Path(__file__).with_name("fakes"),
    packages=("flash_mla",),
    changes=(
        (r'name = "flashmla", aliases = \[[^]]*\]', 'name = "flashmla_fake"'),
        (r'^device_type = "cuda"', 'device_type = ["cuda", "cpu"]'),
        (r'compute_capability = "[^"]*" ', ""),
    ),
    skip_reason="FlashMLA is installed, and the fake has its import name" if IS_REAL_HERE else None,
    prepare=lambda versions: None,
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
    """Return a function that loads the backend on the fake: requirements, and keywords of `attnplug.load`."""

    def load(requirements: attnplug.Requirements, **keywords: Any) -> Any:
        return FAKES.load(requirements, "sgl", **keywords)

    return load
