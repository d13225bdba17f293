"""
Fakes of all FlashAttention libraries, and the plugin registered with a manifest that admits the CPU.

Only a test or class that uses the fixture `fakes` sees both, when it is collected and when it runs.
Where one of the libraries is installed, its fake would be mistaken for it, and these tests are skipped.
"""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from tests.backends.fakes import FakeLibraries

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.backends.fakes import FakeEnvironment

NAME: Final = "flash_attn_fake"
VERSIONS: Final = {
    "flash-attn": "2.8.3",
    "vllm": "0.24.0",
    "flash-attn-3": "3.0.0",
    "tokenspeed-fa3": "3.0.0.post20260810",
    "flash-attn-4": "4.0.0b36",
}
IS_REAL_HERE: Final = any(find_spec(name) is not None for name in ("flash_attn", "flash_attn_interface", "vllm"))
JOURNAL: Final = "flash_attn_fake.journal"

collect_ignore = ["test_conformance.py"] if IS_REAL_HERE else []  # its tests are made while the fakes are in place

_ops: list[Any] = []  # of the op libraries in wheels: there as long as these are


def _register_ops(versions: Mapping[str, str]) -> Callable[[], None]:
    """Register the ops of wheels once, and torch's kernel for the CPU until it is undone: others test its absence."""
    del versions
    if not _ops:
        _ops.extend(importlib.import_module("flash_attn_fake.vllm_ops").register())
    undo: Callable[[], None] = importlib.import_module("flash_attn_fake.torch_op").register()._destroy
    return undo


FAKES: Final = FakeLibraries(
    package="attnplug_flash_attn",
    name=NAME,
    folder=Path(__file__).with_name("fakes"),
    packages=("flash_attn", "flash_attn_interface", "flash_attn_fake"),
    changes=(
        (r'name = "flash_attn", aliases = \[[^]]*\]', f'name = "{NAME}"'),
        (r'^device_type = "cuda"', 'device_type = ["cuda", "cpu"]'),
        (r"^compute_capability = .*$", ""),
        (r', compute_capability = "9\.0"', ""),  # the fakes are of libraries on Hopper
    ),
    skip_reason="a FlashAttention is installed here, and its fake would be mistaken for it" if IS_REAL_HERE else None,
    prepare=_register_ops,
)

pytest_generate_tests = FAKES.collection_hook(VERSIONS)
fakes = FAKES.fixture(VERSIONS, JOURNAL)


def stage() -> FakeEnvironment:
    """Return the stage, the same in all of a run."""
    return FAKES.environment(VERSIONS)


def pytest_unconfigure() -> None:
    """Remove what the stage has written."""
    FAKES.close()


@pytest.fixture
def journal(fakes: None) -> Any:
    """Return the calls of the fakes, by this test only."""
    return importlib.import_module(JOURNAL).journal


@pytest.fixture
def load_fake(fakes: None) -> Callable[..., Any]:
    """Return what loads a backend on a fake, by requirements, variant and the keywords of `attnplug.load`."""
    return FAKES.load
