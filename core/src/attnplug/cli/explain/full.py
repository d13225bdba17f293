"""Everything that an explanation has: every candidate, or those with some verdicts, with all reasons and the fix."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnplug.cli.explain.fixes import steps_of
from attnplug.cli.explain.request import ONE_LAYER
from attnplug.commands import STYLES, abbreviated, wrapped
from attnplug.negotiation.candidate import CACHE_TERMS
from attnplug.negotiation.ranking import why_ahead
from attnplug.selection.explanation import NOT_INSTALLED, assigned, lines_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from attnplug.cli.explain.result import LayerGroup, Result
    from attnplug.cli.explain.short import Line
    from attnplug.negotiation.verdict import Verdict

_INDENT: Final = "    "


def full_lines(result: Result, statuses: Collection[str] = ()) -> Iterator[Line]:
    """
    Yield everything about one device.

    Args:
        result: The result for it.
        statuses: The verdicts to show; empty for all of them, with the plan of a model.
    """
    for group in result.groups:
        yield from _group(group, statuses)
        yield ()
    for group in result.prefills:
        yield from ((line,) for line in wrapped("uncompressed prefill, where the engine expands latents"))
        yield from _group(group, statuses)
        yield ()
    if not statuses and (result.plan is not None or result.failure is not None):
        yield from ((line,) for line in _plan(result))
        yield ()


def _group(group: LayerGroup, statuses: Collection[str]) -> Iterator[Line]:
    explanation = group.explanation
    if group.layers != (ONE_LAYER,):
        yield from ((line,) for line in wrapped(abbreviated(group.layers)))
    yield from _labeled("requested", assigned(explanation.requirements.to_dict()))
    assumed = ", kernel libraries assumed installed" if explanation.assumed_installed else ""
    yield from _labeled("device", f"{explanation.device}{assumed}")
    for name, origin in explanation.origins:
        yield from _labeled("set", f"{name}={getattr(explanation.requirements, name)} by {origin}")
    if explanation.listed:
        yield from _labeled("permitted", explanation.permitted)
    chosen = explanation.chosen
    decided = f" ({why_ahead(chosen.decided_by)})" if chosen and chosen.decided_by else ""
    name, style = (chosen.id, STYLES["chosen"]) if chosen else ("none", STYLES["broken"])
    yield ("chosen: ", "dim"), (name, style), decided
    yield from ((line,) for text in explanation.to_install() for line in wrapped(text, _INDENT))
    shown = [verdict for verdict in explanation.verdicts if not statuses or verdict.status in statuses]
    for verdict in shown:
        if verdict.status != "absent":
            yield ()
            yield from _verdict(verdict)
    absent = [verdict for verdict in shown if verdict.status == "absent"]
    if absent:
        yield ()
        yield ((f"{NOT_INSTALLED}:", "dim"),)
        longest = max(len(verdict.id) for verdict in absent)
        for verdict in absent:
            yield from ((line,) for line in wrapped(f"{verdict.id:<{longest}}  {verdict.fix}", _INDENT))
    if explanation.tie and not statuses:
        yield ()
        yield from ((line,) for line in wrapped(explanation.tie))


def _labeled(label: str, text: str) -> Iterator[Line]:
    first, *others = wrapped(f"{label}: {text}")
    yield (f"{label}:", "dim"), first.removeprefix(f"{label}:")
    yield from ((line,) for line in others)


def _verdict(verdict: Verdict) -> Iterator[Line]:
    heading, *lines = lines_of(verdict, steps_of)
    rest = heading.removeprefix(f"{verdict.id}  {verdict.status}")
    yield (verdict.id, "bold"), "  ", (verdict.status.replace("_", " "), STYLES[verdict.status]), (rest, "dim")
    for line in lines:
        is_fix = line.lstrip().startswith("fix: ")
        yield (line[: len(line) - len(line.lstrip())], ("fix:", "green"), line.lstrip()[4:]) if is_fix else (line,)


def _plan(result: Result) -> Iterator[str]:
    """Yield the common terms of a model, or why it has none."""
    if result.plan is None:
        yield f"plan on {result.device}: none"
        # Where each group can be served by itself, the error says what they do not share.
        failure = str(result.failure).splitlines()
        told = failure if all(group.explanation.chosen for group in result.groups) else failure[:1]
        for line in told:
            yield from wrapped(line.lstrip(), " " * (len(line) - len(line.lstrip())))
        return
    found = result.plan
    terms = assigned({name: getattr(found, name) for name in (*CACHE_TERMS, "cudagraph")})
    yield from wrapped(f"plan on {result.device}: {terms}")
    if len({group.selection.agreement.cudagraph for group in found.groups}) > 1:
        yield f"    cudagraph is limited by {found.weakest.selection.id}"
    for group in found.groups:
        yield from wrapped(f"{group.selection.id}  {abbreviated(group.layers)}", _INDENT)
