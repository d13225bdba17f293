"""These tests run beside SGLang only; `make test-hosts` makes an environment that has it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

# What imports SGLang, or asks for its version, at its top is not collected without it; Python 3.10 has nothing of this.
_NEED_SGLANG = [
    "test_steps*",
    "test_graphs*",
    "test_refusals*",
    "test_pages*",
    "test_pools*",
    "test_members*",
    "test_fallbacks*",
    "test_fp8*",
    "test_schedules*",
    "test_kit*",
    "test_latent*",
    "test_pairs*",
]
collect_ignore_glob = [] if find_spec("sglang") and find_spec("attnplug_sglang") else [*_NEED_SGLANG, "engine/*"]


def pytest_configure(config: pytest.Config) -> None:
    """Let SGLang and what it imports warn: only what attnplug itself raises is an error."""
    if find_spec("sglang") is not None:
        config.addinivalue_line("filterwarnings", "default")
        config.addinivalue_line("filterwarnings", r"error:::attnplug.*")
