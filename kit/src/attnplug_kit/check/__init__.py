"""``attnplug check``: what is wrong with a manifest, or with the project of a plugin, before anybody installs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnplug.commands import NO, OK, say_json

if TYPE_CHECKING:
    import argparse

SUMMARY: Final = "what is wrong with a manifest or a plugin project"

_EPILOG: Final = """\
A problem keeps the plugin, or a part of its manifest, from ever working. A note says what may be meant otherwise.

examples:
  attnplug check .
  attnplug check src/acme_attention/attnplug.toml --json

exit codes: 0 there is no problem, 1 there is one, 2 there is nothing to check at PATH
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "attnplug check PATH [options]"
    parser.description = (
        "Check a manifest, or a plugin project: the folder of its pyproject.toml. Every finding has its file and\n"
        "line. Nothing of the plugin is imported, and nothing is built."
    )
    parser.epilog = _EPILOG
    parser.add_argument("path", metavar="PATH", help="an attnplug.toml, or a folder with a pyproject.toml")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Check a path."""
    from attnplug_kit.check.examine import examine  # noqa: PLC0415 - help costs nothing this way

    report = examine(arguments.path)
    if arguments.json:
        say_json(report.to_dict())
    else:
        from attnplug_kit.check.show import show  # noqa: PLC0415 - JSON does without

        show(report)
    return NO if report.problems else OK
