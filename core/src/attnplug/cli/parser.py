"""The command line as argparse reads it. Only the verb that is asked for is imported: each costs what it needs."""

from __future__ import annotations

import argparse
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Final, NoReturn

from attnplug.cli.exits import OK, WRONG
from attnplug.cli.output import say
from attnplug.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

VERBS: Final = {
    "list": "what is installed, and what stands in the way of the rest",
    "explain": "which backend serves a layer or a model, and why not the others",
    "doctor": "what is wrong with this environment",
    "check": "what is wrong with a manifest or a plugin project",
    "new": "a plugin project to start from, green on the CPU",
    "bench": "the time budgets, measured here",
    "demo": "real model architectures, served through the chosen backend",
}
"""Every verb with its summary; the verb is the name of its module."""

_DESCRIPTION: Final = "Attention backends as parts: ask which one serves, and why not the others."
_EPILOG: Final = """\
examples:
  attnplug list
  attnplug explain --head-size 64 --num-q-heads 64 --num-kv-heads 8 --dtype bfloat16 --sinks
  attnplug explain --config path/to/config.json --device cuda:9.0 --assume-installed
  attnplug doctor --load

exit codes:
  0  the answer is yes
  1  the answer is no: nothing can serve, something is broken, a budget is missed
  2  the question is wrong: an unknown option, impossible requirements, a setting that does not parse

Every verb takes --json, and `attnplug VERB --help` describes it. ATTNPLUG_STRICT=1 shows where an error comes from.
"""


class Parser(argparse.ArgumentParser):
    """An argument parser that answers mistakes with an error of this project."""

    def __init__(self, prog: str, description: str, epilog: str = "", usage: str = "") -> None:
        super().__init__(
            prog,
            usage=usage or None,
            description=description,
            epilog=epilog or None,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise RequestError(
            f"{self.prog}: {message}", f"its options are those of `{self.prog} --help`", "correct the command line"
        )


def parse(words: Sequence[str]) -> tuple[ModuleType, argparse.Namespace]:
    """
    Read a command line.

    Returns:
        The module of the verb, and the verb's arguments.

    Raises:
        RequestError: The verb or an option is unknown, or a value is not allowed.
        SystemExit: Help or the version was asked for, and is printed.
    """
    if not words or words[0] not in VERBS:
        _without_verb(words)
    verb = words[0]
    module = import_module(f"attnplug.cli.{verb}")
    parser = Parser(f"attnplug {verb}", f"{VERBS[verb]}.", usage=f"attnplug {verb} [options]")
    module.add_arguments(parser)
    arguments, unknown = parser.parse_known_args(words[1:])
    if unknown:
        _refuse_unknown(parser, unknown[0])
    return module, arguments


def _without_verb(words: Sequence[str]) -> NoReturn:
    """Answer a line that starts with no verb: help, the version, or an error."""
    if words and not words[0].startswith("-"):
        from attnplug.request.fields import near  # noqa: PLC0415 - `list --json` has a budget, and does not come by here

        raise RequestError(
            f"the verb {words[0]!r} was given{near(words[0], tuple(VERBS))}",
            f"the verbs are {', '.join(VERBS)}",
            "see `attnplug --help`",
        )
    listed = "\n".join(f"  {verb:9}{summary}" for verb, summary in VERBS.items())
    parser = Parser("attnplug", f"{_DESCRIPTION}\n\nverbs:\n{listed}", _EPILOG, "attnplug VERB [options]")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        _refuse_unknown(parser, unknown[0])
    if arguments.version:
        say(f"attnplug {version()}")
        raise SystemExit(OK)
    parser.print_help(sys.stderr)
    raise SystemExit(WRONG)


def version() -> str:
    """Return the version of the core."""
    from importlib import metadata  # noqa: PLC0415 - costs 20 ms, and few ask

    return metadata.version("attnplug")


def _refuse_unknown(parser: Parser, word: str) -> NoReturn:
    from attnplug.request.fields import near  # noqa: PLC0415 - as above

    name = word.partition("=")[0]
    known = sorted(parser._option_string_actions)  # noqa: SLF001 - argparse has no public list of its options
    parser.error(f"{word!r} is not an option{near(name, known) if name.startswith('-') else ''}")
