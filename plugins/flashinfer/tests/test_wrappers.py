"""Who plans which wrapper when: none whose plan is still needed, or still on its way to the device."""

from __future__ import annotations

from collections import deque

import pytest
import torch

from tests.backends.harness import Harness

pytestmark = pytest.mark.usefixtures("fakes")


class Kind:
    """Makes wrappers that write down what is asked of them."""

    def __init__(self) -> None:
        self.made: list[Library] = []

    def make(self, buffers):
        assert not torch.is_inference_mode_enabled()
        self.made.append(Library())
        return self.made[-1]

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
    """An event that a test completes."""

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
    from attnplug_flashinfer import wrappers  # noqa: PLC0415 - the fake has to be active

    monkeypatch.setattr(wrappers, "PlanCopyEvent", PlanCopyEvent)
    return wrappers


CPU = torch.device("cpu")


def test_a_wrapper_is_taken_by_one_plan_at_a_time(wrappers) -> None:
    pool = wrappers.WrapperPool(Kind(), CPU)
    first, second = pool.take(), pool.take()

    assert first.wrapper is not second.wrapper


def test_it_goes_back_with_the_last_reference_to_the_plan(wrappers) -> None:
    kind = Kind()
    pool = wrappers.WrapperPool(kind, CPU)
    lease = pool.take()
    wrapper = lease.wrapper
    del lease

    assert pool.take().wrapper is wrapper
    assert len(kind.made) == 1


def test_steps_that_overlap_take_two_in_turn(wrappers) -> None:
    kind, taken = Kind(), []
    pool, step = wrappers.WrapperPool(kind, CPU), None
    for _ in range(6):
        step = pool.take()  # while the one before is still held
        taken.append(step.wrapper)

    assert len(kind.made) == 2
    assert taken[0] is taken[2] is taken[4]
    assert taken[1] is taken[3] is taken[5]


def test_rather_than_wait_for_the_only_one_a_second_is_made(wrappers) -> None:
    kind = Kind()
    pool = wrappers.WrapperPool(kind, CPU)
    first = pool.take().wrapper
    first.plan_copied.is_copied = False  # its plan is not on the device yet, though nobody needs it any more

    assert pool.take().wrapper is not first
    assert len(kind.made) == 2


def test_with_two_free_the_older_is_waited_for(wrappers) -> None:
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


def test_a_plan_waits_for_the_copy_of_the_one_before_and_marks_its_own(wrappers) -> None:
    kind = Kind()
    wrapper = wrappers.PlannedWrapper(kind, CPU)
    wrapper.plan("first")
    wrapper.plan("second")

    assert wrapper.plan_copied.log == ["wait", "record"] * 2
    assert kind.made[0].log == [("plan", "first"), ("plan", "second")]


def test_a_wrapper_that_is_made_under_inference_mode_can_be_planned_outside(wrappers) -> None:
    with torch.inference_mode():
        wrapper = wrappers.PlannedWrapper(Kind(), CPU)

    wrapper.plan("rows")


def test_a_graphs_wrapper_is_planned_and_then_planned_again(wrappers) -> None:
    kind = Kind()
    wrapper = wrappers.PlannedWrapper(kind, CPU, buffers=object())
    wrapper.plan("first")
    wrapper.plan("second")

    assert kind.made[0].log == [("plan", "first"), ("replan", "second")]


def test_without_events_nobody_knows_that_a_copy_is_done() -> None:
    from attnplug_flashinfer.wrappers import PlanCopyEvent as Real  # noqa: PLC0415 - the fake has to be active

    event = Real(CPU)
    event.record()
    event.wait()

    assert not event.is_complete()


def test_an_event_is_waited_for_when_it_has_to_be(monkeypatch) -> None:
    from attnplug_flashinfer.wrappers import PlanCopyEvent as Real  # noqa: PLC0415 - the fake has to be active

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


def test_the_next_step_is_built_while_plans_are_in_flight(load_fake, journal) -> None:
    setting = Harness(load_fake)
    with journal.pending_copies():
        first = setting.builder.build(setting.batch([1, 5], [9, 5]))
        setting.forward(first)
        second = setting.builder.build(setting.batch([1, 1, 7], [9, 17, 7]))
        setting.forward(second)

    assert len({call.wrapper for call in journal.plans}) == 4


def test_metadata_that_is_kept_can_be_run_after_any_number_of_builds(load_fake) -> None:
    setting = Harness(load_fake)
    batches = [setting.batch([1] * count, list(range(9, 9 + count))) for count in (1, 2, 3, 4)]
    kept = [setting.builder.build(batch) for batch in batches]
    outputs = [setting.forward(metadata) for metadata in kept]

    again = [
        setting.forward(setting.builder.build(setting.batch([1] * count, list(range(9, 9 + count)))))
        for count in (1, 2, 3, 4)
    ]
    assert all(torch.equal(*pair) for pair in zip(outputs, again, strict=True))
