"""Answers as a person reads them: devices side by side, then each candidate with its reasons and its fix."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attnplug.commands import STYLES, Row, abbreviated, console, is_terminal, readable, say, table, wrapped
from attnplug.selection.explanation import detail

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnplug.cli.explain.answer import Answer, Part
    from attnplug.negotiation.verdict import Verdict
    from attnplug.selection.explanation import Explanation

Grid = list[tuple[str, list["Verdict"]]]


def show(answers: Sequence[Answer]) -> None:
    """Write all answers."""
    if len(answers) > 1:
        for index, part in enumerate(answers[0].parts):
            _show_side_by_side(answers, part, index)
    for answer in answers:
        for part in answer.parts:
            _show_part(part)
        if answer.plan is not None or answer.failure is not None:
            say("\n".join(_plan_lines(answer)))
            say()


def side_by_side(answers: Sequence[Answer], index: int) -> Grid:
    """Return the verdict of each installed candidate on every device, for one group of layers."""
    columns = [{verdict.id: verdict for verdict in answer.parts[index].explanation.verdicts} for answer in answers]
    installed = sorted(id_ for id_, verdict in columns[0].items() if verdict.status != "absent")
    return [(id_, [column[id_] for column in columns]) for id_ in installed]


def brief(verdict: Verdict) -> str:
    """
    Return a verdict in a few words: its status, and the fields that it fails on or whether something is unverified.
    """
    fields = dict.fromkeys(reason.field for reason in verdict.reasons)
    told = f"refused: {', '.join(fields)}" if verdict.status == "refused" else readable(verdict.status)
    return f"{told}, unverified" if verdict.unverified else told


def _show_side_by_side(answers: Sequence[Answer], part: Part, index: int) -> None:
    grid = side_by_side(answers, index)
    heads = ["candidate", *(str(answer.device) for answer in answers)]
    _show_layers(part)
    if is_terminal():
        _print_grid(heads, grid)
    else:
        lines = [heads, *([id_, *map(brief, verdicts)] for id_, verdicts in grid)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        say("\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines))
    say()


def _print_grid(heads: Sequence[str], grid: Grid) -> None:
    from rich.table import Table  # noqa: PLC0415 - only a terminal needs rich

    found = Table(*heads, box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for id_, verdicts in grid:
        found.add_row(f"[bold]{id_}[/]", *(f"[{STYLES[v.status]}]{brief(v)}[/]" for v in verdicts))
    console().print(found)


def _show_part(part: Part) -> None:
    _show_layers(part)
    if not is_terminal():
        say(f"{part.explanation}\n")
        return
    from rich.markup import escape  # noqa: PLC0415 - only a terminal needs rich
    from rich.table import Table  # noqa: PLC0415 - only a terminal needs rich

    explanation = part.explanation
    heading = Table.grid(padding=(0, 2, 0, 0))
    for name, text in _heading(explanation):
        heading.add_row(f"[dim]{name}[/]", escape(text))
    heading.add_row("[dim]chosen[/]", f"{_chosen(part)}\n")
    console().print(heading)
    installed = [verdict for verdict in explanation.verdicts if verdict.status != "absent"]
    absent = [verdict for verdict in explanation.verdicts if verdict.status == "absent"]
    console().print(table([_row(verdict) for verdict in installed], "terms, reasons, and the fix"))
    if absent:
        longest = max(len(verdict.id) for verdict in absent)
        listed = [f"{verdict.id:{longest}}  {verdict.fix}" for verdict in absent]
        console().print("\n".join(["", "not installed, so not asked", *map(escape, listed)]), style="dim")
    if explanation.tie:
        say("\n".join(["", *wrapped(explanation.tie)]))
    say()


def _heading(explanation: Explanation) -> Iterator[tuple[str, str]]:
    yield "asked", " ".join(f"{name}={value}" for name, value in explanation.requirements.to_dict().items())
    assumed = ", kernel libraries assumed installed" if explanation.assumed_installed else ""
    yield "device", f"{explanation.device}{assumed}"
    for name, origin in explanation.origins:
        yield "set", f"{name}={getattr(explanation.requirements, name)} by {origin}"
    if explanation.listed:
        yield "permitted", ", ".join(explanation.listed)


def _show_layers(part: Part) -> None:
    if part.layers != ("",):
        say("\n".join(wrapped(abbreviated(part.layers))))


def _chosen(part: Part) -> str:
    chosen = part.explanation.chosen
    if chosen is None:
        return "[bold red]none[/]"
    decided = f"  decided by {chosen.decided_by}" if chosen.decided_by else ""
    return f"[bold green]{chosen.id}[/]{decided}"


def _row(verdict: Verdict) -> Row:
    return Row(verdict.id, verdict.status, tuple(detail(verdict)), verdict.distribution)


def _plan_lines(answer: Answer) -> Iterator[str]:
    """Yield the common terms of a model, or why it has none."""
    if answer.plan is None:
        yield f"plan on {answer.device}: none"
        # Where each part can be served by itself, the error knows what they do not share.
        told = str(answer.failure).splitlines()
        yield from told if all(part.explanation.chosen for part in answer.parts) else told[:1]
        return
    found = answer.plan
    terms = f"block_size={found.block_size} kv_layout={found.kv_layout} cudagraph={found.cudagraph}"
    yield f"plan on {answer.device}: {terms}"
    if len({group.selection.agreement.cudagraph for group in found.groups}) > 1:
        yield f"    the graph level is that of {found.weakest.selection.id}"
    for group in found.groups:
        yield from wrapped(f"{group.selection.id}  {abbreviated(group.layers)}", "    ")
