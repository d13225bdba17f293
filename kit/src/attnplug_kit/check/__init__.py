"""The command ``attnplug check``: what is wrong with a manifest or a plugin project, before it is installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnplug.commands import NO, OK, say_json

if TYPE_CHECKING:
    import argparse

SUMMARY: Final = "mistakes in a manifest or a plugin project"

_EPILOG: Final = """\
A problem keeps the plugin, or a part of its manifest, from ever working. A note may be a mistake, or intended.

examples:
  attnplug check
  attnplug check src/acme_attention/attnplug.toml --json

exit codes: 0 there is no problem, 1 there is one, 2 there is nothing to check at PATH
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "attnplug check [PATH] [options]"
    parser.description = (
        "Check a manifest, or a plugin project: the folder of its pyproject.toml. Every finding has a file and a\n"
        "line. Nothing is imported, and nothing is built."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "path",
        nargs="?",
        default=".",
        metavar="PATH",
        help="an attnplug.toml, or a folder with a pyproject.toml; default: this folder",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Check a path."""
    from attnplug_kit.check.examine import examine  # noqa: PLC0415 - help does without

    report = examine(arguments.path, shown=not arguments.json)
    if arguments.json:
        say_json(report.to_dict())
    else:
        from attnplug_kit.check.report import show  # noqa: PLC0415 - likewise

        show(report)
    return NO if report.problems else OK
