"""Several calls measured in turn, so that whatever else the machine does meets all of them alike."""

from __future__ import annotations

import gc
import random
import statistics
from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attnplug_kit.bench.clock import Clock

_SECONDS_PER_REPEAT: Final = 0.2
_WARM: Final = 3
_CLOSE: Final = 0.01
_FEWEST: Final = 6  # of fewer, not even the smallest and the largest enclose the median with 95 %


@frozen
class Contender:
    """
    A call that is measured.

    Attributes:
        call: The call.
        prepare: Returns its argument, anew for each sample; not measured.
    """

    call: Callable[[Any], object]
    prepare: Callable[[], Any] = lambda: None


@frozen
class Samples:
    """
    What was measured.

    Attributes:
        seconds: Of each call by name; samples of equal index were taken one after another.
        steady: Whether each median was known to 1 % when measuring ended.
    """

    seconds: Mapping[str, tuple[float, ...]]
    steady: bool

    def over(self, name: str, other: str) -> tuple[float, ...]:
        """Return the seconds of one call less those of another, round by round."""
        return tuple(a - b for a, b in self._pairs(name, other))

    def ratio(self, name: str, other: str) -> tuple[float, ...]:
        """Return one call's seconds in units of another's, round by round."""
        return tuple(a / b for a, b in self._pairs(name, other))

    def _pairs(self, name: str, other: str) -> list[tuple[float, float]]:
        return list(zip(self.seconds[name], self.seconds[other], strict=True))


def interleaved(contenders: Mapping[str, Contender], clock: Clock, repeats: int) -> Samples:
    """
    Measure until the medians are steady, but no longer than `repeats` fifths of a second.

    Each round measures every call once, each time in another order: what a call leaves in the processor's caches helps
    the next. Garbage is collected before, and not meanwhile.

    Args:
        contenders: The calls, by name.
        clock: What measures.
        repeats: Least number of rounds, unless time runs out before.
    """
    for one in list(contenders.values()) * _WARM:
        clock.seconds(one.call, one.prepare())
    gc.collect()
    gc.disable()
    try:
        return _rounds(contenders, clock, repeats)
    finally:
        gc.enable()


def _rounds(contenders: Mapping[str, Contender], clock: Clock, repeats: int) -> Samples:
    series: dict[str, list[float]] = {name: [] for name in contenders}
    order, chance, look = list(contenders), random.Random(0), repeats
    end, steady = perf_counter() + repeats * _SECONDS_PER_REPEAT, False
    for rounds in count(1):
        chance.shuffle(order)
        for name in order:
            series[name].append(clock.seconds(contenders[name].call, contenders[name].prepare()))
        if rounds >= look:  # looking sorts, and so comes less and less often
            steady, look = all(map(is_steady, series.values())), look + look // 8 + 1
        if steady or perf_counter() > end:
            break
    return Samples({name: tuple(seconds) for name, seconds in series.items()}, steady)


def is_steady(seconds: list[float]) -> bool:
    """Whether the median is known to 1 %: the 95 % interval that the samples' ranks give lies so close around it."""
    if len(seconds) < _FEWEST:
        return False
    ordered, middle, reach = sorted(seconds), len(seconds) / 2, 0.98 * len(seconds) ** 0.5
    low, high = ordered[max(0, int(middle - reach))], ordered[min(len(ordered) - 1, int(middle + reach))]
    median = statistics.median(ordered)
    return high - median <= _CLOSE * median and median - low <= _CLOSE * median
