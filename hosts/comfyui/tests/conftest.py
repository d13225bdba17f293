"""A process without a developer's settings, and a ComfyUI of each version that is tested."""

from __future__ import annotations

import pytest

from hosts.comfyui.tests.fake_comfyui import FakeComfyUI
from hosts.comfyui.tests.signatures import VERSIONS
from tests.own_process import own_process  # noqa: F401 - in effect for all tests here


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
