"""``attnplug explain``: which backend serves a layer or a model here, or on another device, and why not the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnplug.cli.device_report import report_device
from attnplug.cli.engine import find_engine
from attnplug.cli.explain.comparison import compare
from attnplug.cli.explain.request import (
    ONE_LAYER,
    add_field_options,
    requested_devices,
    requested_layers,
    requested_options,
)
from attnplug.cli.explain.result import explain_layers
from attnplug.commands import (
    NO,
    OK,
    STYLES,
    Row,
    abbreviated,
    complain,
    console,
    escaped,
    is_terminal,
    readable,
    say,
    say_json,
    styled,
    table,
    wrapped,
)
from attnplug.negotiation.candidate import TERMS
from attnplug.selection.explanation import NOT_INSTALLED, detail

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from rich.text import Text

    from attnplug.cli.explain.comparison import EngineResult
    from attnplug.cli.explain.result import LayerGroup, Result
    from attnplug.negotiation.verdict import Verdict
    from attnplug.request.device import Device
    from attnplug.selection.explanation import Explanation

_EPILOG: Final = """\
examples:
  attnplug explain --head-size 64 --num-q-heads 64 --num-kv-heads 8 --dtype bfloat16 --sinks
  attnplug explain --requirements @layer.json --device cuda:8.0 --device cuda:9.0 --assume-installed
  attnplug explain --config path/to/config.json --dtype bfloat16 --block-size 16
  attnplug explain --requirements @layer.json --backend flash_attn/fa3 --backend auto
  attnplug explain --engine vllm --config path/to/config.json --device cuda:9.0

exit codes: 0 everything requested can be served, 1 something cannot, 2 the request is wrong
"""

_INDENT: Final = "    "

Grid = list[tuple[str, list["Verdict"]]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        "Say which backend serves a layer, or each layer of a model, and why not the others.\n"
        "Nothing of a plugin is imported, and torch is not either."
    )
    parser.epilog = _EPILOG
    parser.add_argument("--json", action="store_true", help="print JSON")
    requested = parser.add_argument_group("the request, instead of or before the options of its fields")
    requested.add_argument(
        "--requirements", metavar="JSON", help="requirements as a JSON object, or @FILE; options win"
    )
    requested.add_argument("--config", metavar="FILE", help="a model's config.json, or its folder: all of its layers")
    requested.add_argument("--assume", metavar="TYPE", help="read an unknown model type as this one, such as llama")
    requested.add_argument(
        "--partial", action="store_true", help="describe the attention layers of a hybrid model alone"
    )
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
    there.add_argument(
        "--engine", metavar="NAME", help="also what this engine picks by itself, such as vllm, and why it differs"
    )
    add_field_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Explain, on each device."""
    layers = requested_layers(arguments)
    devices = requested_devices(arguments.device) or (_this_device(),)
    engine = find_engine(arguments.engine) if arguments.engine is not None else None
    keywords = {"backend": arguments.backend, "options": requested_options(arguments.option)}
    results = [
        explain_layers(layers, device, assume_installed=arguments.assume_installed, **keywords) for device in devices
    ]
    compared = compare(engine, results, assume_installed=arguments.assume_installed) if engine is not None else None
    for warning in dict.fromkeys(text for each in compared or () for text in each.answer.warnings):
        complain(f"attnplug explain: {warning}")
    if arguments.json:
        engines = {} if compared is None else {"engines": [each.to_dict() for each in compared]}
        say_json({**_describe(results), **engines})
    else:
        _show_engine(compared or ())
        _show(results)
        _show_engine_details(compared or ())
    return OK if all(result.serves for result in results) else NO


def _this_device() -> Device:
    report = report_device()
    if report.overlooked:
        complain(escaped(f"attnplug explain: the device is {report.device}, though {report.overlooked}: {report.fix}"))
    return report.device


def _describe(results: Sequence[Result]) -> dict[str, object]:
    planned = [result for result in results if result.plan is not None or result.failure is not None]
    return {
        "explanations": [group.to_dict() for result in results for group in result.groups],
        "plans": [result.plan_to_dict() for result in planned],
    }


# An engine's own choices: the comparison before everything else, each of its backends after it


def _show_engine(compared: Sequence[EngineResult]) -> None:
    for each in compared:
        say(
            "\n".join(
                [
                    *wrapped(f"device: {each.device}"),
                    *(line for text in each.answer.assumed for line in wrapped(f"assumed: {text}")),
                ]
            )
        )
        for comparison in each.comparisons:
            _show_layers(comparison.group)
            say("\n".join(line for text in comparison.summary() for line in wrapped(text)))
        say()


def _show_engine_details(compared: Sequence[EngineResult]) -> None:
    for each in compared:
        for comparison in each.comparisons:
            say("\n".join(wrapped(f"backends of {each.answer.engine} on {each.device}, in its order of preference")))
            _show_layers(comparison.group)
            say("\n".join(line for text in comparison.details() for line in wrapped(text, _INDENT)))
            say()


# What a person reads: devices side by side, then each candidate with its reasons and its fix


