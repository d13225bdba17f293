"""From a grid to files: what is there already is left out, each measured cell is written at once, time is bounded."""

from __future__ import annotations

import os
import re
from concurrent.futures import BrokenExecutor
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from attrs import evolve, field, frozen

import attnplug
from attnplug.commands import NO, OK, complain, say, say_json, tracked, wrapped
from attnplug.errors import RequestError
from attnplug.evidence import (
    bucket_of,
    content_hash,
    current_versions,
    dump_entries,
    entry_name,
    merged,
    parse_entries,
    relative_times,
)
from attnplug.request import PREFIX, names_of_pair
from attnplug_kit.tune.deciding import differences, pair_gain, proposals, winner
from attnplug_kit.tune.grid import DEFAULT_BATCHES, described, estimated_seconds, make_grid

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from attnplug.evidence import ProfileEntry
    from attnplug.request import Requirements
    from attnplug_kit.tune.deciding import Proposal
    from attnplug_kit.tune.grid import Cell
    from attnplug_kit.tune.measuring import Clocks, Tuner

_MOST_PAIRS = 4  # of a layer: where the best is refused, the next best is tried
_PATH = re.compile(r"(?<![\w.])/[\w.+-]+/[^\s'\",;:]*")
_NO_TIME = "there was no time to measure it: the same command goes on with it"
_SHOWN_COMPILE_S = 5.0  # a candidate that takes longer until its first result is listed
_JOBS = {"cuda": 8, "cpu": 0}


@frozen
class Order:
    """
    What to measure, and where to.

    Attributes:
        layers: The layers; none to merge and export alone.
        folder: The folder of the entries.
        cells: What to measure in place of layers and batches, of a recording.
        batch: The batches; None for those of the device.
        backend: The backends; None for all.
        device: ``cpu`` or ``cuda``; None for this machine's.
        seconds: No cell is begun after so many seconds, compiling ahead apart; None without a limit.
        jobs: Processes that compile ahead; None for the usual ones of the device, 0 for none.
        again: Whether cells that are in the folder are measured again.
        dry_run: Whether the grid alone is shown.
        json: Whether to print JSON.
        merge: Files whose entries are added first.
        export: The file of all entries at the end.
        clocks: The clocks, of tests.
    """

    layers: tuple[Requirements, ...]
    folder: Path
    cells: tuple[Cell, ...] = ()
    batch: Sequence[str] | None = None
    backend: Sequence[str] | None = None
    device: str | None = None
    seconds: float | None = None
    jobs: int | None = None
    again: bool = False
    dry_run: bool = False
    json: bool = False
    merge: Sequence[str] | None = None
    export: str | None = None
    clocks: Clocks | None = field(default=None, eq=False)


@frozen(eq=False)
class TriedPair:
    """
    A routed pair of a layer, and what came of it.

    Attributes:
        layer: The layer.
        proposal: The pair, with its expected gain.
        problem: Why it has no times; else empty.
        is_wrong: Whether that is a wrong result.
        gain: Its measured advantage over the best single candidate: a part of its time, phases weighted.
        wins: Whether selections follow it.
    """

    layer: Requirements
    proposal: Proposal
    problem: str = ""
    is_wrong: bool = False
    gain: float = 0.0
    wins: bool = False

    def __str__(self) -> str:
        pair, best = self.proposal.pair, self.proposal.best
        expected = f"pair {pair}: {self.proposal.gain:.1%} less time than {best} is expected"
        if self.problem:
            return f"{expected}; not routed: {self.problem}"
        margin = "selections route to it" if self.wins else "within the margin: nothing is routed"
        return f"{expected}, {self.gain:.1%} measured; {margin}"


@frozen(eq=False)
class Tuned:
    """
    What came of an order.

    Attributes:
        entries: The measured entries.
        kept: The entries that were there already.
        unserved: Cells that no candidate serves rightly, with the reason, and whether one was rejected.
        left: Cells for which there was no time.
        pairs: The routed pairs that were proposed, and what came of them.
    """

    entries: tuple[ProfileEntry, ...] = ()
    kept: tuple[ProfileEntry, ...] = ()
    unserved: tuple[tuple[Cell, str, bool], ...] = ()
    left: tuple[Cell, ...] = ()
    pairs: tuple[TriedPair, ...] = ()


