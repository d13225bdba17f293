"""Clocks: what the host spends on a call, and what a device does."""

from __future__ import annotations

from itertools import count
from time import perf_counter
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Callable

_QUEUED = 16  # calls; a queue holds a thousand launches
_AHEAD = 8192  # a product of such matrices takes a GPU a millisecond or more, in which the host launches a layer


class Clock(Protocol):
    """Measures one call."""

    @property
    def what(self) -> str:
        """What its seconds are, in words."""

    def seconds(self, call: Callable[[Any], object], argument: Any) -> float:
        """Return how long ``call(argument)`` takes."""


@frozen
class CallClock:
    """The whole call, where the host does the work itself."""

    what: ClassVar[str] = "wall time"

    def seconds(self, call: Callable[[Any], object], argument: Any) -> float:
        """Return the time from before the call until it returns."""
        start = perf_counter()
        call(argument)
        return perf_counter() - start


class LaunchClock:
    """
    The host's part of a call on a device: launches. Nothing waits for the device within.

    Calls follow each other as layers do, and between some of them the device catches up: a full queue would block.
    """

    what: ClassVar[str] = "host time, launches alone"

    def __init__(self) -> None:
        self._calls = count()

    def seconds(self, call: Callable[[Any], object], argument: Any) -> float:
        """Return the time from before the call until it returns."""
        from torch.cuda import synchronize  # noqa: PLC0415 - only who measures pays for it

        if next(self._calls) % _QUEUED == 0:
            synchronize()
        start = perf_counter()
        call(argument)
        return perf_counter() - start


class DeviceClock:
    """The device's part, between two events. It is kept busy until both are recorded, so that launches do not count."""

    what: ClassVar[str] = "device time"

    def __init__(self) -> None:
        import torch  # noqa: PLC0415 - as above

        self._work = torch.ones(_AHEAD, _AHEAD, dtype=torch.bfloat16, device="cuda")

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
    """Return what measures the host's part."""
    return LaunchClock() if device_type == "cuda" else CallClock()


def work_clock(device_type: str) -> Clock:
    """Return what measures the work itself."""
    return DeviceClock() if device_type == "cuda" else CallClock()
