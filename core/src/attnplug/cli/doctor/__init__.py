"""``attnplug doctor``: what is wrong with this environment, and the fix of each problem."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnplug.commands import NO, OK, say_json

if TYPE_CHECKING:
    import argparse

_EPILOG: Final = """\
What is odd and does no harm is a note; a setting that has no effect is a warning; what is broken is a problem.

exit codes: 0 nothing is broken, 1 something is
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        "Report interpreter, device, settings with their sources, and every plugin; say what is broken, and the way\n"
        "out. Nothing of a plugin is imported, unless --load asks for it."
    )
    parser.epilog = _EPILOG
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--load",
        action="store_true",
        help="also import the plugins of all ready candidates, and load each for something simple",
    )


def run(arguments: argparse.Namespace) -> int:
    """Examine this environment."""
    from attnplug.cli.doctor.report import examine  # noqa: PLC0415 - help costs nothing this way

    report = examine(load=arguments.load)
    if arguments.json:
        say_json(report.to_dict())
    else:
        from attnplug.cli.doctor.show import show  # noqa: PLC0415 - JSON does without

        show(report)
    return NO if report.problems else OK
