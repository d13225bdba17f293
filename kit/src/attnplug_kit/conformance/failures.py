"""What failed tests have in common: the declared values that they requested, and the fields that a backend ignores."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Final

from attnplug.request import FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_FIELD: Final = re.compile(r"\b(\w+)=")
_IGNORED: Final = re.compile(r"\b(\w+)=\S* was requested, and the output is that of a request without it: ignored")
_REQUEST: Final = re.compile(r" with ((?:\w+=[^\s:,]+ ?)+)")
_PHASE: Final = re.compile(r"; in (decodes|prefills) only")
_OTHER: Final = "others"
_FEWEST: Final = 3
"""Failures of which it is worth to say what all have in common."""

_ALWAYS: Final = (
    *("paged", "head_size", "num_kv_heads", "gqa_ratio"),
    *("dtype", "block_size", "kv_layout", "kv_cache_form"),
)
"""Fields that nearly every request has, and that say nothing where all failures have them."""


def failed_points(tests: Iterable[Mapping[str, str]], subject_id: str) -> frozenset[str]:
    """Return the points of the failed tests of a subject: of most tests the declared value, as ``head_size=64``."""
    opening = f"[{subject_id}-"
    ids = (test["id"] for test in tests if test["outcome"] == "failed")
    return frozenset(name.split(opening, 1)[1].removesuffix("]") for name in ids if opening in name)


def lines_of_causes(tests: Iterable[Mapping[str, str]], subject_id: str) -> Iterator[str]:
    """
    Yield one line for each field that failed tests have in common, with how many they are, the most first, and a head.

    A field is ignored where a test of `InputSensitivity` found that; then every failed request with it counts. Other
    tests count for the fields that their own parameters name. Each test counts once.

    Args:
        tests: Each test's id, outcome and the first line of its failure.
        subject_id: ``backend/variant``.
    """
    failed = [test for test in tests if test["outcome"] == "failed"]
    ignored = {match[1] for test in failed if (match := _IGNORED.search(test["message"]))}
    counts: Counter[str] = Counter()
    for test in failed:
        point = " ".join(failed_points([test], subject_id))
        own = _fields_in(point)
        common = sorted(ignored & {*own, *_fields_in(test["message"])})
        counts[" and ".join(common) + ": ignored" if common else " and ".join(own) or _OTHER] += 1
    yield from ["failed, by cause:"] if failed else []
    yield from _in_common([test["message"] for test in failed])
    for cause, count in sorted(counts.items(), key=lambda item: (item[0] == _OTHER, -item[1], item[0])):
        yield f"  {cause} ({count} test{'s' * (count != 1)})"


def _in_common(messages: list[str]) -> Iterator[str]:
    """Yield what the requests of all failures that show theirs have, and the phase in which they differ."""
    requests = [dict.fromkeys(match[1].split()) for text in messages if (match := _REQUEST.search(text))]
    if len(requests) < _FEWEST or len(requests) < len(messages) / 2:
        return
    shared = [pair for pair in requests[0] if all(pair in each for each in requests)]
    fields = [name for name in _fields_in(" ".join(requests[0])) if all(f"{name}=" in " ".join(r) for r in requests)]
    common = [pair for pair in shared if not pair.startswith(_ALWAYS)]
    common += [name for name in fields if not name.startswith(_ALWAYS) and not any(p.startswith(name) for p in common)]
    phases = {match[1] if (match := _PHASE.search(text)) else "" for text in messages}
    where = f", in {phases.pop()} only" if len(phases) == 1 and "" not in phases else ""
    if common or where:
        what = ", ".join(common) or "no field"
        yield f"  all {len(requests)} that show their request have {what} in common{where}"


def _fields_in(text: str) -> list[str]:
    return list(dict.fromkeys(name for name in _FIELD.findall(text) if name in FIELDS))
