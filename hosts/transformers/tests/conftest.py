"""A process without a developer's settings, the host's names registered, and a backend that serves everything."""

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
    monkeypatch.setenv("ATTNPLUG_BACKEND", "torch/sdpa")  # which one ranks first is not the host's business
    before, process.PROCESS.state = process.PROCESS.state, None
    yield
    process.PROCESS.state = before


@pytest.fixture
def host():
    """Return the host, registered, with transformers' remarks on generation kept quiet."""
    import torch  # noqa: PLC0415 - tests of configurations do without
    from transformers.utils import logging  # noqa: PLC0415 - likewise

    import attnplug_transformers as transformers  # noqa: PLC0415 - likewise

    verbosity, threads = logging.get_verbosity(), torch.get_num_threads()
    logging.set_verbosity(40)
    torch.set_num_threads(1)  # the models are tiny, and threads that wait for each other are not
    transformers.register()
    yield transformers
    torch.set_num_threads(threads)
    logging.set_verbosity(verbosity)


def _alone(manifest):
    """Put one backend in place of all others."""
    parsed = parse_manifest(manifest, "mirror/attnplug.toml")
    registry = Registry([Plugin("mirror", "hosts.transformers.tests.fakes.mirror", "mirror", "1.0", parsed)])
    process._state = process.State(registry, Settings(), registry.generation, device=Device.cpu())


@pytest.fixture
def mirror():
    """Put a backend in place of all others that serves every dense attention."""
    from hosts.transformers.tests.fakes.mirror import MANIFEST  # noqa: PLC0415 - imports torch

    _alone(MANIFEST)


@pytest.fixture
def plain_only():
    """Put a backend in place of all others that serves plain causal attention alone."""
    from hosts.transformers.tests.fakes.mirror import MANIFEST  # noqa: PLC0415 - imports torch

    _alone("\n".join(line for line in MANIFEST.splitlines() if not line.startswith(("features", "attn_type"))))
