"""Who may plan which of the library's wrappers, and when."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from attnplug_flashinfer.arrays import Buffers, Rows
    from attnplug_flashinfer.kinds import Kind


class PlanCopyEvent:
    """Tells whether what was launched up to some point is done. Where there are no events, nobody can say."""

    def __init__(self, device: torch.device) -> None:
        self._event: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def set(self) -> None:
        """Mark this point of the current stream."""
        if self._event is not None:
            self._event.record()

    def is_passed(self) -> bool:
        """Whether the marked point is known to be behind."""
        return self._event is not None and bool(self._event.query())

    def wait(self) -> None:
        """Let the host wait until it is."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()


class Wrapper:
    """
    One of the library's wrappers.

    A plan goes to the device through pinned memory of the wrapper, which its next plan overwrites, whether it has been
    copied or not. A plan here waits for the copy of the one before. That stands at the head of its step, so that it is
    long done where nobody plans more than one step ahead.

    Args:
        kind: What it is.
        device: Where it runs.
        buffers: What a graph reads; None for eager steps.

    Attributes:
        run: The library's `run`.
        fence: Passed when the last plan has been copied.
    """

    def __init__(self, kind: Kind, device: torch.device, buffers: Buffers | None = None) -> None:
        self._kind = kind
        self._buffers = buffers
        with torch.inference_mode(mode=False):  # a tensor that is made under it could not be written outside of it
            self._library = kind.make(buffers)
        self._is_planned = False
        self.run = self._library.run
        self.fence = PlanCopyEvent(device)

    def plan(self, rows: Rows) -> None:
        """Plan for a step."""
        self.fence.wait()
        if self._buffers is not None and self._is_planned:
            self._kind.replan(self._library, rows, self._buffers)
        else:
            self._kind.plan(self._library, rows)
            self._is_planned = True
        self.fence.set()


class WrapperLease:
    """
    A wrapper, as long as a plan lives in it: with the last reference to the plan it goes back.

    Steps that are planned together, and metadata that a host keeps, so have a wrapper each.

    Attributes:
        wrapper: The wrapper.
    """

    __slots__ = ("_free", "wrapper")

    def __init__(self, wrapper: Wrapper, free: deque[Wrapper]) -> None:
        self.wrapper = wrapper
        self._free = free

    def __del__(self) -> None:
        self._free.append(self.wrapper)


class WrapperPool:
    """
    The wrappers of one kind for eager steps: two in turn, where one step is built while another runs.

    Each takes 8 MiB on the device, and as much pinned memory.

    Args:
        kind: What they are.
        device: Where they run.
    """

    def __init__(self, kind: Kind, device: torch.device) -> None:
        self._kind = kind
        self._device = device
        self._free: deque[Wrapper] = deque()

    def take(self) -> WrapperLease:
        """Return the wrapper that has been free for longest, or a new one rather than wait for the only one."""
        free = self._free
        if len(free) > 1 or (free and free[0].fence.is_passed()):
            return WrapperLease(free.popleft(), free)
        return WrapperLease(Wrapper(self._kind, self._device), free)
