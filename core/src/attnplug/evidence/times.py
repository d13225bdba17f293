"""
From the entries of a profile to a number per candidate: which entries count here, and how they are summed.

The number of a candidate is its time relative to the fastest candidate's, averaged over the buckets of each phase, and
over the phases with `WEIGHTS`: 1.0 is the fastest everywhere. Times within the margin of the fastest count as equal.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING, Final

from attrs import evolve, frozen

from attnplug.evidence.profile import layer_key
from attnplug.request.settings import names_of_pair

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence

    from attnplug.evidence.profile import MeasuredTime, ProfileEntry
    from attnplug.manifest.installed import VersionOf
    from attnplug.request.device import Device
    from attnplug.request.requirements import Requirements

MARGIN: Final = 0.02
"""The least advantage over another candidate that counts, as a part of the faster one's time."""

WEIGHTS: Final = {"decode": 0.6, "verify": 0.6, "prefill": 0.2, "chunk": 0.1, "mixed": 0.1}
"""
The part of each phase in a candidate's number. Phases that were not measured are left out, and the rest is scaled.
Verification counts for requests whose decodes have several tokens, and shares the weight of decodes then.
"""

_OF_PHASE: Final = {"decode": ("decode", "verify"), "prefill": ("prefill", "chunk", "mixed")}
_DECIDING: Final = ("num_q_heads", "num_kv_heads", "phases", "decode_query_len", "block_size")
_DRIVER: Final = "/proc/driver/nvidia/version"
_DRIVER_VERSION: Final = re.compile(r"  (\d+)\.\d")


@frozen(eq=False)
class Measured:
    """
    The times that count for one request.

    Attributes:
        level: ``local`` or ``shipped``.
        scores: The number of each candidate that was measured in all of the entries; 1.0 for the fastest.
        phases: The same by phase.
        entries: The entries.
        between: The entries' layers where the request's own was not measured, in words; else empty.
    """

    level: str
    scores: Mapping[str, float]
    phases: Mapping[str, Mapping[str, float]]
    entries: tuple[ProfileEntry, ...]
    between: str = ""

    def line(self, chosen: str, rival: str) -> str:
        """
        Return the measurement that tells the most about two candidates, in a line. Of a routed pair one of decodes and
        one of other batches: each against the candidate that does not run them.

        Args:
            chosen: The candidate that was chosen.
            rival: The runner-up; another one where it was not measured.
        """
        sides = names_of_pair(chosen)
        if sides is None:
            found = self._compared(chosen, rival, tuple(WEIGHTS))
        else:
            rivals = zip(_OF_PHASE.values(), reversed(sides), ("decodes", "other batches"), strict=False)
            parts = ((what, self._compared(chosen, other, phases)) for phases, other, what in rivals)
            found = "; ".join(f"{what} {part}" for what, part in parts if part)
        if not found:
            return ""
        count = f"; {len(self.entries)} shapes" if len(self.entries) > 1 else ""
        between = f"; {self.between}" if self.between else ""
        return f"{found}, {self.level} profile{count}{between}"

    def _compared(self, chosen: str, rival: str, phases: Sequence[str]) -> str:
        """Return the measurement of some phases that tells the most; empty where the chosen one was not measured."""
        entry = max(
            (entry for entry in self.entries if chosen in entry.times and entry.phase in phases),
            key=lambda entry: (WEIGHTS[entry.phase] * _gain(entry, chosen, rival), entry.num_seqs * entry.kv_len),
            default=None,
        )
        if entry is None:
            return ""
        time, other = entry.times[chosen], entry.times.get(rival)
        kernels = {name: it for name, it in time.libraries.items() if not name.startswith("attnplug-")}
        libraries = "".join(f", {name} {version}" for name, version in sorted((kernels or time.libraries).items()))
        where = f"{entry.shape}, {entry.device.name or entry.device.type}, {entry.measured_on}{libraries}"
        against = f" against {_us(other.layer_us)} of {rival}" if other is not None else ""
        return f"{_us(time.layer_us)} ({where}){against}"