def run_order(order: Order) -> int:
    """
    Measure, write, and say what came of it.

    Raises:
        RequestError: The order is invalid, or a file cannot be read or written.
        DeviceError: The device is not on this machine.
    """
    if order.jobs is not None and order.jobs < 0:
        raise RequestError(f"--jobs {order.jobs} was given", "it is a number of processes", "write 0 for none")
    for name in order.backend or ():
        if names_of_pair(name) is not None:
            raise RequestError(
                f"--backend {name} was given",
                "it names one backend or candidate: a routed pair is measured where it is expected to gain",
                "repeat --backend for each of the two",
            )
    if order.seconds is not None and not order.seconds > 0:  # NaN too
        raise RequestError(f"--seconds {order.seconds:g} was given", "it is a positive number", "leave it out")
    for entry in merged(entry for file in order.merge or () for entry in _read(Path(file))):
        there = [each for each in _read_if_right(order.folder / entry.name) if each.name == entry.name]
        if merged((*there, entry)) == (entry,):
            write_entry(order.folder, entry)
    found = _measure(order) if order.layers or order.cells else Tuned()
    pinned = _export(order) if order.export and not order.dry_run else ""
    if order.json:
        say_json(_to_dict(found, pinned))
    else:
        _show(found, pinned)
    rejected = any(entry.rejected for entry in (*found.entries, *found.kept))
    wrong = any(each.is_wrong for each in found.pairs) or any(is_wrong for *_, is_wrong in found.unserved)
    left = found.left or any(each.problem == _NO_TIME for each in found.pairs)
    return NO if rejected or wrong or left else OK


def run_comparison(paths: Sequence[str], *, as_json: bool) -> int:
    """
    Say where two runs choose differently.

    Args:
        paths: The file or the folder of entries of each.
        as_json: Whether to print JSON.

    Returns:
        0 where every difference is one within the margin; else 1.

    Raises:
        RequestError: A file cannot be read, or the two have no measurement in common.
    """
    found, count = differences(*map(_read_all, map(Path, paths)))
    if not count:
        raise RequestError(
            f"--compare {' '.join(paths)} was given",
            "the two have measurements of the same layers and batches on the same device",
            "name two runs of one command",
        )
    beyond = [each for each in found if not each.is_margin]
    if as_json:
        rows = [{"what": each.what, "choices": list(each.choices), "margin": each.is_margin} for each in found]
        say_json({"measurements": count, "differences": rows})
        return NO if beyond else OK
    say(f"{count} measurements in both; {len(found)} choices differ, {len(found) - len(beyond)} within the margin")
    for each in found:
        note = "within the margin" if each.is_margin else "beyond the margin"
        say("\n".join(wrapped(f"{each.what}: {each.choices[0]} and {each.choices[1]}, {note}", "  ")))
    return NO if beyond else OK


@contextmanager
def without_profile() -> Iterator[None]:
    """Let no measured time count inside the ``with`` block: the default is what is chosen without one."""
    name = f"{PREFIX}PROFILE"
    before = os.environ.get(name)
    os.environ[name] = "off"
    attnplug.refresh()
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})
        attnplug.refresh()


def _measure(order: Order) -> Tuned:
    from attnplug_kit.bench import Target  # noqa: PLC0415 - imports torch
    from attnplug_kit.tune.measuring import Tuner  # noqa: PLC0415 - likewise

    device = Target(device=order.device).prepare()
    kind = "cpu" if device.type == "cpu" else "cuda"
    cells = order.cells or make_grid(order.layers, order.batch or DEFAULT_BATCHES[kind])
    with without_profile():
        tuner = Tuner(device, order.backend, order.clocks)
        ids = [tuner.candidates(cell) for cell in cells]
        if not order.json:
            _show_grid(cells, [len(each) for each in ids], tuner)
        if order.dry_run:
            return Tuned()
        with _new_file(order.folder):  # or else it is found when the first cell has been measured
            pass
        _compile(order, cells, tuner, _JOBS[kind] if order.jobs is None else order.jobs)
        return _run_cells(order, cells, tuner, perf_counter())


