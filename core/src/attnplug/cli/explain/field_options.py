"""Requirements as command-line options: one for each model and engine field of the vocabulary, in its own words."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attnplug.errors import RequestError
from attnplug.request.fields import FIELDS, Flag, Integer, Name, Names, Number, Table, fields_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnplug.request.fields import Domain, Field

_METAVARS: Final = {Integer: "N", Number: "X", Table: "JSON"}


def add_field_options(parser: argparse.ArgumentParser) -> None:
    """Add one option for each field that can be asked for. A field that is not given is not in the parsed arguments."""
    for kind, title in (("model", "what the model asks"), ("engine", "what the engine asks")):
        group = parser.add_argument_group(title)
        for item in fields_of(kind):  # type: ignore[arg-type]
            _add_option(group, item)


def given_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that were given as options."""
    return {name: value for name, value in vars(arguments).items() if name in FIELDS}


def option_of(name: str) -> str:
    """Return the option of a field."""
    return f"--{name.replace('_', '-')}"


def read_object(text: str) -> dict[str, Any]:
    """
    Read a JSON object, given as text or as ``@FILE``.

    Raises:
        RequestError: The file does not open, or the text is no JSON object.
    """
    try:
        data = json.loads(Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text)
    except OSError as error:
        raise RequestError(f"{text!r} was given", f"it does not open: {error.strerror}", "correct the path") from error
    except ValueError as error:
        raise RequestError(
            f"{text!r} was given", f"it is not JSON: {error}", """write '{"head_size": 64, ...}', or @FILE"""
        ) from error
    if not isinstance(data, dict):
        raise RequestError(f"{text!r} was given", "requirements are one JSON object, field to value", "write {...}")
    return data


def _add_option(group: argparse._ArgumentGroup, item: Field) -> None:
    option, default = option_of(item.name), argparse.SUPPRESS
    text = _described(item)
    if isinstance(item.domain, Flag):
        group.add_argument(option, action=argparse.BooleanOptionalAction, default=default, help=text)
    elif isinstance(item.domain, Names):
        action, names = _AddNames, (option, option.removesuffix("s"))
        group.add_argument(*names, action=action, default=default, metavar="NAME", help=f"{text}; repeatable")
    else:
        metavar = _METAVARS.get(type(item.domain), "NAME")
        group.add_argument(option, type=_reader(item.domain), default=default, metavar=metavar, help=text)


def _described(item: Field) -> str:
    """Return the help of a field, with the values of a closed list. A single ``%`` would be a directive of argparse."""
    domain = item.domain
    listed = f": {', '.join(domain.values)}" if isinstance(domain, Name) and domain.values else ""
    return f"{item.help}{listed}{' (required)' if item.required else ''}".replace("%", "%%")


def _reader(domain: Domain) -> Callable[[str], Any]:
    """Return what turns an option's text into a value. Whether the value is allowed is for `Requirements` to say."""
    readers: dict[type, Callable[[str], Any]] = {Integer: int, Number: float, Table: json.loads}
    read = readers.get(type(domain), str)

    def parse(text: str) -> Any:
        try:
            return read(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {domain.text}") from None

    return parse


class _AddNames(argparse.Action):
    """Collects names over repeated options; commas separate them too."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        del parser, option
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), *values.split(",")])
