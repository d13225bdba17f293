"""From a command line to what is asked: one layer from options or JSON, or every layer of a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnplug.cli.explain.field_options import given_fields, option_of, read_object
from attnplug.errors import RequestError
from attnplug.request.device import Device
from attnplug.request.fields import FIELDS
from attnplug.request.requirements import Requirements

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping

ONE_LAYER: Final = ""
"""The name of the layer that options describe."""

_ABOUT_MODELS: Final = ("assume", "partial")


def asked_layers(arguments: argparse.Namespace) -> Mapping[str, Requirements]:
    """
    Return what each layer asks, by its name; a layer that is described by options has none.

    Raises:
        RequestError: Nothing is asked, or in two ways at once.
        RequirementsError: The requirements are unknown, contradictory or impossible.
    """
    fields = given_fields(arguments)
    if arguments.config is not None:
        return _of_model(arguments, fields)
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
            "`attnplug explain --head-size 64 --num-q-heads 64 --num-kv-heads 8 --dtype bfloat16 --sinks`",
        )
    return {ONE_LAYER: Requirements.from_dict(whole)}


def asked_devices(texts: list[str] | None) -> tuple[Device, ...]:
    """
    Return the devices that are asked about; none where this machine's own is meant.

    Raises:
        DeviceError: A text is no device.
    """
    return tuple(dict.fromkeys(Device.parse(text) for text in texts or ()))


def asked_options(texts: list[str] | None) -> dict[str, dict[str, str]] | None:
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


def _of_model(arguments: argparse.Namespace, fields: dict[str, Any]) -> Mapping[str, Requirements]:
    from attnplug.models import requirements_from_json  # noqa: PLC0415 - only models need it

    if arguments.requirements:
        raise RequestError(
            "--requirements and --config were given",
            "a model's configuration describes all of its layers",
            "leave one of them out",
        )
    for name in fields:
        if FIELDS[name].kind == "model" and name != "dtype":
            raise RequestError(
                f"{option_of(name)} and --config were given",
                f"{name} belongs to the model, and follows from its configuration",
                f"leave {option_of(name)} out, or describe one layer without --config",
            )
    return requirements_from_json(
        arguments.config,
        **{"paged": True, **fields},
        **{name: getattr(arguments, name) for name in _ABOUT_MODELS},
    )
