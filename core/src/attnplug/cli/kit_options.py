"""
The options of the conformance kit, for pytest. Found by pytest's own entry point, and loaded in every run of it
wherever attnplug is installed: so it imports nothing until the kit is asked for.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the kit."""
    group = parser.getgroup("attnplug", "attnplug's conformance kit (pytest --pyargs attnplug.testing)")
    group.addoption("--attn-backend", metavar="NAME[/VARIANT]", help="the installed backend to test")
    group.addoption(
        "--attn-device", metavar="DEVICE", help="what to test it on, as cpu; this process's device by default"
    )
    group.addoption(
        "--attn-feature",
        metavar="VENDOR.NAME",
        action="append",
        help="an open feature that every request asks for; may be given several times",
    )
    group.addoption(
        "--attn-report", metavar="DIR", type=Path, help="write report.json, evidence-*.json and junit.xml there"
    )


@pytest.hookimpl(tryfirst=True)  # before the plugin that reads xmlpath
def pytest_configure(config: pytest.Config) -> None:
    """Look for the backend that is named, and gather what is found out about it."""
    name, folder = config.getoption("--attn-backend"), config.getoption("--attn-report")
    if name is None and folder is None:
        return
    from attnplug.testing.kit.plugin import Reporter  # noqa: PLC0415 - loads torch, only where it is asked for

    if name is not None:
        _check_name(name, config.getoption("--attn-device"), config.getoption("--attn-feature") or ())
    if folder is not None and not config.option.xmlpath:
        config.option.xmlpath = str(folder / "junit.xml")
    # Without the place of the files, which is one machine's own.
    command = [item for item in config.invocation_params.args if not str(item).startswith("--attn-report")]
    reporter = Reporter(folder, " ".join(["pytest", *map(str, command)]), complete=name is not None)
    config.pluginmanager.register(reporter)


def _check_name(name: str, device: str | None, features: Sequence[str]) -> None:
    from attnplug.errors import AttnplugError  # noqa: PLC0415 - as above
    from attnplug.testing.kit.subject import find_subjects  # noqa: PLC0415 - as above

    try:
        find_subjects(name, device, features)
    except AttnplugError as error:
        raise pytest.UsageError(str(error)) from error
