"""Where the kernels run in this process: on a GPU, or on a CPU by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

import attnplug
from attnplug.errors import DuplicateBackendError
from attnplug.selection import process as state
from plugins.blocksparse.tests import cpu_manifest
from tests.backends.triton_on_cpu import INTERPRETED


def pytest_configure():
    """Offer the backend to a CPU where the kernels are interpreted: this process has no other tests."""
    if INTERPRETED:
        with TemporaryDirectory() as folder:
            attnplug.register("attnplug_blocksparse.plugin", manifest=cpu_manifest.write(Path(folder)))


@pytest.fixture
def offered(monkeypatch):
    """Offer the backend to one test, where it is not installed."""
    if not INTERPRETED:
        monkeypatch.setattr(state, "_state", None)
        try:
            attnplug.register("attnplug_blocksparse.plugin", manifest=cpu_manifest.MANIFEST)
        except DuplicateBackendError:  # it is installed
            assert "blocksparse" in {plugin.name for plugin in state.registry().plugins}
