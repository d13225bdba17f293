"""
The short view of an explanation, which fits a screen: the decision, the runner-up and why it lost, and one line for
each other candidate.

Each device has `MOST_LINES` at most. Where everything does not fit, groups of layers are written in fewer lines, then
candidates of one backend with the same reason share a line, and what is left is counted.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final, NamedTuple

from attrs import evolve

from attnplug.cli.explain.fixes import steps_of
from attnplug.cli.explain.request import ONE_LAYER
from attnplug.commands import STYLES, abbreviated, escaped, shortened, width, wrapped
from attnplug.negotiation.candidate import CACHE_TERMS
from attnplug.negotiation.ranking import why_ahead
from attnplug.negotiation.reason import most_important
from attnplug.selection.explanation import assigned, not_verified, terms_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from attnplug.cli.explain.result import LayerGroup, Result
    from attnplug.negotiation.reason import Fix
    from attnplug.negotiation.verdict import Verdict
    from attnplug.request.device import Device
    from attnplug.selection.explanation import Explanation

MOST_LINES: Final = 25
"""Lines of one device at most."""

_LEAST_REST: Final = 10  # lines that the decisions of many groups leave to everything else
_WIDEST_ID: Final = 30
_LEAST_TEXT: Final = 24  # columns that an id leaves to its reason
_GAP: Final = "  "
_MOST_FIXES: Final = 3
_ORDER: Final = ("eligible", "missing_dependency", "refused", "broken")

Line = tuple["str | tuple[str, str]", ...]


class Row(NamedTuple):
    """What one line says of a candidate, or of several of one backend."""

    id: str  # backend/variant, or backend/{variant,variant}
    status: str
    texts: tuple[str, ...]  # why it is not chosen, the longest first: the first that fits is shown


def short_lines(result: Result, own: Device, *, matrix: bool = False) -> list[Line]:
    """
    Return the lines for one device.

    Args:
        result: The result for it.
        own: This machine's device.
        matrix: Whether a matrix shows the other candidates, so that they have no lines here.
    """
    head, rows = _head(result, own), _rows(result) if not matrix else []
    tail = _tail(result, head, matrix=matrix)
    space = MOST_LINES - len(head) - len(tail) - (3 if rows else 1)  # less the heading of the rows and blank lines
    title: list[Line] = [(), (("not chosen:", "dim"),)] if rows else []
    return [*head, *title, *_fitted(rows, space), *([()] if tail else []), *tail]


# The decision of each group of layers


def _head(result: Result, own: Device) -> list[Line]:
    groups, explanation, device = result.groups, result.groups[0].explanation, result.device
    mine = (device.type, device.vendor, device.compute_capability, device.arch or own.arch)
    here = "this machine" if mine == (own.type, own.vendor, own.compute_capability, own.arch) else "not this machine"
    assumed = ", kernel libraries assumed installed" if explanation.assumed_installed else ""
    first = _indented("device: ", f"{device}, {here}{assumed}")
    for name, origin in explanation.origins:
        first += _indented("set: ", f"{name}={getattr(explanation.requirements, name)} by {origin}")
    if explanation.listed:
        # What `auto` would add for any group of layers.
        added = tuple(dict.fromkeys(id_ for group in groups for id_ in group.explanation.with_auto))
        permitted = evolve(explanation, with_auto=added).permitted
        first += _indented("permitted: ", permitted.replace("'auto'", "--backend auto"))
    plan = [*_plan(result), *(line for text in prefill_lines(result.prefills) for line in _indented(*text))]
    most = MOST_LINES - _LEAST_REST - len(first) - len(plan)
    two_each, one_each = [line for group in groups for line in _two_lines(group)], [*map(_one_line, groups)]
    for lines in (_in_full(groups), two_each, one_each):
        if len(lines) <= most:
            return [*first, *lines, *plan]
    return [*first, *one_each[: most - 1], (f"and {len(groups) - most + 1} more groups of layers",), *plan]


def _in_full(groups: Sequence[LayerGroup]) -> list[Line]:
    """Return what each group requests and its decision, which is written once for groups that follow each other."""
    lines: list[Line] = []
    decisions = [*map(_decision, groups), None]
    for group, decision, following in zip(groups, decisions, decisions[1:], strict=False):
        requested = assigned(group.explanation.requirements.to_dict())
        if group.layers == (ONE_LAYER,):
            lines += _indented("requested: ", requested)
        else:
            lines += [(line,) for line in wrapped(f"{abbreviated(group.layers)}: {requested}")]
        lines += decision or [] if decision != following else []
    return lines


def _decision(group: LayerGroup) -> list[Line]:
    explanation, indent = group.explanation, "" if group.layers == (ONE_LAYER,) else "  "
    chosen = explanation.chosen
    lines = [_chosen(explanation, indent)]
    if chosen is None:
        return lines
    if not indent:
        lines += [(line,) for text in terms_of(chosen.agreement) for line in wrapped(text, "  ")]
    verdict = next(verdict for verdict in explanation.verdicts if verdict.id == chosen.id)
    lines += [
        (line,)
        for text in (*explanation.measurement(), *explanation.to_install())
        for line in wrapped(text, f"{indent}  ")
    ]
    costs = [verdict.level_cost] if verdict.level_cost else []
    costs += [f"{name}: {text} (slower)" for name, text in verdict.emulated.items()]
    costs += [f"{not_verified(each)}: {_and_more(verdict.unverified)}" for each in verdict.unverified[:1]]
    lines += [(shortened(f"{indent}  {text}", width()),) for text in costs]
    return [*lines, *_indented(f"{indent}runner-up: ", _runner_up(explanation))]


def _two_lines(group: LayerGroup) -> list[Line]:
    requested = assigned(group.explanation.requirements.to_dict())
    chosen = _chosen(group.explanation, "  ")
    room = width() - sum(len(part if isinstance(part, str) else part[0]) for part in chosen)
    heading = shortened(f"{abbreviated(group.layers)}: {requested}", width())
    return [(heading,), (*chosen, shortened(f"; runner-up: {_runner_up(group.explanation)}", room))]


def _one_line(group: LayerGroup) -> Line:
    chosen = group.explanation.chosen
    decided = chosen.id if chosen else "none"
    layers = shortened(abbreviated(group.layers), width() - len(decided) - 2)
    return (f"{layers}  ", (decided, STYLES["chosen" if chosen else "broken"]))


def _chosen(explanation: Explanation, indent: str) -> Line:
    chosen = explanation.chosen
    if chosen is None:
        return (f"{indent}", ("chosen: ", "dim"), ("none", STYLES["broken"]))
    room = width() - len(f"{indent}chosen: {chosen.id}")
    decided = shortened(f" ({why_ahead(chosen.decided_by)})", room) if chosen.decided_by else ""
    return (f"{indent}", ("chosen: ", "dim"), (chosen.id, STYLES["chosen"]), decided)


def _runner_up(explanation: Explanation) -> str:
    """Return the runner-up and why it lost."""
    runner_up = explanation.runner_up
    if runner_up is None:
        which = "permitted" if explanation.listed else "installed"
        return f"none; no other {which} candidate can serve this" if explanation.chosen else "none"
    tie = f"; settle it with --backend {runner_up.id} --backend auto" if explanation.tie else ""
    return f"{runner_up.id}: {explanation.why_runner_up}{tie}"


def _plan(result: Result) -> list[Line]:
    """Return the common terms of a model, or why it has none."""
    if result.plan is None:
        if result.failure is None or not all(group.explanation.chosen for group in result.groups):
            return []
        failure = str(result.failure).splitlines()[:3]  # what the groups, each served by itself, do not share
        return [(("plan: ", "dim"), "none"), *((shortened(f"  {line.strip()}", width()),) for line in failure)]
    found = result.plan
    levels = {group.selection.agreement.cudagraph for group in found.groups}
    weakest = f"; limited by {found.weakest.selection.id}" if len(levels) > 1 else ""
    return _indented(
        "plan: ", f"{assigned({name: getattr(found, name) for name in (*CACHE_TERMS, 'cudagraph')})}{weakest}"
    )


def prefill_lines(groups: Sequence[LayerGroup]) -> Iterator[tuple[str, str]]:
    """Yield a label, and which backend runs each kind of uncompressed prefill with the reason."""
    for group in groups:
        explanation, wanted = group.explanation, group.explanation.requirements
        heads = f"{wanted.num_q_heads} heads of {wanted.head_size}, values of {wanted.head_size_v}"
        chosen = f"{explanation.chosen.id}; runner-up" if explanation.chosen else "none"
        why = _runner_up(explanation) if explanation.chosen else _why_none(explanation)
        yield f"uncompressed prefill ({heads}): ", f"{chosen}: {why}"


def _why_none(explanation: Explanation) -> str:
    """Return the reason of the first candidate that was named, or is installed, and the number of the others."""
    installed = [verdict for verdict in explanation.verdicts if verdict.status != "absent"]
    first, *others = [verdict for verdict in installed if verdict.id in explanation.named] or installed
    more = f" (and {len(others)} more)" if others else ""
    return f"{first.id}: {_why(first, explanation)[-1]}{more}"


# The other candidates


def _rows(result: Result) -> list[Row]:
    """Return a row for each installed candidate that is neither chosen nor the runner-up of any group of layers."""
    explanations = [group.explanation for group in result.groups]
    shown = {verdict.id for each in explanations for verdict in each.verdicts if verdict.status == "chosen"}
    shown |= {each.runner_up.id for each in explanations if each.runner_up}
    by_id: dict[str, list[tuple[LayerGroup, Verdict]]] = {}
    for group in result.groups:
        for verdict in group.explanation.verdicts:
            if verdict.id not in shown and verdict.status != "absent":
                by_id.setdefault(verdict.id, []).append((group, verdict))
    rows = [_row(id_, found) for id_, found in by_id.items()]
    named = explanations[0].named  # these come first: the user wants to know about them
    return sorted(rows, key=lambda row: (row.id not in named, _ORDER.index(row.status)))


def _row(id_: str, found: Sequence[tuple[LayerGroup, Verdict]]) -> Row:
    """Return the row of a candidate: what it says of all groups of layers, or of the first that it cannot serve."""
    group, verdict = max(found, key=lambda each: _ORDER.index(each[1].status))
    texts = _why(verdict, group.explanation)
    serves_some = any(other.status == "eligible" for _, other in found) and verdict.status != "eligible"
    return Row(id_, verdict.status, tuple(f"{abbreviated(group.layers)}: {t}" for t in texts) if serves_some else texts)


def _why(verdict: Verdict, explanation: Explanation) -> tuple[str, ...]:
    if verdict.status == "eligible":
        if verdict.id in explanation.with_auto:
            return ("could serve too, but is not permitted",)
        if verdict.emulated:
            return (f"could serve too; {'; '.join(verdict.emulated.values())} (slower)", "could serve too, but slower")
        return ("could serve too",)
    reason = most_important(verdict.reasons)
    if reason is None:
        return (verdict.status.replace("_", " "),)
    if verdict.status == "missing_dependency":
        texts = [f"missing: {', '.join(each.field for each in verdict.reasons)}"]
        steps = tuple(steps_of(verdict.fix)) if verdict.fix is not None else ()
        if len(steps) == 1 and steps[0].startswith("pip install "):  # a command is shown whole, or not at all
            texts.insert(0, f"missing: {steps[0].partition('  # ')[0]}")
        return tuple(texts)
    return tuple(dict.fromkeys((_and_more((reason, *verdict.reasons[1:])), str(reason))))


def _and_more(texts: Sequence[object]) -> str:
    """Return the first text, with the number of the others before what it explains."""
    claim, colon, because = str(texts[0]).partition(": ")
    others = f" (and {len(texts) - 1} more)" if len(texts) > 1 else ""
    return f"{claim}{others}{colon}{because}"


def _fitted(rows: Sequence[Row], most: int) -> Iterator[Line]:
    """Yield no more than so many lines: a row each, or rows of one backend with the same text together."""
    if len(rows) > most:
        rows = _together(rows)
    left = len(rows) - most + 1 if len(rows) > most else 0
    rows = rows[: len(rows) - left]
    longest = min(max((len(escaped(row.id)) for row in rows), default=0), _WIDEST_ID)
    for row in rows:
        name = shortened(escaped(row.id), width() - len(_GAP) * 2 - _LEAST_TEXT)
        room = width() - len(_GAP) * 2 - max(len(name), longest)
        text = next((text for text in row.texts if len(escaped(text)) <= room), shortened(row.texts[-1], room))
        yield _GAP, (f"{name:<{longest}}", STYLES[row.status]), f"{_GAP}{text}"
    if left:
        yield (f"  and {left} more",)


def _together(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with those of one backend that say the same, but for the number of reasons, as one row."""
    found: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row.id.partition("/")[0], row.status, row.texts[-1]), []).append(row)
    sizes = Counter(row.id.partition("/")[0] for row in rows)
    return [
        same[0] if len(same) == 1 else _merged(backend, same, is_all=len(same) == sizes[backend])
        for (backend, _, _), same in found.items()
    ]