def _us(microseconds: float) -> str:
    return f"{microseconds:.0f} us" if microseconds >= 100 else f"{microseconds:.3g} us"


def _gain(entry: ProfileEntry, chosen: str, rival: str) -> float:
    other = entry.times.get(rival)
    return 0.0 if other is None else other.layer_us / entry.times[chosen].layer_us - 1


class TimeTable:
    """
    Entries of one level, ready to be looked up.

    Args:
        entries: The entries.
        level: ``local``: versions have to be equal, or an entry does not count; ``shipped``: the minor versions of
            kernel libraries alone, or a time does not count, and of the default's library the whole entry.
        version_of: The installed version of a distribution, or None.
        notes: What is wrong with files of the level, which are left out; a sentence each.
    """

    def __init__(
        self, entries: Iterable[ProfileEntry], level: str, version_of: VersionOf, notes: tuple[str, ...] = ()
    ) -> None:
        self._entries, self._level, self._version_of, self._notes = tuple(entries), level, version_of, notes
        self._found: dict[Hashable, Measured | None] = {}
        self._of_device: dict[Device, tuple[Mapping[Hashable, list[ProfileEntry]], tuple[str, ...]]] = {}

    def measured(self, requirements: Requirements, device: Device) -> Measured | None:
        """Return the times that count for a request; None without any, or before the numbers of heads are known."""
        if not self._entries or requirements.num_kv_heads is None or requirements.num_q_heads is None:
            return None
        key = device, layer_key(requirements), *(getattr(requirements, name) for name in _DECIDING)
        if key not in self._found:  # layers that differ in what changes no kernel have the same times
            self._found[key] = self._measured(requirements, device, key[1])
        return self._found[key]

    def _measured(self, requirements: Requirements, device: Device, key: Hashable) -> Measured | None:
        table, _ = self._on(device)
        found = [entry for entry in table.get(key, ()) if _admits(entry, requirements)] if table else ()
        groups = _nearest(found, requirements) if found else []
        return _combined(groups, self._level, requirements) if groups else None

    def notes(self, device: Device) -> tuple[str, ...]:
        """Return why files and entries do not count on a device, entries with their number; a sentence each."""
        return (*self._notes, *(self._on(device)[1] if self._entries else ()))

    def _on(self, device: Device) -> tuple[Mapping[Hashable, list[ProfileEntry]], tuple[str, ...]]:
        """Return the entries that count on a device, by the layer's key, and why others do not: found once."""
        kept = self._of_device.get(device)
        if kept is None:
            table: dict[Hashable, list[ProfileEntry]] = {}
            reasons: Counter[tuple[str, str]] = Counter()
            check = _local_objection if self._level == "local" else _shipped_objection
            here = current_versions(device, self._version_of) if self._level == "local" else {}
            for entry in self._entries:
                reason = check(entry, device, here, self._version_of)
                lost = _lost_times(entry, self._version_of) if self._level == "shipped" and not reason else {}
                if reason or (lost and len(entry.times) - len(lost) < 2):  # one time is no comparison
                    reasons["entry", reason or min(lost.values())] += 1
                    continue
                reasons.update(("time", each) for each in lost.values())
                if lost:
                    times = {id_: time for id_, time in entry.times.items() if id_ not in lost}
                    entry = evolve(entry, times=times)  # noqa: PLW2901 - what of it counts
                table.setdefault(layer_key(entry.requirements), []).append(entry)
            notes = tuple(f"{_count(key[0], number)} not used: {key[1]}" for key, number in sorted(reasons.items()))
            kept = self._of_device.setdefault(device, (table, notes))
        return kept


def _count(what: str, number: int) -> str:
    plural = {"entry": "entries", "time": "times"}[what]
    return f"1 {what} of the profile is" if number == 1 else f"{number} {plural} of the profile are"


