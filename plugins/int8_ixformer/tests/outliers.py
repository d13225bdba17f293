"""
How far int8 attention is from attention that rounds nothing, on activations like those of language models.

Their keys have channels that are far from zero in every token, their values have channels that are larger than others:
both are what makes quantization hard. The error is that of all outputs together, relative to their size: the root of
the sum of the squared differences over that of the squares. It hardly depends on the number of keys.

    TRITON_INTERPRET=1 PYTHONPATH=.:core/src:plugins/int8_ixformer/src python -m plugins.int8_ixformer.tests.outliers
"""

from __future__ import annotations

from itertools import product
from typing import Final

import torch
from attrs import frozen
from torch import Tensor

from attnplug_int8_ixformer.tiles import PrefillTiles
from plugins.int8_ixformer.tests.dense import Requests, outlying
from plugins.int8_ixformer.tests.running import run_decode, run_prefill
from tests.backends.triton_on_cpu import INTERPRETED

BUDGET: Final = 0.08
"""Largest relative error. Most of it comes from keys: an outlier sets the step for all channels of its row."""

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
        size: Of a head.
        context: Keys.
        relative: The error.
    """

    level: int
    phase: str
    size: int
    context: int
    relative: float

    @property
    def is_within(self) -> bool:
        """Whether the budget is met."""
        return self.relative <= BUDGET


def table() -> list[Error]:
    """Return the error of each level, phase, head size and context."""
    found = []
    for level, size, context in product((1, 2), SIZES, CONTEXTS):
        rows = min(_ROWS, context)
        for phase, case in (
            ("decode", outlying([1] * 2, [context] * 2, level=level, size=size)),
            ("prefill", outlying([rows], [context], level=level, size=size)),
        ):
            out = run_decode(case)[0] if phase == "decode" else run_prefill(case, PrefillTiles(32, 64, 2, 4), 32768)
            found.append(Error(level, phase, size, context, _relative(out.cpu().double(), exact(case))))
    return found


def exact(case: Requests) -> Tensor:
    """``(tokens, heads, size)``: attention that rounds nothing, in float64."""
    found = []
    for q, k, v in zip(case.queries, case.keys, case.values, strict=True):
        query, key, value = (rows.double().transpose(0, 1) for rows in (q, k, v))
        key, value = (rows.repeat_interleave(case.group, 0) for rows in (key, value))
        places = torch.arange(key.shape[1], device=key.device)
        hidden = places[None] > places[-len(q) :, None]
        scores = (query @ key.mT * case.size**-0.5).masked_fill(hidden, -torch.inf)
        found.append((scores.softmax(-1) @ value).transpose(0, 1).cpu())
    return torch.cat(found)


def _relative(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


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
    print(text(table()))  # noqa: T201 - what it is run for