def _merged(backend: str, rows: Sequence[Row], *, is_all: bool) -> Row:
    variants = "*" if is_all else f"{{{','.join(row.id.partition('/')[2] for row in rows)}}}"
    texts = tuple(text for text in rows[0].texts if all(text in row.texts for row in rows))
    return Row(f"{backend}/{variants}", rows[0].status, texts)


# What helps: fixes where nothing can serve, what is not installed, and the other views


def _tail(result: Result, head: Sequence[Line], *, matrix: bool) -> list[Line]:
    most = max(MOST_LINES - len(head) - _LEAST_REST, 4)
    lines: list[Line] = [(line,) for line in _fixes(result)[:most]]
    verdicts = result.groups[0].explanation.verdicts
    absent = [verdict.id for verdict in verdicts if verdict.status == "absent"]
    if absent and not matrix:
        lines.append((shortened(f"not considered, not installed: {', '.join(absent)} (may serve better)", width()),))
        lines += [(command,) for command in _commands(verdicts) if len(command) <= width()]
    if matrix:
        return lines
    missing = any(verdict.status == "missing_dependency" for verdict in verdicts)
    more = _more(assumed=result.groups[0].explanation.assumed_installed, missing=missing)
    return [*lines, (shortened(more, width()),)]


def _commands(verdicts: Iterable[Verdict]) -> Iterator[str]:
    """Yield the command that lets absent plugins take part: their kernel libraries are not needed to be asked."""
    start = "pip install "
    steps = [step for verdict in verdicts if verdict.status == "absent" and verdict.fix for step in verdict.fix.steps()]
    names = [step.removeprefix(start) for step in steps if step.startswith(start)]
    if len(names) == len(steps):
        yield f"  pip install --no-deps {' '.join(names)}"


