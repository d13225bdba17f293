"""The command line as argparse reads it. Only the command that runs is imported."""

from __future__ import annotations

import argparse
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NoReturn

from attnplug._columns import WIDEST, width
from attnplug._escape import escaped, escaped_lines
from attnplug._install import install_text
from attnplug._version import __version__
from attnplug.cli import BUILT_IN, HELP
from attnplug.commands import OK, say, say_json
from attnplug.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from attnplug.cli.command import Command

_DESCRIPTION: Final = (
    "A plugin system for attention kernels: it picks a backend for your model and device, and says why not the others."
)
_EPILOG: Final = """\
examples:
  attnplug list
  attnplug explain --head-size 64 --num-q-heads 64 --num-kv-heads 8 --dtype bfloat16 --sinks
  attnplug explain --config path/to/config.json --device h100 --assume-installed
  attnplug doctor --load

exit codes:
  0  everything requested can be served
  1  something cannot be served, something is broken, a budget is missed
  2  the request is wrong: an unknown option, impossible requirements, a setting that does not parse

Every command takes --json, and `attnplug help COMMAND` describes it. ATTNPLUG_STRICT=1 shows where an error comes
from.
"""


class _Formatter(argparse.HelpFormatter):
    """Fits the terminal: sentences are filled, and lists, tables and commands keep their lines."""

    def __init__(self, prog: str) -> None:
        columns = min(width(), WIDEST)
        super().__init__(prog, max_help_position=min(30, columns // 3), width=columns)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs: list[str] = []
        for line in text.splitlines():
            follows = paragraphs and paragraphs[-1] and not paragraphs[-1].startswith(" ")
            if follows and line and not line.startswith(" ") and not paragraphs[-1].endswith(":"):
                paragraphs[-1] += f" {line}"
            elif paragraphs and _CONTINUED.match(line) and _COLUMNS.match(paragraphs[-1]):
                paragraphs[-1] += f" {line.strip()}"  # the second column of a table goes on
            else:
                paragraphs.append(line)
        return "\n".join(indent + line for text in paragraphs for line in _filled(text, width - len(indent)))


_COLUMNS: Final = re.compile(r"  \S+(?: \S+)*  +(?=\S)")  # an indented word or two, then what they mean
_CONTINUED: Final = re.compile(r" {6,}\S")


def _filled(text: str, columns: int) -> list[str]:
    """Return a paragraph as lines: under its second column, if it has two; as a shell continues it, if a command."""
    from textwrap import wrap  # noqa: PLC0415 - only help needs it

    table = _COLUMNS.match(text)
    indent = len(text) - len(text.lstrip())
    if text.lstrip().startswith("attnplug ") and not table:
        lines = wrap(text, columns - 2, subsequent_indent=" " * (indent + 4), **_WHOLE)
        return [f"{line} \\" for line in lines[:-1]] + lines[-1:]
    return wrap(text, columns, subsequent_indent=" " * (table.end() if table else indent), **_WHOLE) or [""]


_WHOLE: Final[dict[str, Any]] = {"break_long_words": False, "break_on_hyphens": False, "replace_whitespace": False}


_POSITIONAL: Final = {"explain": "[CONFIG] ", "list": "[NAME] "}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises an error of this project instead of exiting."""

    def __init__(self, prog: str, description: str, epilog: str = "", usage: str = "") -> None:
        super().__init__(
            prog,
            usage=usage or None,
            description=description,
            epilog=epilog or None,
            formatter_class=_Formatter,
            allow_abbrev=False,
        )

    def format_help(self) -> str:
        """Return the help, with what other distributions wrote in it escaped."""
        return escaped_lines(super().format_help())

    def error(self, message: str) -> NoReturn:
        """Raise what argparse would print."""
        raise RequestError(message, f"the usage is: {self.usage or self.prog}", f"{self.prog} --help")


def parse(words: Sequence[str]) -> Callable[[], int]:
    """
    Read a command line.

    Returns:
        What runs the command with its arguments, and returns the exit code.

    Raises:
        RequestError: The command or an option is unknown, or a value is not allowed.
        PluginLoadError: The command belongs to another distribution, and is broken.
        SystemExit: Help or the version was requested, and is printed.
    """
    if words and words[0] == HELP:
        words = [*_of_help(words[1:]), "--help"]
    if not words or words == ["--json"]:
        from attnplug.cli import overview  # noqa: PLC0415 - imported as a command is

        return lambda: overview.show(as_json=bool(words))
    if words[0].startswith("-"):
        _without_command(words)
    name = words[0]
    if name in BUILT_IN:
        module = import_module(f"attnplug.cli.{name}")
        parser = _parser_of(name, BUILT_IN[name])
        module.add_arguments(parser)
        arguments = _parsed(parser, words)
        return lambda: int(module.run(arguments))
    command = _installed(name)
    module = command.load()
    parser = _parser_of(name, module.SUMMARY)
    command.calling("cannot declare its options: add_arguments raised", lambda: module.add_arguments(parser))
    arguments = _parsed(parser, words)
    return lambda: command.run(module, arguments)


def _of_help(words: Sequence[str]) -> Sequence[str]:
    """Return the command that ``attnplug help`` is about; none for the program itself."""
    if len(words) > 1:
        raise RequestError(
            f"{words[1]!r} follows `attnplug help {words[0]}`", "help is about one command", "see `attnplug --help`"
        )
    return () if words and words[0] in {HELP, "-h", "--help"} else words


def _parser_of(name: str, summary: str) -> Parser:
    text = escaped(f"{summary}.")
    # Argparse formats a description that has this directive, and then every other percent sign in it.
    text = text.replace("%", "%%") if "%(prog)" in text else text
    usage = f"attnplug {name} {_POSITIONAL.get(name, '')}[options]"
    return Parser(f"attnplug {name}", text, usage=usage)


def _parsed(parser: Parser, words: Sequence[str]) -> argparse.Namespace:
    arguments, unknown = parser.parse_known_args(words[1:])
    if unknown:
        _refuse_unknown(parser, unknown[0])
    return arguments


def _installed(name: str) -> Command:
    from attnplug.cli import command  # noqa: PLC0415 - the built-in commands do without, and `list --json` has a budget

    installed = command.installed_commands()
    if name in installed:
        return installed[name]
    for distribution, names in command.KNOWN.items():
        if name in names:
            raise RequestError(
                f"the command {name!r} is not installed",
                f"it is a command of {distribution}",
                install_text(distribution),
            )
    from attnplug.errors import near  # noqa: PLC0415 - likewise

    commands = (*BUILT_IN, HELP, *installed)
    known = (name for names in command.KNOWN.values() for name in names)
    raise RequestError(
        f"the command {name!r} was given{near(name, (*commands, *known))}",
        f"the commands are {', '.join(commands)}",
        "see `attnplug --help`",
    )


def _without_command(words: Sequence[str]) -> NoReturn:
    """Handle options without a command: help, the version, or an error."""
    is_help = words[0] in {"-h", "--help"}
    description = f"{_DESCRIPTION}\n\n{_commands()}" if is_help else _DESCRIPTION
    parser = Parser("attnplug", description, _EPILOG, "attnplug COMMAND [options]")
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        _refuse_unknown(parser, unknown[0])
    if arguments.version:
        if arguments.json:
            say_json({"version": __version__})
        else:
            say(f"attnplug {__version__}")
        raise SystemExit(OK)
    parser.error(f"{words[0]!r} was given without a command")


def _commands() -> str:
    """Return every command with its summary, then those of this project that are not installed."""
    from attnplug.cli import command  # noqa: PLC0415 - as above

    installed = command.installed_commands()
    summaries = {
        **BUILT_IN,
        HELP: "the options of a command",
        **{name: each.summary() for name, each in installed.items()},
    }
    longest = max(map(len, summaries)) + 2
    lines = ["commands:", *(escaped(f"  {name:{longest}}{summary}") for name, summary in summaries.items())]
    lines += _section("not installed:", command.missing_commands(installed))
    return "\n".join([*lines, *_section("ignored:", command.ignored_commands())])


def _section(title: str, lines: Iterable[str]) -> list[str]:
    found = [escaped(f"  {line}") for line in lines]
    return ["", title, *found] if found else []


def _refuse_unknown(parser: Parser, word: str) -> NoReturn:
    from attnplug.errors import near  # noqa: PLC0415 - `list --json` has a budget, and does without

    name = word.partition("=")[0]
    known = sorted(parser._option_string_actions)  # noqa: SLF001 - argparse has no public list of its options
    parser.error(f"{word!r} is not an option{near(name, known) if name.startswith('-') else ''}")
