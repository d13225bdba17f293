"""The process that tests of hosts see."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(autouse=True)
def own_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Leave the settings of this machine out, and restore attnplug's process afterwards."""
    from attnplug.selection import process  # noqa: PLC0415 - a conftest.py imports this, also where nothing is collected

    for name in [name for name in os.environ if name.startswith(("ATTNPLUG_", "TORCH_ATTNPLUG_"))]:
        monkeypatch.delenv(name)
    before, process.PROCESS.state = process.PROCESS.state, None
    yield
    process.PROCESS.state = before
