"""
Measured times, as `attnplug tune` writes them: one entry per layer, phase and bucket of lengths, as data.

A file holds one entry, or several that were exported together. Imported only where there is a profile.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from math import log2
from typing import TYPE_CHECKING, Any, Final, TypeVar

from attrs import field, frozen

from attnplug.errors import AttnplugError, shown
from attnplug.request.device import Device
from attnplug.request.domains import Integer
from attnplug.request.fields import fields_of
from attnplug.request.requirements import Requirements

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable

    from attnplug.request.field import Field

_T = TypeVar("_T")

FORMAT: Final = 1
"""The version of the files that this core reads and `attnplug tune` writes."""

PHASES: Final = ("decode", "verify", "prefill", "chunk", "mixed")
"""
The kinds of batches: one new token per request; 2 to 8, as drafts are verified; first prefills; new tokens behind
cached ones; decodes and prefills together.
"""

BUILT_FOR: Final = 32
"""Layers that share the build of a step, where a time decides: those of an 8B model. Larger models have more."""

_HEADS: Final = ("num_q_heads", "num_kv_heads")
_OF_ENGINE: Final = ("paged", "kv_cache_dtype", "dcp_size", "batch_invariant", "per_head_scales")
_KEYS: Final = tuple(
    item
    for item in fields_of("model", "engine")
    if item.name not in _HEADS and (item.kind == "model" or item.name in _OF_ENGINE)
)
_LEAST: Final = 1e-3  # microseconds: of less, the digits that a file keeps are 0
_MOST: Final = 1e15  # of any number: Python's integers have no limit, and fail as floats
_DATE: Final = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")  # which are in order as texts: the newest entry counts
_LONGEST: Final = 1000  # characters of a text at most: it is shown in one line
_DIGEST: Final = 16  # hexadecimal digits of a file's name


@frozen
class MeasuredTime:
    """
    The time of one candidate.

    Attributes:
        microseconds: The median time of a layer's call, without `build_us`.
        spread: Half the distance between the quartiles, relative to the median.
        rounds: The rounds that the median is from. Few of them: the candidate was dropped after the screening.
        in_graph: Whether it ran as a replay of a CUDA graph.
        build_us: Microseconds of the build of a step's metadata, which all layers share.
        compile_s: Seconds until the first call returned, compiling included; not part of the time.
        libraries: Versions of the kernel libraries, by distribution.
        samples: Microseconds of each round that the median is from; empty where they were not kept.
    """

    microseconds: float
    spread: float = 0.0
    rounds: int = 0
    in_graph: bool = False
    build_us: float = 0.0
    compile_s: float = 0.0
    libraries: Mapping[str, str] = field(factory=dict, hash=False)
    samples: tuple[float, ...] = ()

    @property
    def layer_us(self) -> float:
        """What decides: microseconds of the call, and the share of a layer in the build that `BUILT_FOR` layers use."""
        return self.microseconds + self.build_us / BUILT_FOR


@frozen(eq=False)
class ProfileEntry:
    """
    The times of several candidates for one layer and one batch.

    Attributes:
        measured_on: The date, as ``2026-11-28``.
        device: The device.
        versions: Versions of torch, triton and the driver (its major number), as far as they are there.
        requirements: The layer on one rank, as it was requested.
        phase: One of `PHASES`.
        num_seqs: Requests of the batch.
        kv_len: Mean keys of a request, new ones included.
        query_len: New tokens of a request, the longest one.
        default: The candidate that is chosen without a profile.
        times: The times, by candidate; of a routed pair by the names of both.
        rejected: The candidates whose result was wrong, or whose call failed, with the reason.
        refused: The candidates that could not be loaded here, such as those whose probe refuses, with the reason.
        origin: The file, for messages; not part of the entry.
    """

    measured_on: str
    device: Device
    versions: Mapping[str, str]
    requirements: Requirements
    phase: str
    num_seqs: int
    kv_len: int
    query_len: int
    default: str
    times: Mapping[str, MeasuredTime]
    rejected: Mapping[str, str] = field(factory=dict)
    refused: Mapping[str, str] = field(factory=dict)
    origin: str = ""

    @property
    def bucket(self) -> tuple[int, int]:
        """Requests and mean keys, as the nearest powers of two."""
        return bucket_of(self.num_seqs), bucket_of(self.kv_len)

    @property
    def shape(self) -> str:
        """The batch in words: ``64 x 4k decode``."""
        return f"{self.num_seqs} x {_short(self.kv_len)} {self.phase}"

    @property
    def name(self) -> str:
        """The name of its file: the same for the same measurement, whatever the kernel libraries."""
        return entry_name(self.device, self.versions, self.requirements, self.phase, *self.bucket)

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {
            "format": FORMAT,
            "measured_on": self.measured_on,
            "device": self.device.to_dict(),
            "versions": dict(self.versions),
            "requirements": self.requirements.to_dict(),
            "phase": self.phase,
            "num_seqs": self.num_seqs,
            "kv_len": self.kv_len,
            "query_len": self.query_len,
            "default": self.default,
            "times": {id_: _plain(time) for id_, time in sorted(self.times.items())},
            "rejected": dict(self.rejected),
            "refused": dict(self.refused),
        }


def bucket_of(number: int) -> int:
    """Return the nearest power of two, in log2."""
    return round(log2(max(1, number)))


def entry_name(
    device: Device,
    versions: Mapping[str, str],
    requirements: Requirements,
    phase: str,
    num_seqs: int,
    kv_len: int,
) -> str:
    """
    Return the name of an entry's file.

    Args:
        device: The device.
        versions: Of torch, triton and the driver.
        requirements: The layer.
        phase: One of `PHASES`.
        num_seqs: The bucket of the requests.
        kv_len: The bucket of the mean keys.
    """
    parts = [device.to_dict(), sorted(versions.items()), requirements.to_dict(), phase, num_seqs, kv_len]
    return f"{phase}-{_digest(_canonical(parts))[:_DIGEST]}.json"


@lru_cache(maxsize=1024)  # the entries of a file share a few layers
def layer_key(requirements: Requirements) -> Hashable:
    """
    Return the fields of a layer that change its kernels, without the numbers of heads. Lengths, such as a window's, are
    rounded to powers of two; of a real number, such as a soft cap, counts that there is one.
    """
    return tuple(_rounded(item, getattr(requirements, item.name)) for item in _KEYS)


def _rounded(item: Field, value: Any) -> Hashable:
    if item.has_ranges and value is not None:
        return bucket_of(value) if isinstance(item.domain, Integer) else True
    return tuple(sorted(value.items())) if isinstance(value, Mapping) else value


def content_hash(entries: Iterable[ProfileEntry]) -> str:
    """
    Return the hash of a profile's content, in whatever files and order its entries are.

    The ranks of a model compare it: all of them have to decide on the same times.
    """
    texts = sorted({_canonical(entry.to_dict()) for entry in entries})
    return _digest(b"\n".join(texts))


def _digest(content: bytes) -> str:
    from hashlib import sha256  # noqa: PLC0415 - it takes 3 ms to import, and deciding needs none

    return sha256(content).hexdigest()


def merged(entries: Iterable[ProfileEntry]) -> tuple[ProfileEntry, ...]:
    """Return the entries of several files, as they come: of the same measurement the newest."""
    found: dict[Hashable, ProfileEntry] = {}
    for entry in entries:  # what the name has, which takes longer to make
        key = entry.device, tuple(sorted(entry.versions.items())), entry.requirements, entry.phase, entry.bucket
        kept = found.get(key)
        if kept is None or (kept.measured_on, _canonical(kept.to_dict())) < (
            entry.measured_on,
            _canonical(entry.to_dict()),
        ):
            found[key] = entry
    return tuple(found.values())


def dump_entries(entries: Iterable[ProfileEntry]) -> str:
    """Return the text of a file with several entries: a line for each."""
    lines = ",\n".join(_canonical(entry.to_dict()).decode() for entry in entries)
    return f'{{"format": {FORMAT}, "entries": [\n{lines}\n]}}\n'


def parse_entries(text: str, origin: str = "") -> tuple[ProfileEntry, ...]:
    """
    Read the content of a file. Other keys are left alone.

    Raises:
        ValueError: It is something else; says what.
    """
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if not isinstance(data, Mapping):
        raise ValueError("it is no JSON object")  # noqa: TRY004 - like everything else that is wrong with a file
    if type(data.get("format")) is not int or data["format"] != FORMAT:
        raise ValueError(f"its format is {shown(data.get('format'))}, and this core reads format {FORMAT}")
    tables = data.get("entries", [data])
    if not isinstance(tables, list):
        raise ValueError(f"entries is {shown(tables)}, and it is a list")  # noqa: TRY004 - likewise
    kept: dict[str, Any] = {}  # entries of a file share devices and layers: reading one is most of the work
    return tuple(_entry(table, origin, kept) for table in tables)


def _refuse_constant(text: str) -> Any:
    raise ValueError(f"it is no JSON: there is no number {text}")


def _entry(data: Any, origin: str, kept: dict[str, Any]) -> ProfileEntry:
    if not isinstance(data, Mapping):
        raise ValueError(f"an entry is {shown(data)}, and it is an object")  # noqa: TRY004 - likewise
    phase = _text(data, "phase")
    if phase not in PHASES:
        raise ValueError(f"phase is {phase!r}, and it is one of {', '.join(PHASES)}")
    times = _table(data, "times")
    if not times:
        raise ValueError("times is empty, and it has the time of at least one candidate")
    try:
        device = _once(kept, Device.from_dict, data.get("device"))
        requirements = _once(kept, Requirements.from_dict, data.get("requirements"))
    except AttnplugError as error:
        raise ValueError(f"{error.problem}; {error.expected}") from error
    if {"num_q_heads", "num_kv_heads"} & {*requirements.late}:
        raise ValueError(f"late is {requirements.late}, and a measured layer has its heads")
    return ProfileEntry(
        measured_on=_date(data, "measured_on"),
        device=device,
        versions=_texts(data, "versions"),
        requirements=requirements,
        phase=phase,
        num_seqs=_count(data, "num_seqs"),
        kv_len=_count(data, "kv_len"),
        query_len=_count(data, "query_len"),
        default=_text(data, "default"),
        times={_line("a candidate", id_): _time(id_, time, kept) for id_, time in times.items()},
        rejected=_texts(data, "rejected"),
        refused=_texts(data, "refused"),
        origin=origin,
    )


def _once(kept: dict[str, Any], read: Callable[[Any], _T], table: Any) -> _T:
    """Return what a function reads of a table, or what it has read of an equal one."""
    key = f"{read.__qualname__} {table!r}"
    found: _T = kept[key] if key in kept else kept.setdefault(key, read(table))
    return found


def _time(id_: str, data: Any, kept: dict[str, Any]) -> MeasuredTime:
    if not isinstance(data, Mapping):
        raise ValueError(f"the time of {id_!r} is {shown(data)}, and it is an object")  # noqa: TRY004 - likewise
    numbers = {name: data.get(name, 0.0) for name in ("spread", "build_us", "compile_s")}
    rounds, in_graph, microseconds = data.get("rounds", 0), data.get("in_graph", False), data.get("microseconds", 0)
    if type(microseconds) not in (int, float) or not _LEAST <= microseconds <= _MOST:
        raise ValueError(f"{id_!r} takes {shown(microseconds)} microseconds, and it is a number from {_LEAST} on")
    for name, number in numbers.items():
        if type(number) not in (int, float) or not 0 <= number <= _MOST:
            raise ValueError(f"{name} of {id_!r} is {shown(number)}, and it is a number from 0 on")
    if type(rounds) is not int or not 0 <= rounds <= _MOST or type(in_graph) is not bool:
        raise ValueError(f"rounds of {id_!r} is {shown(rounds)} and in_graph {shown(in_graph)}")
    return MeasuredTime(
        microseconds,
        rounds=rounds,
        in_graph=in_graph,
        libraries=_once(kept, _libraries, data.get("libraries", {})),
        samples=_samples(id_, data.get("samples", [])),
        **numbers,
    )


def _libraries(table: Any) -> dict[str, str]:
    return _texts({"libraries": table}, "libraries")


def _samples(id_: str, samples: Any) -> tuple[float, ...]:
    are_numbers = isinstance(samples, list) and set(map(type, samples)) <= {int, float}  # of many: in no loop of Python
    if not are_numbers or (samples and not 0 < min(samples) <= max(samples) <= _MOST):
        raise ValueError(f"samples of {id_!r} is {shown(samples)}, and it is a list of positive numbers")
    return tuple(samples)


def _text(data: Mapping[str, Any], name: str) -> str:
    return _line(name, data.get(name))


def _date(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str) or _DATE.fullmatch(value) is None:
        raise ValueError(f"{name} is {shown(value)}, and it is a date such as 2026-11-28")
    return value


def _line(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value or len(value) > _LONGEST or not value.isprintable():
        raise ValueError(f"{name} is {shown(value)}, and it is a text of one line")
    return value


def _count(data: Mapping[str, Any], name: str) -> int:
    value = data.get(name)
    if type(value) is not int or not 1 <= value < 2**40:
        raise ValueError(f"{name} is {shown(value)}, and it is a whole number from 1 on")
    return value


def _table(data: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = data.get(name, {})
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} is {shown(value)}, and it is an object")  # noqa: TRY004 - likewise
    return value


def _texts(data: Mapping[str, Any], name: str) -> dict[str, str]:
    return {_line(name, key): _line(f"{name} of {key!r}", value) for key, value in _table(data, name).items()}


def _plain(time: MeasuredTime) -> dict[str, Any]:
    return {
        "microseconds": round(time.microseconds, 3),
        "spread": round(time.spread, 5),
        "rounds": time.rounds,
        "in_graph": time.in_graph,
        "build_us": round(time.build_us, 2),
        "compile_s": round(time.compile_s, 3),
        "libraries": dict(sorted(time.libraries.items())),
        "samples": [float(f"{sample:.5g}") for sample in time.samples],
    }


def _canonical(data: Any) -> bytes:
    return json.dumps(data, sort_keys=True, separators=(",", ":")).encode()


def _short(number: int) -> str:
    """Return a length as people write it: ``512``, ``4k``, ``32k``."""
    return f"{number // 1024}k" if number >= 1024 and number % 1024 == 0 else str(number)
