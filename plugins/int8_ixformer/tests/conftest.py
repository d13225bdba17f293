"""
Where the kernels run in this process: on a GPU, or on a CPU by Triton's interpreter.

A test or class that uses the fixture `fakes` sees a double of ixformer, when it is collected and when it runs.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import attnplug
from attnplug.errors import DuplicateBackendError
from attnplug.selection import process as state
from plugins.int8_ixformer.tests import cpu_manifest
from plugins.int8_ixformer.tests.doubled import FAKES, IS_REAL_HERE, VERSIONS
from tests.backends.triton_on_cpu import INTERPRETED

# Their tests are made while the double is in place.
collect_ignore = ["test_conformance.py", "test_calibration_conformance.py"] if IS_REAL_HERE else []

pytest_generate_tests = FAKES.collection_hook(VERSIONS)
fakes = FAKES.fixture(VERSIONS, "ixformer.journal")


def pytest_unconfigure():
    """Remove what the stage has written."""
    FAKES.close()


def pytest_configure(config):
    """Offer the backend to a CPU where the kernels are interpreted: this process has no other tests."""
    if INTERPRETED:
        with TemporaryDirectory() as folder:
            few = any("conformance" in argument for argument in config.args)
            manifest = cpu_manifest.write(Path(folder), few=few)
            attnplug.register("attnplug_int8_ixformer.plugin", manifest=manifest)


@pytest.fixture
def offered(monkeypatch):
    """Offer the backend to one test, where it is not installed."""
    if not INTERPRETED:
        monkeypatch.setattr(state, "_state", None)
        try:
            attnplug.register("attnplug_int8_ixformer.plugin", manifest=cpu_manifest.MANIFEST)
        except DuplicateBackendError:  # it is installed
            assert "int8_ixformer" in {plugin.name for plugin in state.registry().plugins}
