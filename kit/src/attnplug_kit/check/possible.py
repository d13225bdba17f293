"""Whether one question can meet several conditions at once: some requirements contradict each other for everybody."""

from __future__ import annotations

from itertools import islice, product
from typing import TYPE_CHECKING, Any, Final

from attnplug.errors import RequirementsError
from attnplug.manifest import Holds, IsRequested
from attnplug.request import FIELDS, Flag, Names, Requirements, Table

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from attnplug.manifest import Condition

_MOST: Final = 512
_PLAIN: Final = {"head_size": 64, "num_q_heads": 8, "num_kv_heads": 8, "dtype": "bfloat16"}
_UNRELATED: Final = ("num_q_heads", "num_kv_heads", "gqa_ratio", "features", "phases")
"""Fields whose values are chosen freely enough to contradict nothing."""


def contradiction(when: Sequence[Condition]) -> str:
    """
    Return why no requirements meet these conditions, or an empty text.

    Only values that decide about contradictions are tried; where there are too many, nothing is claimed.
    """
    fields = {c.field: tuple(_values(c)) for c in when if _is_tried(c)}
    combinations = product(*fields.values())
    why = ""
    for number, values in enumerate(islice(combinations, _MOST + 1)):
        try:
            Requirements(**{**_PLAIN, **_beside(fields), **dict(zip(fields, values, strict=True))})
        except RequirementsError as error:
            why = f"{error.problem.removesuffix(' were given')} contradict each other: {error.expected}"
        else:
            return ""
        if number == _MOST:
            return ""
    return why


def _is_tried(condition: Condition) -> bool:
    item = FIELDS.get(condition.field)
    return item is not None and item.kind in ("model", "engine") and condition.field not in _UNRELATED


def _beside(fields: dict[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return what the values that are tried take for granted."""
    dtypes = [value for value in fields.get("kv_cache_dtype", ()) if value in ("float32", "float16", "bfloat16")]
    return {"dtype": dtypes[0]} if dtypes else {}


def _values(condition: Condition) -> Iterator[Any]:
    item = FIELDS[condition.field]
    if isinstance(condition, IsRequested) and not condition.requested:
        yield from () if item.neutral is None and item.required else (item.neutral,)
    elif isinstance(condition, Holds):
        yield from condition.constraint.choices()
    elif isinstance(item.domain, Flag):
        yield not item.neutral
    elif isinstance(item.domain, (Names, Table)):
        yield from ({"stride": 1},) if isinstance(item.domain, Table) else ()
    else:
        yield from _others(condition.field, item.neutral)


def _others(name: str, neutral: Any) -> Iterator[Any]:
    """Yield values of a field that ask for something."""
    values = getattr(FIELDS[name].domain, "values", None)
    yield from (value for value in values or (2, 3) if value not in (neutral, "auto"))
