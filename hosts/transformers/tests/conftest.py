"""A process without a developer's settings, the registered host, and fake backends."""

from __future__ import annotations

import os

import pytest

from attnplug.discovery.plugin import Plugin
from attnplug.discovery.registry import Registry
from attnplug.manifest.reader import parse_manifest
from attnplug.request.device import Device
from attnplug.request.settings import Settings
from attnplug.selection import process


@pytest.fixture(autouse=True)
def own_process(monkeypatch):
    """Leave the settings of this machine out, name the backend, and put the process back as it was."""
    for name in [name for name in os.environ if name.startswith("ATTNPLUG_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("ATTNPLUG_BACKEND", "torch/sdpa")  # the ranking is tested elsewhere
    before, process._state = process._state, None
    yield
    process.PROCESS.state = before


@pytest.fixture
def host():
    """Return the host, registered, without transformers' warnings about generation."""
    import torch  # noqa: PLC0415 - tests of configurations do without
    from transformers.utils import logging  # noqa: PLC0415 - likewise

    import attnplug_transformers as transformers  # noqa: PLC0415 - likewise

    verbosity, threads = logging.get_verbosity(), torch.get_num_threads()
    logging.set_verbosity(40)
    torch.set_num_threads(1)  # faster than several, for models as small as these
    transformers.register()
    yield transformers
    torch.set_num_threads(threads)
    logging.set_verbosity(verbosity)


def _alone(manifest):
    """Replace all backends by one."""
    parsed = parse_manifest(manifest, "mirror/attnplug.toml")
    registry = Registry([Plugin("mirror", "hosts.transformers.tests.fakes.mirror", "mirror", "1.0", parsed)])
    process._state = process.State(registry, Settings(), registry.generation, device=Device.cpu())


@pytest.fixture
def mirror():
    """Replace all backends by one that supports every dense attention."""
    from hosts.transformers.tests.fakes.mirror import MANIFEST  # noqa: PLC0415 - imports torch

    _alone(MANIFEST)


@pytest.fixture
def plain_only():
    """Replace all backends by one that supports plain causal attention alone."""
    from hosts.transformers.tests.fakes.mirror import MANIFEST  # noqa: PLC0415 - imports torch

    _alone("\n".join(line for line in MANIFEST.splitlines() if not line.startswith(("features", "attn_type"))))
