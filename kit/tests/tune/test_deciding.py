"""The statistics of tuning, on synthetic samples."""

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug.evidence import MeasuredTime, ProfileEntry, relative_times
from attnplug.request import Device, Requirements
from attnplug_kit.tune.deciding import (
    HOPELESS,
    LEAST_ROUNDS,
    differences,
    proposals,
    steady_rounds,
    summary,
    survivors,
    winner,
)

LAYER = Requirements(head_size=16, num_q_heads=4, num_kv_heads=2, dtype="float32")
EMPTY = ProfileEntry("2026-11-28", Device.cpu(), {}, LAYER, "decode", 4, 64, 1, "a", {"a": MeasuredTime(1.0)})


def run(times: dict[str, float], noise: float, seed: int) -> ProfileEntry:
    """Return the entry of a run: 9 rounds of each candidate with normal noise."""
    source = random.Random(seed)
    found = {}
    for id_, time in times.items():
        median, spread = summary([time * max(0.1, source.gauss(1.0, noise)) for _ in range(9)])
        found[id_] = MeasuredTime(median, spread, 9)
    return attrs.evolve(EMPTY, times=found)


SEEDS = st.integers(0, 2**32)


@given(st.floats(0.5, 2.0), SEEDS, SEEDS)
def test_two_runs_agree_where_the_margin_is_exceeded(ratio: float, first: int, second: int) -> None:
    noise = 0.002  # of a quiet device; the median of 9 rounds is known to 0.3 % then
    results = [winner(run({"a": 100.0, "b": 100.0 * ratio}, noise, seed)) for seed in (first, second)]
    if ratio < 0.96:
        assert results == [("b", True)] * 2
    elif ratio > 1 / 1.01 - 0.005:  # the default is as fast, or faster
        assert {id_ for id_, _ in results} == {"a"}


@given(st.floats(0.0, 0.3), SEEDS)
def test_noise_alone_rarely_beats_the_default(noise: float, seed: int) -> None:
    entries = [run({"a": 100.0, "b": 100.0}, noise, seed + n) for n in range(20)]
    assert sum(winner(entry)[0] == "b" for entry in entries) <= 8  # twice the spread is 1.35 standard deviations


@given(st.dictionaries(st.sampled_from("abcde"), st.floats(1, 1e3), min_size=1))
def test_the_fastest_survives_the_screening(times: dict[str, float]) -> None:
    found = survivors({id_: (time, time * 1.1, time * 3) for id_, time in times.items()})
    least = min(times.values())
    assert set(found) == {id_ for id_, time in times.items() if time <= HOPELESS * least}


@given(st.lists(st.floats(0.99, 1.01), min_size=LEAST_ROUNDS, max_size=25), st.data())
def test_rounds_in_which_the_clock_moved_do_not_count(probe: list[float], data: Any) -> None:
    moved = data.draw(st.sets(st.integers(0, len(probe) - 1), max_size=(len(probe) - 1) // 2 - 1))
    times = [time * (1.4 if index in moved else 1.0) for index, time in enumerate(probe)]
    assert set(steady_rounds(times)) == set(range(len(probe))) - moved


def test_all_rounds_count_where_no_clock_is_usual() -> None:
    assert steady_rounds([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == tuple(range(7))


@given(st.lists(st.floats(1, 2), min_size=1))
def test_a_summary_is_of_the_samples(samples: list[float]) -> None:
    median, spread = summary(samples)
    assert min(samples) <= median <= max(samples)
    assert 0 <= spread <= 1


def test_an_unknown_default_loses_to_the_fastest() -> None:
    entry = attrs.evolve(EMPTY, default="gone", times={"a": MeasuredTime(2.0), "b": MeasuredTime(1.0)})
    assert winner(entry) == ("b", True)


def times(**microseconds: float) -> ProfileEntry:
    return attrs.evolve(EMPTY, times={id_: MeasuredTime(time, 0.001, 9) for id_, time in microseconds.items()})


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"a": 100.0, "b": 90.0}, {"a": 100.0, "b": 91.0}, []),
        ({"a": 100.0, "b": 97.5}, {"a": 100.0, "b": 98.5}, [True]),  # 2.6 % and 1.5 %
        ({"a": 100.0, "b": 90.0}, {"a": 100.0, "b": 110.0}, [False]),
        ({"a": 100.0, "b": 90.0}, {"a": 100.0}, [False]),
        ({"a": 100.0, "b": 90.0, "c": 89.0}, {"a": 100.0, "b": 90.0, "c": 91.0}, [True]),
    ],
)
def test_two_runs_are_compared(one: dict[str, float], other: dict[str, float], expected: list[bool]) -> None:
    found, count = differences([times(**one)], [times(**other)])
    assert ([each.is_margin for each in found], count) == (expected, 1)
    assert differences([times(**one)], [attrs.evolve(times(**other), phase="prefill")]) == ((), 0)


COSTS = st.floats(1, 1e3)


@given(st.dictionaries(st.sampled_from("abcd"), st.tuples(COSTS, COSTS), min_size=1))
def test_a_proposed_pair_is_the_best_by_brute_force(costs: dict[str, tuple[float, float]]) -> None:
    entries = [
        attrs.evolve(times(**{id_: cost[place] for id_, cost in costs.items()}), phase=phase)
        for place, phase in enumerate(("decode", "prefill"))
    ]
    relative = [relative_times(entry) for entry in entries]
    score = {(a, b): 0.75 * relative[0][a] + 0.25 * relative[1][b] for a in costs for b in costs}
    single = min(score[id_, id_] for id_ in costs)
    best = min(score.values())

    found = proposals(LAYER, entries)

    assert bool(found) == (best < single * 0.98)
    if found:
        decode, rest = found[0].pair.split("+")
        assert score[decode, rest] == pytest.approx(best)
        assert found[0].gain == pytest.approx(1 - best / single)
        assert set(found[0].singles) == {decode, rest, found[0].best}
    assert proposals(LAYER, entries[:1]) == ()
    assert proposals(LAYER.evolve(phases=("decode",)), entries) == ()
