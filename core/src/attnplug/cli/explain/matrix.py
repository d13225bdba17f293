"""The matrix of an explanation: a line for each candidate, a column for each device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attnplug.cli.explain.fixes import device_text
from attnplug.cli.explain.request import ONE_LAYER
from attnplug.commands import STYLES, abbreviated, escaped, shortened, width, wrapped
from attnplug.negotiation.reason import most_important
from attnplug.request.fields import FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnplug.cli.explain.result import Result
    from attnplug.cli.explain.short import Line
    from attnplug.negotiation.verdict import Verdict

COMMON_DEVICES: Final = ("cuda:8.0", "cuda:9.0", "cuda:10.0")
"""The devices beside this machine's where none is named: A100, H100 and B200."""

_WORDS: Final = {"missing_dependency": "missing"}
_UNVERIFIED: Final = "? not verified: no run of the conformance kit covers all of it on such a device"
_GAP: Final = "  "


def matrix_lines(results: Sequence[Result]) -> Iterator[Line]:
    """Yield the matrix for each group of layers. Devices that do not fit beside the others follow in another one."""
    for index, group in enumerate(results[0].groups):
        if index:
            yield ()
        if group.layers != (ONE_LAYER,):
            yield from ((line,) for line in wrapped(abbreviated(group.layers)))
        yield from _grid(results, index)
    if any(v.unverified for each in results for group in each.groups for v in group.explanation.verdicts):
        yield ()
        yield from ((line,) for line in wrapped(_UNVERIFIED))


def _grid(results: Sequence[Result], index: int) -> Iterator[Line]:
    columns = [{verdict.id: verdict for verdict in each.groups[index].explanation.verdicts} for each in results]
    ids = sorted(id_ for id_, verdict in columns[0].items() if verdict.status != "absent")
    names = [escaped(id_) for id_ in ids]
    longest = max(map(len, ["candidate", *names]))
    heads = [device_text(result.device) for result in results]
    cells = [[_brief(column[id_]) for id_ in ids] for column in columns]
    widths = [max(map(len, [head, *texts])) for head, texts in zip(heads, cells, strict=True)]
    for number, part in enumerate(_parts(widths, width() - longest)):
        if number:
            yield ()
        yield (f"{'candidate':<{longest}}{''.join(f'{_GAP}{heads[i]:<{widths[i]}}' for i in part)}".rstrip(),)
        for row, (id_, name) in enumerate(zip(ids, names, strict=True)):
            found = [(f"{_GAP}{cells[i][row]:<{widths[i]}}", STYLES[columns[i][id_].status]) for i in part]
            last = (found[-1][0].rstrip(), found[-1][1])
            yield (f"{name:<{longest}}", *found[:-1], last)


def _parts(widths: Sequence[int], room: int) -> list[list[int]]:
    """Return the places of the columns that fit beside each other, as many as fit in each part."""
    parts: list[list[int]] = [[]]
    used = 0
    for place, size in enumerate(widths):
        if parts[-1] and used + size + len(_GAP) > room:
            parts.append([])
            used = 0
        parts[-1].append(place)
        used += size + len(_GAP)
    return parts


def _brief(verdict: Verdict) -> str:
    """Return a verdict in a word or two: its status, or the field that refuses it; with ``?`` what no run verifies."""
    reason = most_important(verdict.reasons)
    if verdict.status == "refused" and reason is not None:
        field = FIELDS.get(reason.field)
        return shortened(f"no: {'device' if field and field.kind == 'device' else reason.field}", 24)
    return f"{_WORDS.get(verdict.status, verdict.status)}{'?' if verdict.unverified else ''}"
