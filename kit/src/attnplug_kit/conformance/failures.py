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
_OTHER: Final = "others"


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
    for cause, count in sorted(counts.items(), key=lambda item: (item[0] == _OTHER, -item[1], item[0])):
        yield f"  {cause} ({count} test{'s' * (count != 1)})"


def _fields_in(text: str) -> list[str]:
    return list(dict.fromkeys(name for name in _FIELD.findall(text) if name in FIELDS))
