"""Calls that are measured in turn, and the clocks that measure them."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from attnplug_kit.bench.timing import (  # noqa: E402 - without torch there is nothing to measure
    CallClock,
    Contender,
    LaunchClock,
    Samples,
    host_clock,
    interleaved,
    is_steady,
    work_clock,
)
from kit.tests.bench.fakes import Ticks  # noqa: E402


def test_every_round_measures_each_call_with_a_new_argument() -> None:
    seen: list[tuple[str, int]] = []
    numbers = iter(range(10**6))
    contenders = {
        name: Contender(lambda number, name=name: seen.append((name, number)), lambda: next(numbers)) for name in "abc"
    }

    samples = interleaved(contenders, Ticks(), 10)

    rounds = [{name for name, _ in seen[i : i + 3]} for i in range(0, len(seen), 3)]
    assert all(names == {"a", "b", "c"} for names in rounds)
    assert len({number for _, number in seen}) == len(seen)
    assert samples.steady
    assert {len(seconds) for seconds in samples.seconds.values()} == {10}
    assert len({tuple(name for name, _ in seen[i : i + 3]) for i in range(9, len(seen), 3)}) > 1


def test_overheads_and_ratios_are_taken_round_by_round() -> None:
    samples = Samples({"direct": (1.0, 2.0), "ours": (3.0, 3.0)}, steady=True)

    assert samples.over("ours", "direct") == (2.0, 1.0)
    assert samples.ratio("ours", "direct") == (3.0, 1.5)


@pytest.mark.parametrize(
    ("seconds", "steady"),
    [([1.0] * 6, True), ([1.0] * 5, False), ([1.0, 2.0] * 20, False), ([1.0] * 100 + [9.0] * 10, True)],
)
def test_a_median_is_steady_once_its_interval_is_narrow(seconds: list[float], steady: bool) -> None:
    assert is_steady(seconds) is steady


def test_the_cpu_is_timed_by_wall_time() -> None:
    assert (host_clock("cpu").what, work_clock("cpu").what) == ("wall time", "wall time")
    assert CallClock().seconds(lambda x: x, None) >= 0
    assert host_clock("cuda").what == "host time, launches alone"


def test_the_launch_clock_waits_for_the_device_every_few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: seen.append("wait"))
    clock = LaunchClock()

    for _ in range(33):
        assert clock.seconds(seen.append, "call") >= 0

    assert seen[:3] == ["wait", "call", "call"]
    assert (seen.count("wait"), seen.count("call"), seen[-2:]) == (3, 33, ["wait", "call"])
