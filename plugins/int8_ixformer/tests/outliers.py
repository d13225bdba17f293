"""
The error of int8 attention against unquantized attention, on activations with the outlier channels of language models.

Keys have channels with a large offset in every token, and values have channels larger than the others. The error is
the norm of the difference of all outputs over the norm of the outputs. It hardly depends on the number of keys.

    TRITON_INTERPRET=1 python -m plugins.int8_ixformer.tests.outliers
"""

from __future__ import annotations

from itertools import product
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from attnplug_int8_ixformer.tiles import PrefillTiles
from plugins.int8_ixformer.tests.requests import Requests, run_decode, run_prefill, with_outliers
from tests.backends.triton_on_cpu import INTERPRETED

BUDGET: Final = 0.08
"""The largest relative error allowed. Most of it is from keys: an outlier sets the scale of its whole row."""

SIZES: Final = (64, 128)
CONTEXTS: Final = (64, 256, 512) if INTERPRETED else (256, 1024, 4096, 16384)
_ROWS: Final = 32


@frozen
class Error:
    """
    One cell of the table.

    Attributes:
        level: 1 or 2.
        phase: decode or prefill.
        size: The head size.
        context: Keys of the request.
        relative: The relative error.
    """

    level: int
    phase: str
    size: int
    context: int
    relative: float

    @property
    def is_within(self) -> bool:
        """Whether it is within the budget."""
        return self.relative <= BUDGET


def table() -> list[Error]:
    """Return the error of each level, phase, head size and context."""
    found = []
    for level, size, context in product((1, 2), SIZES, CONTEXTS):
        rows = min(_ROWS, context)
        for phase, case in (
            ("decode", with_outliers([1] * 2, [context] * 2, level=level, size=size)),
            ("prefill", with_outliers([rows], [context], level=level, size=size)),
        ):
            out = run_decode(case)[0] if phase == "decode" else run_prefill(case, PrefillTiles(32, 64, 2, 4), 32768)
            found.append(Error(level, phase, size, context, _relative(out.cpu().double(), exact(case))))
    return found


def exact(case: Requests) -> Tensor:
    """Return unquantized attention, ``(tokens, heads, size)`` in float64."""
    found = []
    for q, k, v in zip(case.queries, case.keys, case.values, strict=True):
        query, key, value = (rows.double().transpose(0, 1) for rows in (q, k, v))
        key, value = (rows.repeat_interleave(case.group, 0) for rows in (key, value))
        places = torch.arange(key.shape[1], device=key.device)
        hidden = places[None] > places[-len(q) :, None]
        scores = (query @ key.mT * case.scale).masked_fill(hidden, -torch.inf)
        found.append((scores.softmax(-1) @ value).transpose(0, 1).cpu())
    return torch.cat(found)


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def text(errors: list[Error]) -> str:
    """Return the table in Markdown, a row for each level, phase and head size."""
    contexts = sorted({each.context for each in errors})
    lines = [
        f"| level | phase | head size | {' | '.join(map(str, contexts))} | budget |",
        f"| {' | '.join('---' for _ in range(4 + len(contexts)))} |",
    ]
    for level, phase, size in dict.fromkeys((each.level, each.phase, each.size) for each in errors):
        cells = [e.relative for e in errors if (e.level, e.phase, e.size) == (level, phase, size)]
        numbers = " | ".join(f"{cell:.4f}" for cell in cells)
        lines.append(f"| {level} | {phase} | {size} | {numbers} | {BUDGET} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(text(table()))  # noqa: T201 - a script
