"""
The pages: the report, which needs no other file, and the matrix alone, for the documentation.

Texts of plugins and of evidence are escaped twice: what is not printable, then what means something in HTML. The same
input gives the same bytes.
"""

from __future__ import annotations

import json
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from attnplug.commands import escaped, readable
from attnplug.negotiation import Fix
from attnplug_kit.report.matrix import STATUSES
from attnplug_kit.report.times import charts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from attnplug.negotiation import Candidate
    from attnplug_kit.report import Report
    from attnplug_kit.report.decisions import Decision
    from attnplug_kit.report.matrix import Matrix
    from attnplug_kit.report.times import Timed

_MATRIX: Final = "<!-- matrix: the part that the documentation shows, too -->\n"
_ROW: Final = 24
"""Height of a bar with its text, in pixels."""

Cell = str | tuple[str, ...]
"""HTML, or lines of it."""


def matrix_fragment(data: Mapping[str, Any]) -> str:
    """Return the matrix with its filters and its kit runs, as HTML for the body of a page."""
    return _template()[1].replace("{{data}}", _json(data)) + _part(_runs(data["runs"]))


def report_page(report: Report) -> str:
    """Return the whole report."""
    data = report.matrix.to_dict()
    parts = {
        "Backends": _part(_backends(report)),
        "Can I use": "<p>Of each feature the plainest request that a variant serves, as if all that it requires were "
        f"installed.</p>\n{matrix_fragment(data)}",
        "Models": _part(_models(report.decisions)),
        "Times": _part(_times(report.times)),
        "Not verified": _part(_unverified(report)),
    }
    links = "".join(f'<a href="#{_id(title)}">{title}</a>' for title in parts)
    sections = "\n".join(f'<h2 id="{_id(title)}">{title}</h2>\n{text}' for title, text in parts.items())
    facts = "".join(f"<li>{_text(name)}: {_text(value)}</li>" for name, value in report.facts.items())
    body = f"<h1>attnplug report</h1>\n<ul>{facts}</ul>\n<nav>{links}</nav>\n{sections}"
    return _template()[0].replace("{{report}}", body)


def _template() -> tuple[str, str]:
    text = (files("attnplug_kit.report") / "page.html").read_text("utf-8")
    shell, _, matrix = text.partition(_MATRIX)
    return shell, matrix