def _compile(order: Order, cells: Sequence[Cell], tuner: Tuner, jobs: int) -> None:
    """
    Compile what the cells that are not there yet need, in several processes.

    Nothing follows from a failure here: the candidate is judged, and named, where it is measured.
    """
    from attnplug_kit.tune.measuring import compile_one, compilers  # noqa: PLC0415 - imports torch

    new = [cell for cell in cells if order.again or _present(order.folder, cell, tuner) is None]
    pairs = dict.fromkeys((cell.request(), id_) for cell in new for id_ in tuner.candidates(cell))
    if not jobs or not pairs:
        return
    # Layers that differ in their numbers of heads often share kernels, which one process compiles while others wait:
    # first one of each kind.
    kinds = {(_without_heads(request), id_): (request, id_) for request, id_ in reversed(pairs)}
    wanted = dict.fromkeys((*reversed(kinds.values()), *pairs))
    begin, jobs = perf_counter(), min(jobs, len(wanted))
    try:
        with compilers(jobs) as pool:
            ends = [(id_, pool.submit(compile_one, request, tuner.device, id_)) for request, id_ in wanted]
            for _, end in tracked(ends, lambda each: f"compiling {each[0]}", shown=not order.json):
                end.result()
    except BrokenExecutor:  # a segmentation fault, or memory: the system ends the others of the pool too
        complain("attnplug: warning: a process that compiled ended: what is left compiles where it is measured")
    if not order.json:
        say(f"compiled ahead in {jobs} processes: {perf_counter() - begin:.0f} s")


def _without_heads(request: Requirements) -> str:
    return str({**request.to_dict(), "num_q_heads": None, "num_kv_heads": None})


def _run_cells(order: Order, cells: Sequence[Cell], tuner: Tuner, begin: float) -> Tuned:
    entries: dict[Cell, ProfileEntry] = {}
    kept: set[Cell] = set()
    unserved: list[tuple[Cell, str, bool]] = []
    left: list[Cell] = []
    pairs: dict[Requirements, list[TriedPair]] = {}
    for index, cell in enumerate(tracked(cells, lambda cell: f"measuring {cell}", shown=not order.json)):
        there = None if order.again else _present(order.folder, cell, tuner)
        if there is not None:
            entries[cell] = there
            kept.add(cell)
        elif _is_over(order, begin):
            left.append(cell)
        else:
            found = tuner.measure(cell, _pair_of(pairs.get(cell.layer, ())))
            if found.times:
                entries[cell] = tuner.entry(cell, found)
                write_entry(order.folder, entries[cell])
            else:
                reasons = "; ".join(f"{id_}: {reason}" for id_, reason in found.reasons.items())
                unserved.append((cell, reasons or "no candidate can serve it", bool(found.rejected)))
        # After each batch of all layers: a command that is interrupted has measured the pairs of the first batches.
        if index + 1 == len(cells) or cells[index + 1].step.what != cell.step.what:
            pairs = {
                layer: _run_pairs(order, layer, entries, tuner, begin, pairs.get(layer, ()))
                for layer in _layers(entries)
            }
    return Tuned(
        tuple(entry for cell, entry in entries.items() if cell not in kept),
        tuple(entry for cell, entry in entries.items() if cell in kept),
        tuple(unserved),
        tuple(left),
        tuple(each for tried in pairs.values() for each in tried),
    )


def _is_over(order: Order, begin: float) -> bool:
    return order.seconds is not None and perf_counter() - begin > order.seconds


def _layers(entries: Mapping[Cell, ProfileEntry]) -> tuple[Requirements, ...]:
    return tuple(dict.fromkeys(cell.layer for cell in entries))


def _pair_of(tried: Sequence[TriedPair]) -> str:
    """Return the pair that was measured in all batches so far; empty without one."""
    return next((each.proposal.pair for each in tried if not each.problem), "")


def _run_pairs(
    order: Order,
    layer: Requirements,
    entries: dict[Cell, ProfileEntry],
    tuner: Tuner,
    begin: float,
    before: Sequence[TriedPair] = (),
) -> list[TriedPair]:
    """
    Measure the routed pair of a layer whose decodes and other batches have different fastest candidates. Where one
    fails, the next best is tried, and that one not again.
    """
    found: list[TriedPair] = []
    own = [cell for cell in entries if cell.layer == layer]
    failed = {each.proposal.pair: each for each in before if each.problem not in ("", _NO_TIME)}
    for proposal in proposals(layer, [entries[cell] for cell in own])[:_MOST_PAIRS]:
        objection = tuner.objection(own[0], proposal.pair)
        if proposal.pair in failed:
            tried = evolve(failed[proposal.pair], proposal=proposal)
        elif objection:
            tried = TriedPair(layer, proposal, objection)
        else:
            tried = _run_pair(order, own, entries, proposal, tuner, begin)
        found.append(tried)
        if tried.problem in ("", _NO_TIME):
            break
    return found