def _show(results: Sequence[Result]) -> None:
    if len(results) > 1:
        for index, group in enumerate(results[0].groups):
            _show_side_by_side(results, group, index)
    for result in results:
        for group in result.groups:
            _show_group(group)
        if result.plan is not None or result.failure is not None:
            say("\n".join(map(escaped, _plan_lines(result))))
            say()


def _side_by_side(results: Sequence[Result], index: int) -> Grid:
    """Return the verdict on each installed candidate on every device, for one group of layers."""
    columns = [{verdict.id: verdict for verdict in result.groups[index].explanation.verdicts} for result in results]
    installed = sorted(id_ for id_, verdict in columns[0].items() if verdict.status != "absent")
    return [(id_, [column[id_] for column in columns]) for id_ in installed]


def _brief(verdict: Verdict) -> str:
    """
    Return a verdict in a few words: its status, and the fields that refuse it or whether something is unverified.
    """
    fields = dict.fromkeys(reason.field for reason in verdict.reasons)
    brief = f"refused: {', '.join(fields)}" if verdict.status == "refused" else readable(verdict.status)
    return f"{brief}, unverified" if verdict.unverified else brief


def _show_side_by_side(results: Sequence[Result], group: LayerGroup, index: int) -> None:
    grid = _side_by_side(results, index)
    heads = ["candidate", *(str(result.device) for result in results)]
    _show_layers(group)
    if is_terminal():
        _print_grid(heads, grid)
    else:
        lines = [heads, *([id_, *map(_brief, verdicts)] for id_, verdicts in grid)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        say("\n".join(escaped("  ".join(map(str.ljust, line, widths)).rstrip()) for line in lines))
    say()


def _print_grid(heads: Sequence[str], grid: Grid) -> None:
    from rich.table import Table  # noqa: PLC0415 - only a terminal needs rich

    found = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for head in heads:
        found.add_column(styled(head))
    for id_, verdicts in grid:
        found.add_row(styled((id_, "bold")), *(styled((_brief(v), STYLES[v.status])) for v in verdicts))
    console().print(found)


def _show_group(group: LayerGroup) -> None:
    _show_layers(group)
    if is_terminal():
        _print_explanation(group.explanation)
    else:
        say(f"{group.explanation}\n")


def _print_explanation(explanation: Explanation) -> None:
    from rich.table import Table  # noqa: PLC0415 - only a terminal needs rich

    heading = Table.grid(padding=(0, 2, 0, 0))
    for name, text in _heading(explanation):
        heading.add_row(styled((name, "dim")), styled(text))
    heading.add_row(styled(("chosen", "dim")), _chosen(explanation))
    console().print(heading)
    say()
    installed = [verdict for verdict in explanation.verdicts if verdict.status != "absent"]
    absent = [verdict for verdict in explanation.verdicts if verdict.status == "absent"]
    console().print(table([_row(verdict) for verdict in installed], "terms, reasons, and the fix"))
    if absent:
        longest = max(len(verdict.id) for verdict in absent)
        listed = [f"{verdict.id:{longest}}  {verdict.fix}" for verdict in absent]
        console().print("\n".join(["", NOT_INSTALLED, *map(escaped, listed)]), style="dim")
    if explanation.tie:
        say("\n".join(["", *wrapped(explanation.tie)]))
    say()


def _heading(explanation: Explanation) -> Iterator[tuple[str, str]]:
    yield "requested", " ".join(f"{name}={value}" for name, value in explanation.requirements.to_dict().items())
    assumed = ", kernel libraries assumed installed" if explanation.assumed_installed else ""
    yield "device", f"{explanation.device}{assumed}"
    for name, origin in explanation.origins:
        yield "set", f"{name}={getattr(explanation.requirements, name)} by {origin}"
    if explanation.listed:
        yield "permitted", ", ".join(explanation.listed)


def _show_layers(group: LayerGroup) -> None:
    if group.layers != (ONE_LAYER,):
        say("\n".join(wrapped(abbreviated(group.layers))))


def _chosen(explanation: Explanation) -> Text:
    chosen = explanation.chosen
    if chosen is None:
        return styled(("none", STYLES["broken"]))
    decided = f"  decided by {chosen.decided_by}" if chosen.decided_by else ""
    return styled((chosen.id, STYLES["chosen"]), decided)


def _row(verdict: Verdict) -> Row:
    return Row(verdict.id, verdict.status, tuple(detail(verdict)), verdict.distribution)


def _plan_lines(result: Result) -> Iterator[str]:
    """Yield the common terms of a model, or why it has none."""
    if result.plan is None:
        yield f"plan on {result.device}: none"
        # Where each group can be served by itself, the error says what they do not share.
        failure = str(result.failure).splitlines()
        yield from failure if all(group.explanation.chosen for group in result.groups) else failure[:1]
        return
    found = result.plan
    shown = (*TERMS, "cudagraph")
    terms = " ".join(f"{name}={getattr(found, name)}" for name in shown)
    yield f"plan on {result.device}: {terms}"
    if len({group.selection.agreement.cudagraph for group in found.groups}) > 1:
        yield f"    the graph level is that of {found.weakest.selection.id}"
    for group in found.groups:
        yield from wrapped(f"{group.selection.id}  {abbreviated(group.layers)}", "    ")
