"""The library's wrappers: when one may be planned again, and which one a step may plan."""

from __future__ import annotations

import weakref
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from attnplug_flashinfer.arrays import Buffers, Rows
    from attnplug_flashinfer.kinds import Kind


class PlanCopyEvent:
    """
    Marks the copy of a plan to the device, on the current stream.

    Without CUDA there are no events, and a copy is never known to be complete.
    """

    def __init__(self, device: torch.device) -> None:
        self._event: Any = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def record(self) -> None:
        """Mark this point of the current stream."""
        if self._event is not None:
            self._event.record()

    def is_complete(self) -> bool:
        """Whether the device is known to have passed the marked point."""
        return self._event is not None and bool(self._event.query())

    def wait(self) -> None:
        """Block the host until the device has passed the marked point."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()


class PlannedWrapper:
    """
    One of the library's wrappers.

    A plan goes to the device through pinned memory of the wrapper, which the next plan overwrites, whether the copy is
    complete or not. So `plan` first waits for the copy of the plan before. That copy is at the head of its step: it is
    complete long before, unless a host plans more than one step ahead.

    Args:
        kind: Its kind.
        device: The device that it runs on.
        buffers: What a graph reads; None for eager steps.

    Attributes:
        run: The library's `run`, as its kind calls it.
        plan_copied: Complete when the last plan is on the device.
    """

    def __init__(self, kind: Kind, device: torch.device, buffers: Buffers | None = None) -> None:
        self._kind = kind
        self._buffers = buffers
        with torch.inference_mode(mode=False):  # tensors made under it could not be written outside of it
            self._library = kind.make(buffers)
        self._is_planned = False
        self.run = kind.run_of(self._library)
        self.plan_copied = PlanCopyEvent(device)

    def plan(self, rows: Rows) -> None:
        """Plan for a step."""
        self.plan_copied.wait()
        if self._buffers is not None and self._is_planned:
            self._kind.replan(self._library, rows, self._buffers)
        else:
            self._kind.plan(self._library, rows)
            self._is_planned = True
        self.plan_copied.record()


class WrapperLease:
    """
    The right of one plan to a wrapper: nothing else plans that wrapper while the lease exists.

    Metadata holds plans, and plans hold leases. So steps that are planned together, and metadata that a host keeps,
    have a wrapper each.

    Attributes:
        wrapper: The wrapper.
    """

    __slots__ = ("__weakref__", "wrapper")

    def __init__(self, wrapper: PlannedWrapper) -> None:
        self.wrapper = wrapper


class WrapperPool:
    """
    The wrappers of one kind for eager steps: two in turn, where one step is built while another runs.

    A wrapper takes 8 MiB of device memory and 8 MiB of pinned memory.

    Args:
        kind: Their kind.
        device: The device that they run on.
    """

    def __init__(self, kind: Kind, device: torch.device) -> None:
        self._kind = kind
        self._device = device
        self._free: deque[PlannedWrapper] = deque()  # free for longest first
        self._leased: list[tuple[weakref.ref[WrapperLease], PlannedWrapper]] = []

    def take(self) -> WrapperLease:
        """Lease the wrapper that is free for longest, or a new one rather than wait for the only free one."""
        self._reclaim()
        free = self._free
        is_ready = len(free) > 1 or (free and free[0].plan_copied.is_complete())
        lease = WrapperLease(free.popleft() if is_ready else PlannedWrapper(self._kind, self._device))
        self._leased.append((weakref.ref(lease), lease.wrapper))
        return lease

    def _reclaim(self) -> None:
        """Take back the wrappers whose metadata no longer exists."""
        # This runs here, in the builder's own thread, and not when a lease is collected: that may be in any thread, and
        # in the middle of a `take`.
        leased = []
        for lease, wrapper in self._leased:
            if lease() is None:
                self._free.append(wrapper)
            else:
                leased.append((lease, wrapper))
        self._leased = leased