def _run_pair(
    order: Order,
    own: Sequence[Cell],
    entries: dict[Cell, ProfileEntry],
    proposal: Proposal,
    tuner: Tuner,
    begin: float,
) -> TriedPair:
    """Measure a pair in all batches of a layer; their entries are replaced by those with its times."""
    layer, pair = own[0].layer, proposal.pair
    for cell in own:
        if _has_pair(entries[cell], proposal, tuner):
            continue
        if _is_over(order, begin):
            return TriedPair(layer, proposal, _NO_TIME)
        found = tuner.measure_pair(cell, proposal)
        if pair not in found.times:
            problem = found.reasons.get(pair, f"it cannot serve {cell.step.what}")
            return TriedPair(layer, proposal, problem, is_wrong=pair in found.rejected)
        entries[cell] = evolve(entries[cell], times={**entries[cell].times, **found.times})
        write_entry(order.folder, entries[cell])
    gain, wins = pair_gain(layer, [entries[cell] for cell in own], pair)
    return TriedPair(layer, proposal, gain=gain, wins=wins)


def _has_pair(entry: ProfileEntry, proposal: Proposal, tuner: Tuner) -> bool:
    time = entry.times.get(proposal.pair)
    return time is not None and time.libraries == tuner.libraries(proposal.pair)


def _present(folder: Path, cell: Cell, tuner: Tuner) -> ProfileEntry | None:
    """Return the entry of a cell that is in the folder, with all candidates in the versions that are installed."""
    versions = current_versions(tuner.device, attnplug.registry().version_of)
    place = bucket_of(cell.step.num_reqs), bucket_of(cell.kv_len)
    path = folder / entry_name(tuner.device, versions, cell.layer, cell.phase, *place)
    found = _read_if_right(path)
    if len(found) != 1:
        return None
    entry, ids = found[0], tuner.candidates(cell)
    there = {id_ for id_ in (*entry.times, *entry.rejected, *entry.refused) if names_of_pair(id_) is None}
    same = all(time.libraries == tuner.libraries(id_) for id_, time in entry.times.items() if id_ in ids)
    return entry if there == {*ids} and same else None


def write_entry(folder: Path, entry: ProfileEntry) -> None:
    """
    Write an entry as a whole: a reader sees the old file or the new one.

    Raises:
        RequestError: The folder cannot be written.
    """
    text = dump_entries([entry])
    with _new_file(folder) as path:
        path.write_text(text, encoding="utf-8")
        path.replace(folder / entry.name)