def current_versions(device: Device, version_of: VersionOf) -> dict[str, str]:
    """
    Return the versions that an entry for a device has: torch, triton and, of NVIDIA's driver, the major number.

    Args:
        device: The device.
        version_of: The installed version of a distribution, or None.
    """
    names = ("torch",) if device.type == "cpu" else ("torch", "triton")
    found = {name: version for name in names if (version := version_of(name)) is not None}
    driver = _driver() if device.vendor == "nvidia" else ""
    return {**found, **({"driver": driver} if driver else {})}


def _driver() -> str:
    """Return the major number of NVIDIA's driver; empty where its file is not there."""
    try:
        with open(_DRIVER, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - a file of the kernel, read whole
            found = _DRIVER_VERSION.search(file.readline())
    except OSError:
        return ""
    return found[1] if found else ""


def _local_objection(entry: ProfileEntry, device: Device, here: Mapping[str, str], version_of: VersionOf) -> str:
    theirs = (entry.device.type, entry.device.vendor, entry.device.name, entry.device.num_multiprocessors)
    if theirs != (device.type, device.vendor, device.name, device.num_multiprocessors):
        return f"measured on {_where(entry.device)}; this is {_where(device)}"
    for name in sorted({*entry.versions, *here}):
        if entry.versions.get(name) != here.get(name):
            return f"measured with {name} {entry.versions.get(name, 'absent')}; here it is {here.get(name, 'absent')}"
    return _library_objection(entry.times.values(), version_of, lambda version: version)


def _shipped_objection(entry: ProfileEntry, device: Device, _: object, version_of: VersionOf) -> str:
    theirs, count = entry.device, device.num_multiprocessors
    # A device that is named by its product, not found here, has no number of multiprocessors, and a shorter name.
    named = device.name == theirs.name or (count is None and (theirs.name or "").startswith(f"{device.name} "))
    if device.name is None or not named or count not in (None, theirs.num_multiprocessors):
        return f"measured on {_where(theirs)}; this is {_where(device)}"
    # Without the time of the default, nothing says that another candidate is faster than it.
    default = entry.times.get(entry.default)
    return _library_objection(() if default is None else (default,), version_of, _minor)


def _lost_times(entry: ProfileEntry, version_of: VersionOf) -> dict[str, str]:
    """Return the candidates whose libraries are here in another minor version than measured, with the reason."""
    found = {id_: _library_objection((time,), version_of, _minor) for id_, time in entry.times.items()}
    return {id_: reason for id_, reason in found.items() if reason}


def _library_objection(times: Iterable[MeasuredTime], version_of: VersionOf, part: Callable[[str], str]) -> str:
    """Return the first library that is here in another version than measured; one that is not here cannot be chosen."""
    libraries = {item for time in times for item in time.libraries.items()}
    for name, version in sorted(libraries):
        here = version_of(name)
        if here is not None and part(here) != part(version):
            return f"measured with {name} {version}; here it is {here}"
    return ""


def _minor(version: str) -> str:
    return ".".join(re.split(r"[.+]", version)[:2])


def _where(device: Device) -> str:
    count = f" with {device.num_multiprocessors} multiprocessors" if device.num_multiprocessors else ""
    return f"{device}{count}"


def _admits(entry: ProfileEntry, requirements: Requirements) -> bool:
    """Whether an entry has the request's block size, or was measured with the size that each backend prefers."""
    return entry.requirements.block_size in (None, requirements.block_size) or requirements.block_size is None


def _nearest(entries: Sequence[ProfileEntry], requirements: Requirements) -> list[list[ProfileEntry]]:
    """
    Return the entries with the request's heads; else those of the next fewer and the next more KV heads, up to a factor
    of two, with as many query heads each.
    """
    wanted, ratio = requirements.num_kv_heads, requirements.num_q_heads // requirements.num_kv_heads
    by_heads: dict[int, list[ProfileEntry]] = {}
    for entry in entries:
        heads = entry.requirements.num_q_heads, entry.requirements.num_kv_heads
        if heads[0] // heads[1] == ratio:
            by_heads.setdefault(heads[1], []).append(entry)
    if wanted in by_heads:
        return [by_heads[wanted]]
    fewer = [heads for heads in by_heads if heads < wanted <= 2 * heads]
    more = [heads for heads in by_heads if wanted < heads <= 2 * wanted]
    return [by_heads[heads] for heads in (*sorted(fewer)[-1:], *sorted(more)[:1])]


def _combined(groups: Sequence[Sequence[ProfileEntry]], level: str, requirements: Requirements) -> Measured | None:
    """Return the worst number of each candidate among the measured neighbors: between two, both have to agree."""
    by_phase = [phase_scores(group, requirements) for group in groups]
    totals = [total_scores(phases) for phases in by_phase]
    ids = set.intersection(*map(set, totals))
    if not ids:
        return None
    scores = levelled({id_: max(total[id_] for total in totals) for id_ in ids})
    common = set.intersection(*map(set, by_phase))
    phases = {name: _worst([found[name] for found in by_phase]) for name in sorted(common)}
    entries = tuple(entry for group in groups for entry in group if entry.phase in phases)
    layers = [group[0].requirements for group in groups]
    heads = [f"{each.num_q_heads}/{each.num_kv_heads}" for each in layers]
    own = f"{requirements.num_q_heads}/{requirements.num_kv_heads}"
    between = "" if own in heads else f"measured with {' and '.join(heads)} heads, the nearest to {own}"
    return Measured(level, scores, phases, entries, between)


def _worst(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {id_: max(scores[id_] for scores in found) for id_ in set.intersection(*map(set, found))}


def phase_scores(entries: Iterable[ProfileEntry], requirements: Requirements) -> dict[str, dict[str, float]]:
    """
    Return the number of each candidate by phase, over the phases that a request has.

    Args:
        entries: Entries of one layer.
        requirements: The request.
    """
    wanted = phases_of(requirements)
    by_phase: dict[str, list[Mapping[str, float]]] = {}
    for entry in entries:
        if entry.phase in wanted:
            by_phase.setdefault(entry.phase, []).append(relative_times(entry))
    return {name: _mean(found) for name, found in sorted(by_phase.items())}


def phases_of(requirements: Requirements) -> list[str]:
    """Return the measured phases that a request has. Without drafts, none are verified."""
    wanted = [name for phase in requirements.phases for name in _OF_PHASE[phase]]
    return [name for name in wanted if name != "verify" or requirements.decode_query_len != 1]


@lru_cache(maxsize=4096)  # each entry is compared for every request that it serves
def relative_times(entry: ProfileEntry) -> dict[str, float]:
    """Return each candidate's time relative to the fastest; 1.0 within the margin, `MARGIN` or twice the spread."""
    times = entry.times
    fastest = min(times, key=lambda id_: (times[id_].layer_us, id_))
    least, spread = times[fastest].layer_us, times[fastest].spread
    found = {}
    for id_, time in times.items():
        margin = max(MARGIN, 2 * spread, 2 * time.spread)
        found[id_] = 1.0 if time.layer_us < least * (1 + margin) else time.layer_us / least
    return found


def _mean(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each candidate that has a number in all of them."""
    return {id_: sum(each[id_] for each in found) / len(found) for id_ in set.intersection(*map(set, found))}


def total_scores(phases: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """
    Return the number of each candidate that was measured in all phases.

    Args:
        phases: As of `phase_scores`.
    """
    if not phases:
        return {}
    weights, ids = weights_of(phases), set.intersection(*map(set, phases.values()))
    whole = sum(weights.values())
    return {id_: sum(weights[name] * phases[name][id_] for name in phases) / whole for id_ in ids}


def weights_of(phases: Collection[str]) -> dict[str, float]:
    """Return the weights of these phases in a candidate's number. Their sum is 1 only where all were measured."""
    halved = 0.5 if "decode" in phases and "verify" in phases else 1.0
    return {name: WEIGHTS[name] * (halved if name in ("decode", "verify") else 1.0) for name in phases}


def levelled(scores: Mapping[str, float]) -> dict[str, float]:
    """Return numbers in which those within `MARGIN` of the least are equal to it: what follows decides between them."""
    least = min(scores.values())
    return {id_: least if score < least * (1 + MARGIN) else score for id_, score in scores.items()}
