"""A process without a developer's settings, diffusers or a skip, and the runs of the built-in backend."""

from __future__ import annotations

import pytest

from tests.own_process import own_process  # noqa: F401 - in effect for all tests here


def pytest_collection_modifyitems(items) -> None:
    """Keep the deprecations of diffusers from failing tests: its own code raises them."""
    for item in items:
        if "hosts/diffusers/tests" in item.path.as_posix():
            for kind in ("DeprecationWarning", "FutureWarning", "UserWarning:diffusers"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}"))


@pytest.fixture
def diffusers():
    """Return the package, which takes seconds to import."""
    return pytest.importorskip("diffusers", reason="diffusers is not installed; it requires Python 3.11")


@pytest.fixture
def dispatch(diffusers):
    """Return the module that dispatches attention; its active backend is restored."""
    from diffusers.models import attention_dispatch  # noqa: PLC0415 - see above

    registry = attention_dispatch._AttentionBackendRegistry
    before = registry._active_backend
    yield attention_dispatch
    registry.set_active_backend(before)


@pytest.fixture
def bind(dispatch):
    """Return `attnplug_diffusers.bind`."""
    import attnplug_diffusers  # noqa: PLC0415 - see above

    return attnplug_diffusers.bind


@pytest.fixture
def runs(monkeypatch):
    """Return the runs of the built-in backend, each with its implementation."""
    from attnplug.torch_backend.impl import TorchImpl  # noqa: PLC0415 - imports torch

    made, run = [], TorchImpl.run
    monkeypatch.setattr(TorchImpl, "run", lambda self, *given: (made.append(self), run(self, *given))[1])
    return made
