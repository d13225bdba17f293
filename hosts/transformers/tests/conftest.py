"""A process without a developer's settings, the registered host, and fake backends."""

from __future__ import annotations

import pytest

from hosts.transformers.tests.fakes.registry import replace_backends
from tests.own_process import own_process  # noqa: F401 - in effect for all tests here

MIRROR = "hosts.transformers.tests.fakes.mirror"


@pytest.fixture(autouse=True)
def _named_backend(own_process, monkeypatch):  # noqa: F811 - the fixture above
    """Name the backend: the ranking is tested elsewhere."""
    monkeypatch.setenv("ATTNPLUG_BACKEND", "torch/sdpa")


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


@pytest.fixture
def mirror():
    """Replace all backends by one that supports every dense attention."""
    from hosts.transformers.tests.fakes.mirror import MANIFEST  # noqa: PLC0415 - imports torch

    replace_backends(MANIFEST, MIRROR, "mirror")


@pytest.fixture
def plain_only():
    """Replace all backends by one that supports plain causal attention alone."""
    from hosts.transformers.tests.fakes.mirror import MANIFEST  # noqa: PLC0415 - imports torch

    lines = [line for line in MANIFEST.splitlines() if not line.startswith(("features", "attn_type"))]
    replace_backends("\n".join(lines), MIRROR, "mirror")
