"""The command ``attnplug report``: one HTML page about the installed backends, which needs no other file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from attrs import frozen

from attnplug.commands import OK, environment, say, say_json
from attnplug.errors import RequestError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from attnplug import Device
    from attnplug.negotiation import Candidate
    from attnplug_kit.report.decisions import Decision
    from attnplug_kit.report.matrix import Matrix
    from attnplug_kit.report.times import Timed

SUMMARY: Final = "one HTML page: backends, what each supports and what shows it, decisions, times"

_COMMON: Final = ("a100", "h100", "b200")
"""The devices beside this machine's where none is named."""

_EPILOG: Final = """\
The page needs no other file and no network. It holds versions and the device's name, and neither a path nor the time:
the same installation gives the same bytes. Nothing of a plugin is imported.

examples:
  attnplug report
  attnplug report --output here.html --device h200 --device rtx5090
  attnplug report --config path/to/config.json

exit codes: 0 the page is written, 2 a device, a model or the file is wrong
"""


@frozen
class Report:
    """
    What the page shows.

    Attributes:
        facts: The device and the versions of this environment, by name.
        device: This machine's device.
        own: The name of that device in the page.
        candidates: Every candidate that is installed or known.
        matrix: What each supports on each device, and what shows it.
        decisions: The backends of known models.
        times: Measured times.
    """

    facts: Mapping[str, str]
    device: Device
    own: str
    candidates: tuple[Candidate, ...]
    matrix: Matrix
    decisions: tuple[Decision, ...]
    times: tuple[Timed, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        "Write one HTML page: the installed backends, what each supports on which device and what shows it, the\n"
        "backends of known models, measured times, and what is not verified."
    )
    parser.epilog = _EPILOG
    parser.add_argument("--output", metavar="FILE", default="attnplug-report.html", help="default: %(default)s")
    parser.add_argument(
        "--device", action="append", metavar="DEVICE", help="beside this machine's: h100, cuda:9.0, ...; repeatable"
    )
    parser.add_argument(
        "--config", action="append", metavar="CONFIG", help="also a model: its config.json or folder; repeatable"
    )
    parser.add_argument("--json", action="store_true", help="print the data of the page as JSON, and write no file")


def run(arguments: argparse.Namespace) -> int:
    """Write the page."""
    from attnplug_kit.report.page import report_page  # noqa: PLC0415 - imports torch

    report = make_report(arguments.device or _COMMON, arguments.config or ())
    if arguments.json:
        say_json(_described(report))
        return OK
    file = Path(arguments.output)
    try:
        file.write_text(report_page(report), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"--output {str(file)!r} cannot be written: {error.strerror}", "", "name another") from error
    say(f"written: {file}")
    return OK


def make_report(devices: Sequence[str] = _COMMON, configs: Sequence[str] = ()) -> Report:
    """
    Collect what the page shows, from the manifests and the evidence of this environment.

    Args:
        devices: Texts of devices beside this machine's.
        configs: Model configurations beside the published models.

    Raises:
        DeviceError: A device is unknown.
        RequestError: A configuration cannot be read.
    """
    from attnplug import current_device, registry  # noqa: PLC0415 - `attnplug --help` imports this module
    from attnplug.models import describe_model  # noqa: PLC0415 - likewise
    from attnplug.request import Settings  # noqa: PLC0415 - likewise
    from attnplug_kit.report.decisions import decide, published_models  # noqa: PLC0415 - imports torch
    from attnplug_kit.report.matrix import make_matrix  # noqa: PLC0415 - likewise
    from attnplug_kit.report.runs import runs_of  # noqa: PLC0415 - likewise
    from attnplug_kit.report.times import times_of_profile  # noqa: PLC0415 - likewise

    settings, device = Settings.read(), current_device()
    candidates = registry().candidates(settings)
    offered = tuple(each for each in candidates if each.variant is not None)
    named = {"this machine": device, **_named(devices, registry().device_types())}
    models = published_models()
    models |= {_name(each): describe_model(each, paged=True).requirements for each in configs}
    return Report(
        _facts(device),
        device,
        "this machine",
        candidates,
        make_matrix(offered, named, runs_of(offered, settings.evidence)),
        decide(models, named, installed=device),
        times_of_profile(settings.profile),
    )


def _named(texts: Sequence[str], types: Sequence[str]) -> dict[str, Device]:
    """Return devices by the name that a reader sees: the compute capability, with the product where one is named."""
    from attnplug import Device  # noqa: PLC0415 - `attnplug --help` imports this module

    found = {text: Device.parse(text, types=types) for text in texts}
    return {_shown(text, device): device for text, device in found.items()}


def _shown(text: str, device: Device) -> str:
    plain = f"{device.compute_capability}" if device.compute_capability else text
    return plain if plain in text else f"{plain} ({text})"


def _name(config: str) -> str:
    """Return a model's name: that of its folder or id, without the folders around it."""
    path = Path(config)
    return path.resolve().parent.name if path.name == "config.json" else path.name


def _facts(device: Device) -> dict[str, str]:
    found = environment()
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    return {"device": str(device), "Python": found["python"], "platform": found["platform"], "versions": versions}


def _described(report: Report) -> dict[str, object]:
    """Return the data of the page as plain JSON values."""
    from attrs import asdict  # noqa: PLC0415 - only where JSON is requested

    return {
        "facts": dict(report.facts),
        "matrix": report.matrix.to_dict(),
        "decisions": [asdict(each) for each in report.decisions],
        "times": [asdict(each) for each in report.times],
    }