def _more(*, assumed: bool, missing: bool) -> str:
    """Return the options for other views, explained where the terminal is wide enough."""
    supposed = "--assume-installed, " if missing and not assumed else ""
    short = f"more: --all (reasons and fixes), --matrix, {supposed}--device NAME"
    told = f"{short}; what to install: without --assume-installed"
    if not assumed:
        views = "--all (every reason and fix), --matrix (devices side by side)"
        told = f"more: {views}, {supposed}--device NAME (another device)"
    return told if len(told) <= width() else short


def _fixes(result: Result) -> list[str]:
    """Return the shortest fixes of the first group of layers that nothing can serve, as commands and options."""
    unserved = next((group.explanation for group in result.groups if group.explanation.chosen is None), None)
    if unserved is None:
        return []
    fixable = sorted(unserved.fixable(), key=lambda each: _size(each[1]))
    permits_more = unserved.with_auto or (unserved.is_strict and not fixable)
    lines = ["fix: permit others with --backend auto"] if permits_more else []
    most = _MOST_FIXES if any(fix.device is None for _, fix in fixable) else 1  # one other device is enough
    for verdict, fix in fixable[: most - len(lines)]:
        head, steps = f"fix for {verdict.id}:", tuple(steps_of(fix))
        one = escaped(f"{head} {steps[0]}")
        # A line for each step, unless all is one: a command is never broken within an argument.
        fits = len(steps) == 1 and len(one) <= width()
        lines += [one] if fits else [escaped(head), *(line for step in steps for line in wrapped(step, "  "))]
    return lines or ["no fix: no installed candidate supports these fields of the model on any device"]


def _size(fix: Fix) -> int:
    return len(fix.engine) + len(fix.install) + 2 * bool(fix.action)


def _indented(label: str, text: str) -> list[Line]:
    """Return a labeled sentence as lines, the label dim."""
    stripped = label.lstrip()
    first, *others = wrapped(f"{stripped}{text}", " " * (len(label) - len(stripped)))
    start = first.index(stripped.rstrip()) + len(stripped.rstrip())
    return [((first[:start], "dim"), first[start:]), *((line,) for line in others)]


def joined(blocks: Iterable[list[Line]]) -> list[Line]:
    """Return the lines of several devices, with a blank line between them."""
    return [line for index, block in enumerate(blocks) for line in ([(), *block] if index else block)]