@contextmanager
def _new_file(folder: Path) -> Iterator[Path]:
    """
    Make a file in a folder, and remove it after the ``with`` block where it is still there.

    Raises:
        RequestError: The folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f".{uuid4().hex}.part"
        path.touch(exist_ok=False)  # with the usual mode: another user may serve
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise RequestError(
            f"the folder {str(folder)!r} cannot be written: {error.strerror}", "", "name another with --out"
        ) from error


def _read(path: Path) -> tuple[ProfileEntry, ...]:
    try:
        return parse_entries(path.read_text(encoding="utf-8"), str(path))
    except (OSError, ValueError) as error:
        raise RequestError(
            f"the profile {str(path)!r} cannot be read: {error}",
            "it is a file that `attnplug tune` wrote",
            "correct it",
        ) from error


def _read_if_right(path: Path) -> tuple[ProfileEntry, ...]:
    """Return the entries of a file, and none where it is not there or is no such file."""
    try:
        return _read(path)
    except RequestError:
        return ()


def _read_all(path: Path) -> tuple[ProfileEntry, ...]:
    """Return the entries of a file, or of all files of a folder."""
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    return merged(entry for file in files for entry in _read(file))


def _export(order: Order) -> str:
    """Write one file of all entries of the folder, and return the setting that pins it."""
    entries = tuple(map(_without_local, _read_all(order.folder)))
    path = Path(str(order.export))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dump_entries(entries), encoding="utf-8")
    except OSError as error:
        raise RequestError(f"--export {str(path)!r} cannot be written: {error.strerror}", "", "name another") from error
    return f"{PREFIX}PROFILE={path}#sha256={content_hash(entries)}"


def _without_local(entry: ProfileEntry) -> ProfileEntry:
    """Return an entry without what is of this machine alone: paths in messages, and the seconds of compiling."""
    rejected, refused = (
        {id_: _PATH.sub("...", text) for id_, text in reasons.items()} for reasons in (entry.rejected, entry.refused)
    )
    times = {id_: evolve(time, compile_s=0.0) for id_, time in entry.times.items()}
    return evolve(entry, times=times, rejected=rejected, refused=refused)


# What is said


def _show_grid(cells: Sequence[Cell], counts: Sequence[int], tuner: Tuner) -> None:
    seconds = sum(estimated_seconds(cell, tuner.device, count) for cell, count in zip(cells, counts, strict=True))
    layers, batches = {cell.layer for cell in cells}, {cell.step.what for cell in cells}
    say(
        f"{len(layers)} layers, {len(batches)} batches, {len(cells)} cells, {sum(counts)} measurements on "
        f"{tuner.device}: about {seconds:.0f} s, compiling apart"
    )
    for cell, count in zip(cells, counts, strict=True):
        say("\n".join(wrapped(f"{cell}: {count} candidate{'s' * (count != 1)}", "  ")))


def _show(found: Tuned, pinned: str) -> None:
    for entry in (*found.kept, *found.entries):
        say("\n".join(wrapped(f"{entry.shape}, {described(entry.requirements)}: {_result(entry)}")))
        for id_, reason in entry.rejected.items():
            say("\n".join(wrapped(f"rejected {id_}: {reason}", "  ")))
        for id_, reason in entry.refused.items():
            say("\n".join(wrapped(f"refused {id_}: {reason}", "  ")))
    for pair in found.pairs:
        say("\n".join(wrapped(f"{described(pair.layer)}: {pair}")))
    for cell, reason, _ in found.unserved:
        complain(f"attnplug: warning: not measured: {cell}: {reason}")
    if found.left:
        complain(f"attnplug: warning: {len(found.left)} cells are left: the same command goes on with them")
    compiled = _compiled(found.entries)
    if compiled:
        say("until the first result, compiling included: " + ", ".join(f"{id_} {s:.0f} s" for id_, s in compiled))
    if pinned:
        say(pinned)


def _result(entry: ProfileEntry) -> str:
    first, wins = winner(entry)
    relative = relative_times(entry)
    times = sorted(entry.times, key=lambda id_: (id_ != first, entry.times[id_].layer_us))
    shown = ", ".join(f"{id_} {entry.times[id_].layer_us:.4g} us" for id_ in times)
    equal = sum(1 for id_, each in relative.items() if each == 1.0 and names_of_pair(id_) is None)
    note = "" if wins or len(times) == 1 else f" ({equal} within the margin: the default order decides)"
    return f"{shown}{note}"


def _compiled(entries: Iterable[ProfileEntry]) -> list[tuple[str, float]]:
    longest: dict[str, float] = {}
    for entry in entries:
        for id_, time in entry.times.items():
            longest[id_] = max(longest.get(id_, 0.0), time.compile_s)
    return [(id_, seconds) for id_, seconds in sorted(longest.items()) if seconds >= _SHOWN_COMPILE_S]


def _to_dict(found: Tuned, pinned: str) -> dict[str, Any]:
    return {
        "entries": [{**entry.to_dict(), "fastest": winner(entry)[0]} for entry in (*found.kept, *found.entries)],
        "measured": len(found.entries),
        "kept": len(found.kept),
        "unserved": [{"cell": str(cell), "reason": reason} for cell, reason, _ in found.unserved],
        "left": [str(cell) for cell in found.left],
        "pairs": [
            {
                "layer": described(each.layer),
                "pair": each.proposal.pair,
                "best": each.proposal.best,
                "expected_gain": each.proposal.gain,
                "gain": each.gain,
                "wins": each.wins,
                "problem": each.problem,
            }
            for each in found.pairs
        ],
        "pinned": pinned,
    }
