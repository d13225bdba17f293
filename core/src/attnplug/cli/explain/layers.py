"""Names of many layers in few words, written as shells expand them: ``layers.{0..24..2}.self_attn``."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


def abbreviated(names: Sequence[str]) -> str:
    """Return the names of layers, those that differ in one number alone written once, with how many they are."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        found = _NUMBER.search(name)
        template = name if found is None else f"{name[: found.start()]}{{}}{name[found.end() :]}"
        numbers.setdefault(template, []).extend([int(found[0])] if found else [])
    written = [template.replace("{}", _progression(ids)) if ids else template for template, ids in numbers.items()]
    return f"{', '.join(written)} ({len(names)} layer{'s' * (len(names) != 1)})"


def _progression(numbers: Sequence[int]) -> str:
    """Write numbers with every run of three or more in equal steps as ``first..last`` or ``first..last..step``."""
    if len(numbers) == 1:
        return str(numbers[0])
    parts: list[str] = []
    rest = sorted(numbers)
    while rest:
        length = _run(rest)
        parts.append(_written(rest[:length]) if length > 2 else str(rest[0]))
        rest = rest[length if length > 2 else 1 :]
    return f"{{{','.join(parts)}}}"


def _run(numbers: Sequence[int]) -> int:
    """Return how many of the first numbers lie in equal steps."""
    if len(numbers) < 3:
        return 1
    step = numbers[1] - numbers[0]
    return next((i for i in range(1, len(numbers)) if numbers[i] - numbers[i - 1] != step), len(numbers))


def _written(run: Sequence[int]) -> str:
    step = run[1] - run[0]
    return f"{run[0]}..{run[-1]}" if step == 1 else f"{run[0]}..{run[-1]}..{step}"
