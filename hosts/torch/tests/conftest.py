"""A process without a developer's settings, and attnplug active in torch's registry."""

from __future__ import annotations

import pytest

from tests.own_process import own_process  # noqa: F401 - in effect for all tests here


@pytest.fixture
def registry():
    """Return torch's module of the registry, with attnplug registered; what is active is restored."""
    from torch.nn import attention  # noqa: PLC0415 - takes a second

    import attnplug_torch  # noqa: PLC0415 - likewise

    if not attnplug_torch.register():
        pytest.skip("this torch has no registry of flash attention: it came with 2.11")
    attnplug_torch.reset()
    yield attention
    if attention.current_flash_attention_impl() is not None:
        attention.restore_flash_attention_impl()
    attnplug_torch.unregister()
    attnplug_torch.reset()


@pytest.fixture
def active(registry):
    """Activate attnplug; return torch's module of the registry."""
    registry.activate_flash_attention_impl("attnplug")
    return registry
