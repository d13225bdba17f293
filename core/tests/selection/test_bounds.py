"""What a process remembers is bounded: decisions, and the answers of candidates and conditions; in all threads."""

from __future__ import annotations

import gc
import random

import pytest

import attnplug
from attnplug.manifest import memo
from attnplug.manifest.memo import remember
from attnplug.manifest.schema import Holds
from attnplug.negotiation.candidate import Candidate
from attnplug.selection import process
from tests.threads import together


def test_remembering_from_many_threads_stays_bounded(installed, request_of, monkeypatch) -> None:
    monkeypatch.setattr(process, "_MOST_DECISIONS", 4)
    attnplug.refresh()
    widths: list[int] = []

    def select(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(150):
            window = chance.randrange(1, 40)
            found = attnplug.explain(request_of(sliding_window=window), "cuda:9.0")
            assert found.requirements.sliding_window == window
            state = process.current_state()
            widths.append(max(len(state.decisions), len(state.hot)))

    together(*(lambda seed=seed: select(seed) for seed in range(6)))

    assert max(widths) <= 5  # one more while the oldest is being forgotten


def entries() -> int:
    """Return how many entries there are in all: decisions, and answers that candidates and conditions remember."""
    gc.collect()
    state = process.current_state()
    memos = [*memo._memos, *(each._known for each in gc.get_objects() if type(each) in (Candidate, Holds))]
    return len(state.decisions) + len(state.hot) + sum({id(each): len(each) for each in memos}.values())


@pytest.mark.unmeasured
def test_entries_are_bounded_over_many_requests(both, request_of) -> None:
    """Half of the fields take values without end. A longer run is in the notes of the change."""
    peak, chosen = 0, attnplug.select(request_of())
    for number in range(1, 1501):
        attnplug.select(request_of(sliding_window=number, num_q_heads=2 * number, head_size=8 * (number % 30 + 1)))
        if number % 300 == 0:
            peak = max(peak, entries())

    assert 1000 < peak <= 4096
    assert attnplug.select(request_of()) == chosen


def test_the_bounds_add_up() -> None:
    assert 2 * process._MOST_DECISIONS + memo.MOST <= 4096


def test_answers_are_forgotten_together_and_found_again(monkeypatch) -> None:
    monkeypatch.setattr(memo, "MOST", 8)
    memo.forget_all()
    one: dict[int, str] = {}
    other: dict[int, str] = {}
    for number in range(20):
        for each in (one, other):
            assert remember(each, number, str(number)) == each[number] == str(number)
            assert len(one) + len(other) <= 8
    memo.forget_all()
    assert (one, other) == ({}, {})


def test_memos_from_many_threads_stay_bounded(monkeypatch) -> None:
    monkeypatch.setattr(memo, "MOST", 16)
    memo.forget_all()
    memos: list[dict[int, int]] = [{} for _ in range(4)]
    sizes: list[int] = []

    def fill(seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(3000):
            number = chance.randrange(50)
            assert remember(chance.choice(memos), number, -number) == -number
            sizes.append(sum(map(len, memos)))

    together(*(lambda seed=seed: fill(seed) for seed in range(4)))

    assert max(sizes) <= 16
