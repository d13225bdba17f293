"""The plugins of ``tests/plugins``, each built once for all tests, and programs with some of them installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.plugins.preamble import PREAMBLE, RunCode
from tests.plugins.workshop import Workshop, run

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    """Return the workshop of this run."""
    return Workshop(tmp_path_factory.mktemp("wheels"))


@pytest.fixture
def run_code(workshop: Workshop, tmp_path: Path) -> RunCode:
    """Return a function that installs plugins, and runs code with them."""

    def runner(code: str, *plugins: str, sites: tuple[Path, ...] = (), forked: bool = False, **environment: str) -> Any:
        installed = (workshop.install(tmp_path / "site", *plugins),) if plugins else ()
        return run(PREAMBLE + code, *sites, *installed, home=tmp_path, forked=forked, **environment)

    return runner
