"""
Clocks, and calls measured in turn: other work of the machine then affects all of them alike.

A clock measures the host's part of a call, or the device's.
"""

from __future__ import annotations

import gc
import random
import statistics
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_CALLS_PER_WAIT: Final = 16  # the launch queue holds about a thousand launches, and a layer is a few dozen
_BUSY_SIZE: Final = 8192  # a product of two such matrices keeps a GPU busy for a millisecond, while a layer is launched
_SECONDS_PER_REPEAT: Final = 0.2
_WARM_UP_CALLS: Final = 3
_STEADY: Final = 0.01
_FEWEST_SAMPLES: Final = 6  # of fewer, not even the smallest and the largest enclose the median with 95 % confidence


class Clock(Protocol):
    """Measures one call."""

    @property
    def what(self) -> str:
        """What its seconds are, in words."""

    def seconds(self, call: Callable[[Any], object], argument: Any) -> float:
        """Return how long ``call(argument)`` takes."""


@frozen
class CallClock:
    """The complete call, where the CPU does the work itself."""

    what: ClassVar[str] = "wall time"

    def seconds(self, call: Callable[[Any], object], argument: Any) -> float:
        """Return the time until the call returns."""
        start = perf_counter()
        call(argument)
        return perf_counter() - start


class LaunchClock:
    """
    The host's part of a call on a device: its launches.

    Calls follow each other as layers do. Every few calls the clock waits for the device between them, since a full
    launch queue would block the host.
    """

    what: ClassVar[str] = "host time, launches alone"

    def __init__(self) -> None:
        self._calls = count()

    def seconds(self, call: Callable[[Any], object], argument: Any) -> float:
        """Return the time until the call returns; nothing in it waits for the device."""
        from torch.cuda import synchronize  # noqa: PLC0415 - torch takes a second to import

        if next(self._calls) % _CALLS_PER_WAIT == 0:
            synchronize()
        start = perf_counter()
        call(argument)
        return perf_counter() - start


class DeviceClock:
    """The device's part of a call, between two events. It is busy until both are queued: launches are not counted."""

    what: ClassVar[str] = "device time"

    def __init__(self) -> None:
        import torch  # noqa: PLC0415 - as above

        self._work = torch.ones(_BUSY_SIZE, _BUSY_SIZE, dtype=torch.bfloat16, device="cuda")

    def seconds(self, call: Callable[[Any], object], argument: Any) -> float:
        """Return the time that the device spends on the call."""
        import torch  # noqa: PLC0415 - as above

        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.mm(self._work, self._work)
        start.record()
        call(argument)
        end.record()
        torch.cuda.synchronize()
        return float(start.elapsed_time(end)) / 1e3


def host_clock(device_type: str) -> Clock:
    """Return the clock of the host's part."""
    return LaunchClock() if device_type == "cuda" else CallClock()


def work_clock(device_type: str) -> Clock:
    """Return the clock of the work itself."""
    return DeviceClock() if device_type == "cuda" else CallClock()


@frozen
class Contender:
    """
    A call that is measured.

    Attributes:
        call: The call.
        prepare: Returns its argument, a new one for each sample; not measured.
    """

    call: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None


@frozen
class Samples:
    """
    The measured times.

    Attributes:
        seconds: Of each call by name; samples of equal index were taken in one round.
        steady: Whether each median was known to 1 % at the end.
    """

    seconds: Mapping[str, tuple[float, ...]]
    steady: bool

    def over(self, name: str, other: str) -> tuple[float, ...]:
        """Return the seconds of one call minus those of another, round by round."""
        return tuple(a - b for a, b in self._pairs(name, other))

    def ratio(self, name: str, other: str) -> tuple[float, ...]:
        """Return the seconds of one call divided by those of another, round by round."""
        return tuple(a / b for a, b in self._pairs(name, other))

    def _pairs(self, name: str, other: str) -> list[tuple[float, float]]:
        return list(zip(self.seconds[name], self.seconds[other], strict=True))


def interleaved(contenders: Mapping[str, Contender], clock: Clock, repeats: int) -> Samples:
    """
    Measure calls in turn until their medians are steady, but no longer than `repeats` fifths of a second.

    Each round measures every call once, in a random order: what a call leaves in the processor's caches helps the next.
    Garbage is collected before, and not during the measurement.

    Args:
        contenders: The calls, by name.
        clock: What measures.
        repeats: Least number of rounds, unless time runs out before.
    """
    for one in list(contenders.values()) * _WARM_UP_CALLS:
        clock.seconds(one.call, one.prepare())
    gc.collect()
    gc.disable()
    try:
        return _rounds(contenders, clock, repeats)
    finally:
        gc.enable()


def _rounds(contenders: Mapping[str, Contender], clock: Clock, repeats: int) -> Samples:
    series: dict[str, list[float]] = {name: [] for name in contenders}
    order, generator, check_at = list(contenders), random.Random(0), repeats
    end, steady = perf_counter() + repeats * _SECONDS_PER_REPEAT, False
    for rounds in count(1):
        generator.shuffle(order)
        for name in order:
            series[name].append(clock.seconds(contenders[name].call, contenders[name].prepare()))
        if rounds >= check_at:  # a check sorts all samples: it is repeated less and less often
            steady, check_at = all(map(is_steady, series.values())), check_at + check_at // 8 + 1
        if steady or perf_counter() > end:
            break
    return Samples({name: tuple(seconds) for name, seconds in series.items()}, steady)


def is_steady(seconds: list[float]) -> bool:
    """Whether the median is known to 1 %: the 95 % interval from the samples' ranks is that narrow around it."""
    if len(seconds) < _FEWEST_SAMPLES:
        return False
    # The ranks of the interval are n/2 -+ 1.96 * sqrt(n)/2, from the normal approximation of the binomial distribution.
    ordered, middle, reach = sorted(seconds), len(seconds) / 2, 0.98 * len(seconds) ** 0.5
    low, high = ordered[max(0, int(middle - reach))], ordered[min(len(ordered) - 1, int(middle + reach))]
    median = statistics.median(ordered)
    return high - median <= _STEADY * median and median - low <= _STEADY * median
