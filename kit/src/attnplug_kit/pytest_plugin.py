"""
The options of the conformance kit for pytest.

pytest finds this module by its entry point, and imports it in every run wherever the kit is installed. So it imports
nothing of attnplug until the kit runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from attnplug_kit.conformance.tier import LeftOut

_KIT: Final = Path(__file__).parent


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the kit."""
    group = parser.getgroup("attnplug", "attnplug's conformance kit (pytest --pyargs attnplug_kit)")
    group.addoption("--attn-backend", metavar="NAME[/VARIANT]", help="the installed backend, or A+B, to test")
    group.addoption("--attn-device", metavar="DEVICE", help="the device to test it on, as cpu; default: this process's")
    group.addoption(
        "--attn-feature",
        metavar="VENDOR.NAME",
        action="append",
        help="an open feature of every request; may be given several times",
    )
    group.addoption(
        "--attn-report", metavar="DIR", type=Path, help="write report.json, evidence-*.json and junit.xml there"
    )


@pytest.hookimpl(tryfirst=True)  # before the plugin that reads xmlpath
def pytest_configure(config: pytest.Config) -> None:
    """Check that the named backend can be tested, and register what collects the results."""
    config.addinivalue_line("markers", "slow: takes tens of seconds (`-m 'not slow'` leaves it out)")
    name, folder = config.getoption("--attn-backend"), config.getoption("--attn-report")
    is_the_kit = any(_names_the_kit(argument, config) for argument in config.args)
    if name is None and folder is None and not is_the_kit:
        return
    from attnplug_kit.conformance.reporter import Reporter  # noqa: PLC0415 - imports torch

    left_out = _check(config, is_the_kit=is_the_kit) if name is not None or is_the_kit else ()
    if folder is not None and not config.option.xmlpath:
        config.option.xmlpath = str(folder / "junit.xml")
    # The command of the report is without the folder of the report, which is a path of one machine.
    words = [str(item) for item in config.invocation_params.args if not str(item).startswith("--attn-report")]
    reporter = Reporter(folder, " ".join(["pytest", *words]), complete=name is not None, left_out=left_out)
    config.pluginmanager.register(reporter)


def _names_the_kit(argument: str, config: pytest.Config) -> bool:
    """Whether an argument of pytest is the kit itself: its package, or a file of it."""
    place = argument.partition("::")[0]
    is_the_package = config.getoption("pyargs") and f"{place}.".startswith("attnplug_kit.")
    return is_the_package or Path(place).resolve().is_relative_to(_KIT)


def _check(config: pytest.Config, *, is_the_kit: bool) -> Sequence[LeftOut]:
    """Return the variants that the kit leaves out. A plugin's own classes may request other features."""
    from attnplug import AttnplugError  # noqa: PLC0415 - as above
    from attnplug_kit.conformance.subject import find_subjects  # noqa: PLC0415 - as above
    from attnplug_kit.conformance.tier import plan_run  # noqa: PLC0415 - as above

    names = ("--attn-backend", "--attn-device", "--attn-feature")
    name, device, features = (config.getoption(option) for option in names)
    try:
        if is_the_kit:
            return plan_run(name, device, features or ()).left_out
        find_subjects(name, device, features or ())
    except AttnplugError as error:
        raise pytest.UsageError(str(error)) from error
    return ()
