"""From the options of ``attnplug explain`` to what is requested: one layer, or every layer of a model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from attnplug.cli.found_model import CONFIG, has_config
from attnplug.commands import complain, escaped
from attnplug.errors import NoBackendError, RequestError
from attnplug.request.domains import Flag, Integer, Name, Names, Number, Table
from attnplug.request.fields import FIELDS, fields_of
from attnplug.request.requirements import Requirements
from attnplug.selection.scope import parse_device

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Mapping, Sequence

    from attnplug.models.description import ModelDescription
    from attnplug.request.device import Device
    from attnplug.request.domains import Domain
    from attnplug.request.field import Field, Kind

_HALF: Final = "pass --dtype bfloat16 if the engine casts it"
ONE_LAYER: Final = ""
"""The name of the layer that options describe."""

_ABOUT_MODELS: Final = ("assume", "partial")
_METAVARS: Final = {Integer: "N", Number: "X", Table: "JSON"}


def requested_layers(
    arguments: argparse.Namespace,
) -> tuple[Mapping[str, Requirements], Mapping[str, Requirements]]:
    """
    Return what each layer requests, by its name, and the uncompressed prefills of layers with latents; a layer that is
    described by options has no name. Where nothing is requested, the model of the working folder is explained, and
    ``arguments.config`` set to its configuration.

    Raises:
        RequestError: Nothing is requested, or in two ways at once.
        NoBackendError: No requirements express a model's attention.
        RequirementsError: The requirements are unknown, contradictory or impossible.
    """
    fields = given_fields(arguments)
    if arguments.config is None and not fields and not arguments.requirements and has_config():
        arguments.config = CONFIG
        complain(f"attnplug: note: explaining the model of this folder, as with --config {CONFIG}")
    if arguments.config is not None:
        model = _describe(arguments, fields)
        return model.requirements, model.uncompressed
    for name in _ABOUT_MODELS:
        if getattr(arguments, name):
            raise RequestError(
                f"{option_of(name)} was given without --config",
                f"{option_of(name)} says how a model's configuration is read",
                "add --config FILE, or leave it out",
            )
    whole = {**(read_object(arguments.requirements) if arguments.requirements else {}), **fields}
    if not whole:
        raise RequestError(
            "no requirements were given",
            "they are options, JSON (--requirements), or a model's configuration (--config)",
            "write, for example, "
            "`attnplug explain --head-size 64 --num-q-heads 64 --num-kv-heads 8 --dtype bfloat16 --sinks`, "
            f"or run `attnplug explain` in a folder with a model's {CONFIG}",
        )
    return {ONE_LAYER: Requirements.from_dict(whole)}, {}


def requested_devices(texts: Sequence[str] | None) -> tuple[Device, ...]:
    """
    Return the devices that were named; none where this machine's own is meant.

    Raises:
        DeviceError: A text is no device.
    """
    return tuple(dict.fromkeys(map(parse_device, texts or ())))


def note_float32(layers: Iterable[Requirements], devices: Iterable[Device], fields: Container[str]) -> None:
    """
    Say how a float32 model is decided in a dtype that the kernels of GPUs have.

    Args:
        layers: What its layers request.
        devices: The devices to decide for.
        fields: Names of fields that were given: with a dtype, nothing is said.
    """
    is_float32 = "dtype" not in fields and any(layer.dtype == "float32" for layer in layers)
    if is_float32 and any(device.type != "cpu" for device in devices):
        complain(f"attnplug: note: the model is float32, which few kernels for GPUs support: {_HALF}")


def requested_options(texts: list[str] | None) -> dict[str, dict[str, str]] | None:
    """
    Read ``BACKEND.OPTION=VALUE``.

    Raises:
        RequestError: A text has another form.
    """
    found: dict[str, dict[str, str]] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        backend, dot, option = name.partition(".")
        if not (backend and dot and option and equals):
            raise RequestError(
                f"--option {text!r} was given",
                "an option is BACKEND.OPTION=VALUE",
                "write, for example, --option flashinfer.workspace_mib=512",
            )
        found.setdefault(backend, {})[option] = value
    return found or None


def _describe(arguments: argparse.Namespace, fields: dict[str, Any]) -> ModelDescription:
    from attnplug.models import describe_model  # noqa: PLC0415 - only models need it

    if arguments.requirements:
        raise RequestError(
            "--requirements and --config were given",
            "a model's configuration describes all of its layers",
            "leave one of them out",
        )
    for name in fields:
        if name in FIELDS and FIELDS[name].kind == "model" and name != "dtype":
            raise RequestError(
                f"{option_of(name)} and --config were given",
                f"{name} belongs to the model, and follows from its configuration",
                f"leave {option_of(name)} out, or describe one layer without --config",
            )
    model = describe_model(arguments.config, assume=arguments.assume, **{"paged": True, **fields})
    for line in (*model.notes, *(f"other layers: {other}" for other in model.others if not other.is_attention)):
        complain(f"attnplug: note: {escaped(line)}")
    if not model.layers or (model.unserved and not arguments.partial):
        raise NoBackendError(
            f"{model.origin} has layers that no backend can serve",
            "; ".join(map(str, model.unserved or model.others)),
            "add --partial for the other attention layers" if model.layers else "run it on its own implementation",
        )
    return model


def read_object(text: str) -> dict[str, Any]:
    """
    Read a JSON object, given as text or as ``@FILE``.

    Raises:
        RequestError: The file does not open, or the text is no JSON object.
    """
    try:
        data = json.loads(Path(text[1:]).read_text(encoding="utf-8") if text.startswith("@") else text)
    except OSError as error:
        raise RequestError(f"{text!r} does not open: {error.strerror}", "", "correct the path") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(
            f"{text!r} is not JSON: {error}", "", """write '{"head_size": 64, ...}', or @FILE"""
        ) from error
    if not isinstance(data, dict):
        raise RequestError(f"{text!r} was given", "requirements are one JSON object, field to value", "write {...}")
    return data


# Requirements as options: one for each model and engine field


_KINDS: Final[Mapping[Kind, str]] = {
    "model": "what the model requests",
    "engine": "what the engine requests",
    "selection": "what is bound after the selection",
}


def add_field_options(parser: argparse.ArgumentParser, kinds: Sequence[Kind] = tuple(_KINDS)) -> None:
    """
    Add one option for each field of these kinds. One that is not given is not in the parsed arguments.
    """
    for kind in kinds:
        group = parser.add_argument_group(_KINDS[kind])
        for item in fields_of(kind):
            _add_option(group, item)


def given_fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields that were given as options."""
    known = {item.name for item in fields_of(*_KINDS)}
    return {name: value for name, value in vars(arguments).items() if name in known}


def option_of(name: str) -> str:
    """Return the option of a field."""
    return f"--{name.replace('_', '-')}"


def _add_option(group: argparse._ArgumentGroup, item: Field) -> None:
    option, default = option_of(item.name), argparse.SUPPRESS
    text = _described(item)
    if isinstance(item.domain, Flag):
        group.add_argument(option, action=argparse.BooleanOptionalAction, default=default, help=text)
    elif isinstance(item.domain, Names):
        action, names = _AddNames, dict.fromkeys((option, option.removesuffix("s")))
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
        except (ValueError, RecursionError):
            raise argparse.ArgumentTypeError(f"{text!r} is not {domain.text}") from None

    return parse


class _AddNames(argparse.Action):
    """Collects names over repeated options; commas separate them too."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        del parser, option
        setattr(namespace, self.dest, [*getattr(namespace, self.dest, []), *values.split(",")])
