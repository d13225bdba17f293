"""A process without a developer's settings, and a ComfyUI of each version that is tested."""

from __future__ import annotations

import os

import pytest

from attnplug.selection import process
from hosts.comfyui.tests.fake_comfyui import FakeComfyUI
from hosts.comfyui.tests.signatures import VERSIONS


@pytest.fixture(autouse=True)
def own_process(monkeypatch):
    """Leave the settings of this machine out, and restore attnplug's process afterwards."""
    for name in [name for name in os.environ if name.startswith("ATTNPLUG_")]:
        monkeypatch.delenv(name)
    before, process.PROCESS.state = process.PROCESS.state, None
    yield
    process.PROCESS.state = before


@pytest.fixture(params=["0.3.59", "0.38.1"])
def comfyui(request, monkeypatch):
    """Return a ComfyUI that checks calls against the signatures of a version: the oldest, and the newest."""
    return _installed(request.param, monkeypatch)


@pytest.fixture(params=VERSIONS)
def every_comfyui(request, monkeypatch):
    """Return the same of each version that was read."""
    return _installed(request.param, monkeypatch)


def _installed(version, monkeypatch):
    fake = FakeComfyUI(version)
    fake.install(monkeypatch)
    return fake
