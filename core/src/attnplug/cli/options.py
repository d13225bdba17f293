"""``attnplug options``: what can be set for each installed backend, with type, bounds and default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnplug.commands import OK, say, say_json, wrapped
from attnplug.discovery.registry import Registry
from attnplug.request.settings import OPTION_PREFIX, Settings

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping

    from attnplug.manifest.schema import Option

_EPILOG: Final = """\
An option tunes a backend, and never changes what it supports. It is set by the call, by attnplug.using, by a variable
of the environment or in the configuration file, in this order of precedence.

examples:
  attnplug options
  attnplug options flashinfer
  attnplug options --json | jq '.backends.flashinfer'
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.description = "List what can be set for each installed backend: the options that its manifest declares."
    parser.epilog = _EPILOG
    parser.add_argument("backend", nargs="?", metavar="BACKEND", help="one backend, by its name or an alias")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """List the options. A backend without any is no failure: the exit code is 0."""
    registry = Registry.scan(Settings.read())
    backends = registry.options(arguments.backend)
    if arguments.json:
        say_json({"backends": {name: _described(options) for name, options in backends.items()}})
        return OK
    blocks = ["\n".join(_lines(name, options)) for name, options in backends.items()]
    absent = f"{arguments.backend} is not installed: its manifest says what options it has"
    say("\n\n".join(blocks or wrapped(absent)))
    return OK


def _described(options: Mapping[str, Option]) -> dict[str, Any]:
    return {
        name: {
            "type": option.type,
            "default": option.default,
            "min": option.min,
            "max": option.max,
            "choices": list(option.choices),
            "help": option.help,
        }
        for name, option in options.items()
    }


def _lines(name: str, options: Mapping[str, Option]) -> Iterator[str]:
    if not options:
        yield from wrapped(f"{name}: no options")
        return
    variable, table = f"{OPTION_PREFIX}{name.upper()}__OPTION=VALUE", f"[options.{name}]"
    yield from wrapped(f"{name}: {variable}, or {table} in the configuration file")
    for option in options.values():
        yield from wrapped(str(option), "  ")
