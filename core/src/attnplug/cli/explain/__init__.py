"""``attnplug explain``: which backend serves a layer or a model here, or on another device, and why not the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnplug.cli.explain.answer import answer
from attnplug.cli.explain.field_options import add_field_options
from attnplug.cli.explain.question import asked_devices, asked_layers, asked_options
from attnplug.cli.look import look
from attnplug.commands import NO, OK, complain, say_json

if TYPE_CHECKING:
    import argparse

    from attnplug.cli.explain.answer import Answer
    from attnplug.request.device import Device

_EPILOG: Final = """\
examples:
  attnplug explain --head-size 64 --num-q-heads 64 --num-kv-heads 8 --dtype bfloat16 --sinks
  attnplug explain --requirements @layer.json --device cuda:8.0 --device cuda:9.0 --assume-installed
  attnplug explain --config path/to/config.json --dtype bfloat16 --block-size 16
  attnplug explain --requirements @layer.json --backend flash_attn/fa3 --backend auto

exit codes: 0 everything asked can be served, 1 something cannot, 2 the question is wrong
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        "Say which backend serves a layer, or each layer of a model, and why not the others.\n"
        "Nothing of a plugin is imported, and torch is not either."
    )
    parser.epilog = _EPILOG
    parser.add_argument("--json", action="store_true", help="print JSON")
    asked = parser.add_argument_group("the question, instead of or before the options of its fields")
    asked.add_argument("--requirements", metavar="JSON", help="requirements as a JSON object, or @FILE; options win")
    asked.add_argument("--config", metavar="FILE", help="a model's config.json, or its folder: all of its layers")
    asked.add_argument("--assume", metavar="TYPE", help="read an unknown model type as this one, such as llama")
    asked.add_argument("--partial", action="store_true", help="describe the attention layers of a hybrid model alone")
    there = parser.add_argument_group("where, and with what")
    there.add_argument(
        "--device", action="append", metavar="DEVICE", help="cpu, cuda:9.0, ...; repeatable; default: this machine's"
    )
    there.add_argument(
        "--assume-installed", action="store_true", help="suppose that the kernel libraries of plugins are installed"
    )
    there.add_argument(
        "--backend",
        action="append",
        metavar="NAME",
        help="this backend or backend/variant alone; repeated: in this order; auto permits any other",
    )
    there.add_argument(
        "--option", action="append", metavar="BACKEND.OPTION=VALUE", help="an option of a plugin; repeatable"
    )
    add_field_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Explain, on each device."""
    layers = asked_layers(arguments)
    devices = asked_devices(arguments.device) or (_this_device(),)
    keywords = {"backend": arguments.backend, "options": asked_options(arguments.option)}
    answers = [answer(layers, device, assume_installed=arguments.assume_installed, **keywords) for device in devices]
    if arguments.json:
        say_json(_describe(answers))
    else:
        from attnplug.cli.explain.show import show  # noqa: PLC0415 - JSON does without

        show(answers)
    return OK if all(found.serves for found in answers) else NO


def _this_device() -> Device:
    seen = look()
    if seen.overlooked:
        complain(f"attnplug explain: the device is {seen.device}, though {seen.overlooked}: {seen.fix}")
    return seen.device


def _describe(answers: list[Answer]) -> dict[str, object]:
    parts = [part.to_dict() for found in answers for part in found.parts]
    planned = [found for found in answers if found.plan is not None or found.failure is not None]
    return {"explanations": parts, "plans": [found.plan_to_dict() for found in planned]}