def _json(data: Mapping[str, Any]) -> str:
    """Return JSON that ends no script, whatever the texts of plugins are."""
    text = json.dumps(_escaped(data), separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _escaped(data: Any) -> Any:
    if isinstance(data, str):
        return escaped(data)
    if isinstance(data, dict):
        return {escaped(name): _escaped(value) for name, value in data.items()}
    return [_escaped(each) for each in data] if isinstance(data, (list, tuple)) else data


def _text(value: str) -> str:
    return escape(escaped(value))


def _id(title: str) -> str:
    return title.lower().replace(" ", "-")


def _part(html: str) -> str:
    return f'<div class="attnplug-part">\n{html}\n</div>\n'


def _table(heads: Sequence[str], rows: Iterable[tuple[str, Sequence[Cell]]]) -> str:
    """Return a table; on a phone each row is a card. Each row has an id, which may be empty, and its cells."""
    head = "".join(f'<th scope="col">{_text(each)}</th>' for each in heads)
    body = "\n".join(_row(heads, name, cells) for name, cells in rows)
    return f'<table class="attnplug-table"><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>'


def _row(heads: Sequence[str], name: str, cells: Sequence[Cell]) -> str:
    first, *rest = (each if isinstance(each, str) else "<br>".join(each) for each in cells)
    tagged = (f'<td data-head="{_text(head)}">{cell}</td>' for head, cell in zip(heads[1:], rest, strict=True))
    own = f' id="{_text(name)}"' if name else ""
    return f'<tr{own}><th scope="row">{first}</th>{"".join(tagged)}</tr>'


def _status(name: str, words: str = "") -> str:
    symbol, text = STATUSES[name]  # type: ignore[index]  # a name of this page
    return f'<span class="{name}">{symbol} {_text(words or text)}</span>'


# The parts


def _runs(runs: Sequence[Mapping[str, str]]) -> str:
    if not runs:
        return "<h3>Kit runs</h3><p>None is known: <code>attnplug check --evidence</code> makes one.</p>"
    heads = ("variant", "device", "distribution", "versions", "tests", "more")
    names = ("device", "distribution", "versions", "tests")
    rows = (
        (run["anchor"], [_text(run["id"]), *(_text(run.get(name, "")) for name in names), _more_of(run)])
        for run in runs
    )
    return f"<h3>Kit runs</h3>\n{_table(heads, rows)}"


def _more_of(run: Mapping[str, str]) -> str:
    errors = [f"largest errors of outputs: {_text(run['errors'])}"] if "errors" in run else []
    command = [_code(run["command"])] if "command" in run else []
    lines = "<br>".join([*errors, *command])
    return f"<details><summary>errors, command</summary><small>{lines}</small></details>" if lines else ""


def _code(text: str) -> str:
    return f"<code>{_text(text)}</code>" if text else ""


def _backends(report: Report) -> str:
    heads = ("variant", "status", "distribution", "summary", "missing", "kit runs")
    ran: dict[str, list[str]] = {}
    for run in report.matrix.runs:
        link = f'<a href="#{_text(run.anchor)}">{_text(run.device)}</a>'
        ran.setdefault(run.evidence.id, []).append(link)
    return _table(heads, (("", _backend(each, report, ran.get(each.id, []))) for each in report.candidates))


def _backend(candidate: Candidate, report: Report, ran: Sequence[str]) -> list[Cell]:
    facts = [(name, value) for name, value in report.device.facts().items() if value is not None]
    reasons = [*candidate.reasons, *(candidate.objections(facts) if candidate.variant else ())]
    is_elsewhere = candidate.variant is not None and len(reasons) > len(candidate.reasons)
    status = "other device" if is_elsewhere else readable(candidate.availability)
    mark = "run" if status == "ready" else "refused" if status in ("broken", "refused") else "declared"
    fix = () if candidate.availability == "ready" else Fix(install=candidate.install, action=candidate.fix).steps()
    variant, manifest = candidate.variant, candidate.manifest
    summary = (variant.summary if variant else "") or (manifest.summary if manifest else "")
    missing = (*map(_text, map(str, reasons)), *map(_code, fix))
    return [
        _text(candidate.id),
        _status(mark, status),
        _text(candidate.distribution),
        _text(summary),
        missing,
        tuple(ran),
    ]


def _models(decisions: Sequence[Decision]) -> str:
    devices = list(dict.fromkeys(each.device for each in decisions))
    models = list(dict.fromkeys(each.model for each in decisions))
    found = {(each.model, each.device): each for each in decisions}
    rows = [(model, [tuple(_decided(found[model, device])) for device in devices]) for model in models]
    note = "Decided for all layers of a model together. Not verified: a part of the request that no kit run covers."
    return f"<p>{note}</p>\n{_table(('model', *devices), (('', [_text(model), *cells]) for model, cells in rows))}"


def _decided(decision: Decision) -> Iterator[str]:
    if not decision.ids:
        yield _status("refused", "none")
        yield f'<small class="soft">{_text(decision.failure)}</small>'
        return
    yield from (f"<strong>{_text(each)}</strong>" for each in decision.ids)
    yield _status("declared", "not verified") if decision.unverified else _status("run", "verified")
    notes = [*decision.because, *decision.unverified]
    if notes:
        lines = "<br>".join(map(_text, notes))
        yield f'<details><summary>why</summary><small class="soft">{lines}</small></details>'


def _times(times: Sequence[Timed]) -> str:
    if not times:
        return (
            "<p>Nothing is measured: no profile is set. <code>attnplug tune CONFIG</code> measures the candidates of "
            "a model on this machine, and later selections and reports read its times.</p>"
        )
    return "\n".join(_chart(what, group) for what, group in charts(times).items())


def _chart(what: str, group: Sequence[Timed]) -> str:
    """Return bars as long as the times. Texts have the size of the page, whatever its width."""
    longest = max(each.microseconds for each in group)
    fastest = group[0] if len(group) > 1 else None
    bars = "".join(_bar(place, each, longest, is_first=each is fastest) for place, each in enumerate(group))
    sources = ", ".join(dict.fromkeys(_text(each.source) for each in group))
    label = ", ".join(f"{each.candidate} {_us(each)}" for each in group)
    return (
        f"<figure><figcaption>{_text(what)}</figcaption>"
        f'<svg role="img" aria-label="{_text(label)}" height="{2 * _ROW * len(group)}">{bars}</svg>'
        f'<small class="soft">source: {sources}</small></figure>'
    )


def _us(timed: Timed) -> str:
    number = timed.microseconds
    return f"{number:,.0f} us" if number >= 1000 else f"{number:.4g} us"


def _bar(place: int, timed: Timed, longest: float, *, is_first: bool) -> str:
    top = 2 * _ROW * place
    share = 100 * timed.microseconds / longest
    first = ' class="first"' if is_first else ""
    text = f"{_text(timed.candidate)}: {_us(timed)}{' (fastest)' if is_first else ''}"
    return (
        f'<text x="0" y="{top + 17}">{text}</text>'
        f'<rect{first} x="0" y="{top + _ROW}" width="{share:.2f}%" height="{_ROW - 10}" rx="3"/>'
    )


def _unverified(report: Report) -> str:
    """Return how much of each variant is verified on this device, and the command that verifies the rest."""
    matrix, device = report.matrix, report.own
    rows = [
        ("", _counts(matrix, each, device))
        for each in matrix.candidates
        if any(cell.status == "declared" for cell in matrix.cells[each.id, device])
    ]
    if not rows:
        return f"<p>Each served feature of the matrix is verified on {_text(device)}.</p>"
    heads = ("variant", "run", "not run", "features that no run covers", "verify it")
    return f"<p>On {_text(device)}, of the features of the matrix:</p>\n{_table(heads, rows)}"


def _counts(matrix: Matrix, candidate: Candidate, device: str) -> list[Cell]:
    cells = matrix.cells[candidate.id, device]
    ran = sum(cell.status == "run" for cell in cells)
    rest = [each.label for each, cell in zip(matrix.features, cells, strict=True) if cell.status == "declared"]
    names = ", ".join(rest) if ran else "all: no run on such a device is known for this version"
    command = _code(f"attnplug check --evidence {candidate.id}")
    return [_text(candidate.id), _status("run", str(ran)), _status("declared", str(len(rest))), _text(names), command]
