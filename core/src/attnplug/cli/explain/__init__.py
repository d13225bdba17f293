"""``attnplug explain``: which backend serves a layer or a model here, or on another device, and why not the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnplug.cli.device_report import report_device
from attnplug.cli.engine import find_engine
from attnplug.cli.explain.comparison import compare, details_of, summaries_of
from attnplug.cli.explain.full import full_lines
from attnplug.cli.explain.matrix import COMMON_DEVICES, matrix_lines
from attnplug.cli.explain.request import (
    add_field_options,
    given_fields,
    note_float32,
    requested_devices,
    requested_layers,
    requested_options,
)
from attnplug.cli.explain.result import explain_layers
from attnplug.cli.explain.short import joined, short_lines
from attnplug.commands import NO, OK, complain, escaped, say_json, say_styled
from attnplug.errors import RequestError
from attnplug.request.device import Device

if TYPE_CHECKING:
    import argparse
    from collections.abc import Collection, Iterator, Sequence

    from attnplug.cli.explain.comparison import EngineResult
    from attnplug.cli.explain.result import Result
    from attnplug.cli.explain.short import Line

_EPILOG: Final = """\
examples:
  attnplug explain --head-size 64 --num-q-heads 64 --num-kv-heads 8 --dtype bfloat16 --sinks
  attnplug explain --requirements @layer.json --device cuda:8.0 --device cuda:9.0 --assume-installed
  attnplug explain --config path/to/config.json --dtype bfloat16 --block-size 16
  attnplug explain --requirements @layer.json --backend flash_attn/fa3 --backend auto
  attnplug explain --config path/to/config.json --device h100 --assume-installed --all
  attnplug explain --config path/to/config.json --matrix --assume-installed
  attnplug explain --engine vllm --config path/to/config.json --device h100

exit codes: 0 everything requested can be served, 1 something cannot, 2 the request is wrong
"""

_VERDICTS: Final = ("chosen", "eligible", "refused", "missing_dependency", "absent", "broken")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        "Say which backend serves a layer, or each layer of a model, and why not the others.\n"
        "Nothing of a plugin is imported, and torch is not either."
    )
    parser.epilog = _EPILOG
    parser.add_argument("--json", action="store_true", help="print JSON")
    shown = parser.add_argument_group("what is shown, instead of at most 25 lines for a device")
    shown.add_argument("--all", action="store_true", help="every candidate with all reasons and the fix")
    shown.add_argument(
        "--matrix", action="store_true", help="candidates x devices; without --device this machine's and common ones"
    )
    shown.add_argument(
        "--verdict",
        action="append",
        choices=_VERDICTS,
        metavar="VERDICT",
        help=f"the candidates with this verdict alone, in full; repeatable: {', '.join(_VERDICTS)}",
    )
    requested = parser.add_argument_group("the request, instead of or before the options of its fields")
    requested.add_argument(
        "--requirements", metavar="JSON", help="requirements as a JSON object, or @FILE; options win"
    )
    requested.add_argument("model", nargs="?", metavar="CONFIG", help="as --config")
    requested.add_argument(
        "--config", metavar="FILE", help="a model's config.json, its folder, or its id in the Hugging Face cache"
    )
    requested.add_argument("--assume", metavar="TYPE", help="read an unknown model type as this one, such as llama")
    requested.add_argument(
        "--partial",
        action="store_true",
        help="leave out attention that no requirements express, such as that of an indexer without pages",
    )
    there = parser.add_argument_group("where, and with what")
    there.add_argument(
        "--device",
        action="append",
        metavar="DEVICE",
        help="cpu, h100, sm90, cuda:9.0, mi300x, rocm:gfx942, ...; repeatable; default: current, this machine's",
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
    there.add_argument(
        "--engine", metavar="NAME", help="also what this engine picks by itself, such as vllm, and why it differs"
    )
    add_field_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Explain, on each device."""
    if arguments.model is not None:
        if arguments.config is not None:
            raise RequestError(
                f"{arguments.model!r} and --config {arguments.config!r} were given",
                "one model is explained",
                "leave one of them out",
            )
        arguments.config = arguments.model
    layers, prefills = requested_layers(arguments)
    devices = _devices(arguments)
    if arguments.config is not None:
        note_float32(layers.values(), devices, given_fields(arguments))
    engine = find_engine(arguments.engine) if arguments.engine is not None else None
    keywords: dict[str, Any] = {"backend": arguments.backend, "options": requested_options(arguments.option)}
    keywords |= {"assume_installed": arguments.assume_installed, "prefills": prefills}
    results = [explain_layers(layers, device, **keywords) for device in devices]
    compared = compare(engine, results, assume_installed=arguments.assume_installed) if engine is not None else None
    for warning in dict.fromkeys(text for each in compared or () for text in each.answer.warnings):
        complain(f"attnplug: warning: {warning}")
    if arguments.json:
        engines = {} if compared is None else {"engines": [each.to_dict() for each in compared]}
        say_json({**_describe(results, arguments.verdict or ()), **engines})
    else:
        say_styled(_lines(arguments, results, compared or ()))
    return OK if all(result.serves for result in results) else NO


def _devices(arguments: argparse.Namespace) -> tuple[Device, ...]:
    named = requested_devices(arguments.device)
    if named:
        return named
    report = report_device()
    if report.overlooked:
        complain(f"attnplug: warning: the device is {escaped(str(report.device))}, though {escaped(report.overlooked)}")
        complain(f"  fix: {escaped(report.fix)}")
    common = requested_devices(COMMON_DEVICES) if arguments.matrix else ()
    return tuple(dict.fromkeys((report.device, *common)))


def _describe(results: Sequence[Result], statuses: Collection[str]) -> dict[str, object]:
    planned = [result for result in results if result.plan is not None or result.failure is not None]
    return {
        "explanations": [group.to_dict(statuses) for result in results for group in result.groups],
        "plans": [result.plan_to_dict(statuses) for result in planned],
    }


def _lines(
    arguments: argparse.Namespace, results: Sequence[Result], compared: Sequence[EngineResult]
) -> Iterator[Line]:
    """Yield what a person reads: an engine's own choices first, then the views that were requested."""
    statuses = arguments.verdict or ()
    yield from summaries_of(compared)
    side_by_side = arguments.matrix or (len(results) > 1 and not arguments.all and not statuses)
    if arguments.all or statuses:
        for result in results:
            yield from full_lines(result, statuses)
    elif not arguments.matrix:
        own = Device.current()
        yield from joined([short_lines(result, own, matrix=side_by_side) for result in results])
    if side_by_side:
        yield from (() for _ in range(not arguments.matrix))
        yield from matrix_lines(results)
    if arguments.all:
        yield from details_of(compared)
