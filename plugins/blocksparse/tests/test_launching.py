"""A launch is kept by all that it is compiled for, and by nothing else."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from attnplug_blocksparse import launching  # after the line above: it imports Triton

ROWS = torch.zeros(64)


class Kept:
    """A launch that is compiled by its first call."""

    def __init__(self, kernel, constants, **options):
        self.first_calls, self.later_calls = [], []
        self.is_compiled = False
        made.append(self)

    def first(self, grid, *given):
        self.is_compiled = True
        self.first_calls.append((grid, given))

    def again(self, grid, *given):
        self.later_calls.append((grid, given))


made: list[Kept] = []


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    made.clear()
    monkeypatch.setattr(launching, "Launch", Kept)
    monkeypatch.setattr(launching, "_launches", {})


def launch(rows=ROWS, stride=16, number=3, constants=(64,), **options):
    launching.launch("kernel", 5, (rows,), (stride,), (number,), constants, **options)


@pytest.mark.parametrize("again", [{}, {"stride": 32}, {"number": 4}, {"stride": 0}])
def test_like_arguments_go_straight_to_the_driver(again):
    launch()
    launch(**again)

    (kept,) = made
    assert kept.first_calls == [((5,), (ROWS, 16, 3))]
    assert kept.later_calls == [((5, 1, 1), (ROWS.data_ptr(), again.get("stride", 16), again.get("number", 3)))]


@pytest.mark.parametrize(
    "other",
    [
        {"stride": 1},
        {"stride": 24},
        {"constants": (32,)},
        {"num_warps": 8},
        {"rows": ROWS.half()},
        {"rows": ROWS[1:]},
    ],
)
def test_others_are_compiled(other):
    launch()
    launch(**other)

    assert len(made) == 2
    assert not any(kept.later_calls for kept in made)
