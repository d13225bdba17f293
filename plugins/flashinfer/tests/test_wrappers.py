"""Leases of wrappers: no wrapper is planned while its plan is in use or still being copied to the device."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from tests.backends.harness import Harness

pytestmark = pytest.mark.usefixtures("fakes")


class Kind:
    """Makes wrappers that log their calls."""

    def __init__(self) -> None:
        self.made: list[Library] = []

    def make(self, buffers):
        assert not torch.is_inference_mode_enabled()
        self.made.append(Library())
        return self.made[-1]

    def run_of(self, library):
        return library.run

    def plan(self, library, rows) -> None:
        library.log.append(("plan", rows))

    def replan(self, library, rows, buffers) -> None:
        library.log.append(("replan", rows))


class Library:
    def __init__(self) -> None:
        self.log: list = []

    def run(self) -> None:
        """Run nothing."""


class PlanCopyEvent:
    """An event whose completion a test decides."""

    log: list

    def __init__(self, device) -> None:
        self.is_copied = True
        self.log = []

    def record(self) -> None:
        self.log.append("record")

    def is_complete(self) -> bool:
        return self.is_copied

    def wait(self) -> None:
        self.log.append("wait")


@pytest.fixture
def wrappers(fakes, monkeypatch):
    from attnplug_flashinfer import wrappers  # noqa: PLC0415 - requires the fake

    monkeypatch.setattr(wrappers, "PlanCopyEvent", PlanCopyEvent)
    return wrappers


CPU = torch.device("cpu")


def test_a_wrapper_has_one_lease_at_a_time(wrappers) -> None:
    pool = wrappers.WrapperPool(Kind(), CPU)
    first, second = pool.take(), pool.take()

    assert first.wrapper is not second.wrapper


def test_a_wrapper_is_reused_after_its_lease(wrappers) -> None:
    kind = Kind()
    pool = wrappers.WrapperPool(kind, CPU)
    lease = pool.take()
    wrapper = lease.wrapper
    del lease

    assert pool.take().wrapper is wrapper
    assert len(kind.made) == 1


def test_overlapping_steps_alternate_between_two_wrappers(wrappers) -> None:
    kind, taken = Kind(), []
    pool, step = wrappers.WrapperPool(kind, CPU), None
    for _ in range(6):
        step = pool.take()  # before the lease of the last step ends
        taken.append(step.wrapper)

    assert len(kind.made) == 2
    assert taken[0] is taken[2] is taken[4]
    assert taken[1] is taken[3] is taken[5]


def test_a_second_wrapper_is_made_rather_than_wait(wrappers) -> None:
    kind = Kind()
    pool = wrappers.WrapperPool(kind, CPU)
    first = pool.take().wrapper
    first.plan_copied.is_copied = False  # the copy of its plan is not complete, though its lease has ended

    assert pool.take().wrapper is not first
    assert len(kind.made) == 2


def test_with_two_free_wrappers_a_plan_waits_for_the_older(wrappers) -> None:
    kind = Kind()
    pool = wrappers.WrapperPool(kind, CPU)
    first, second = pool.take(), pool.take()
    older, younger = first.wrapper, second.wrapper
    older.plan_copied.is_copied = younger.plan_copied.is_copied = False
    del first, second
    lease = pool.take()
    lease.wrapper.plan("rows")

    assert lease.wrapper is older
    assert older.plan_copied.log == ["wait", "record"]
    assert len(kind.made) == 2


def test_a_plan_waits_for_the_copy_of_the_last_plan(wrappers) -> None:
    kind = Kind()
    wrapper = wrappers.PlannedWrapper(kind, CPU)
    wrapper.plan("first")
    wrapper.plan("second")

    assert wrapper.plan_copied.log == ["wait", "record"] * 2
    assert kind.made[0].log == [("plan", "first"), ("plan", "second")]


def test_a_wrapper_made_under_inference_mode_is_planned_outside(wrappers) -> None:
    kind = Kind()
    with torch.inference_mode():
        wrapper = wrappers.PlannedWrapper(kind, CPU)

    wrapper.plan("rows")

    assert kind.made[0].log == [("plan", "rows")]


def test_the_wrapper_of_a_graph_is_replanned(wrappers) -> None:
    kind = Kind()
    wrapper = wrappers.PlannedWrapper(kind, CPU, buffers=object())
    wrapper.plan("first")
    wrapper.plan("second")

    assert kind.made[0].log == [("plan", "first"), ("replan", "second")]


def test_without_events_no_copy_is_known_to_be_complete() -> None:
    from attnplug_flashinfer.wrappers import PlanCopyEvent as Real  # noqa: PLC0415 - requires the fake

    event = Real(CPU)
    event.record()
    event.wait()

    assert not event.is_complete()


def test_waiting_blocks_only_before_completion(monkeypatch) -> None:
    from attnplug_flashinfer.wrappers import PlanCopyEvent as Real  # noqa: PLC0415 - requires the fake

    done, log = deque([False, True]), []

    class Event:
        record = staticmethod(lambda: log.append("record"))
        query = staticmethod(done.popleft)
        synchronize = staticmethod(lambda: log.append("synchronize"))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    event = Real(torch.device("cuda"))
    event.record()
    event.wait()
    event.wait()

    assert log == ["record", "synchronize"]


def test_the_next_step_is_built_while_plans_are_copied(load_fake, journal) -> None:
    harness = Harness(load_fake)
    with journal.pending_copies():
        first = harness.builder.build(harness.batch([1, 5], [9, 5]))
        harness.forward(first)
        second = harness.builder.build(harness.batch([1, 1, 7], [9, 17, 7]))
        harness.forward(second)

    assert len({call.wrapper for call in journal.plans}) == 4


def test_kept_metadata_runs_after_further_builds(load_fake) -> None:
    harness = Harness(load_fake)
    batches = [harness.batch([1] * count, list(range(9, 9 + count))) for count in (1, 2, 3, 4)]
    kept = [harness.builder.build(batch) for batch in batches]
    outputs = [harness.forward(metadata) for metadata in kept]

    again = [
        harness.forward(harness.builder.build(harness.batch([1] * count, list(range(9, 9 + count)))))
        for count in (1, 2, 3, 4)
    ]
    assert all(torch.equal(*pair) for pair in zip(outputs, again, strict=True))
