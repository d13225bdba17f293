"""What a cache of decisions keeps, for which calls, and for how long."""

from __future__ import annotations

import gc
import threading
import weakref
from itertools import count

import pytest
import torch

import attnplug
from attnplug.dense import DecisionCache, attention, clear_decisions
from attnplug.errors import NoBackendError

CPU, META = torch.device("cpu"), torch.device("meta")


class Decision:
    pass


def numbers(cache, call="call", device=CPU, sources=(), times=2):
    """Return the decisions of repeated calls; each new one has the next number."""
    source = cache.__dict__.setdefault("numbers", count())
    return [cache.get(call, device, source.__next__, sources) for _ in range(times)]


def test_a_call_is_decided_once_for_a_device_and_a_scope() -> None:
    cache = DecisionCache()

    assert numbers(cache) == [0, 0]
    assert numbers(cache, "other") == [1, 1]
    assert numbers(cache, device=META) == [2, 2]
    with attnplug.using(backend="torch"):
        assert numbers(cache) == [3, 3]
    assert numbers(cache) == [0, 0]


def test_decisions_of_a_former_state_are_dropped() -> None:
    cache, unscoped = DecisionCache(), DecisionCache(scoped=False)
    numbers(cache, "other"), numbers(cache), numbers(unscoped)
    attnplug.refresh()

    assert numbers(cache) == [2, 2]
    assert len(cache) == 1
    assert numbers(unscoped) == [0, 0]


def test_the_oldest_decision_makes_room() -> None:
    cache = DecisionCache(2)

    assert [numbers(cache, call)[0] for call in "abcbca"] == [0, 1, 2, 1, 2, 3]
    assert len(cache) == 2


def test_threads_have_separate_plans_and_share_other_decisions() -> None:
    own, shared, found = DecisionCache(per_thread=True), DecisionCache(), []
    numbers(own), numbers(shared)

    thread = threading.Thread(target=lambda: found.extend([numbers(own), numbers(shared)]))
    thread.start()
    thread.join()

    assert found == [[1, 1], [0, 0]]


def test_a_decision_is_derived_from_its_sources() -> None:
    cache, tensor, module = DecisionCache(), torch.zeros(3), torch.nn.Linear(1, 1)

    assert numbers(cache, sources=(tensor, None)) == [0, 0]
    assert numbers(cache, sources=(None, tensor)) == [1, 1]
    assert numbers(cache, sources=(tensor.clone(), None), times=1) == [2]
    assert numbers(cache, sources=(module,)) == [3, 3]
    tensor[1] = 1
    assert numbers(cache, sources=(tensor, None)) == [4, 4]


def test_nothing_is_kept_for_a_tensor_on_a_device() -> None:
    """Its values cannot be compared without waiting."""
    assert numbers(DecisionCache(), sources=(torch.zeros(3, device="meta"),)) == [0, 1]


def test_a_decision_goes_with_its_source() -> None:
    cache, tensor = DecisionCache(), torch.zeros(3)
    numbers(cache, sources=(tensor,))

    gone = weakref.ref(tensor)
    del tensor
    gc.collect()

    assert gone() is None
    assert len(cache) == 0


def test_weak_decisions_last_as_long_as_they_are_held() -> None:
    cache = DecisionCache(weak=True)
    held = cache.get("call", CPU, Decision)

    assert cache.get("call", CPU, Decision) is held
    del held
    gc.collect()
    assert len(cache) == 0


def test_a_refusal_is_kept_without_the_tensors_of_its_call() -> None:
    cache, counts, tensor = DecisionCache(refusals=(NoBackendError,)), count(), torch.zeros(1, 3, 2, 8)

    errors = [refusal(cache, counts, tensor) for _ in range(3)]

    assert next(counts) == 1
    assert len({str(error) for error in errors}) == 1
    assert {str(error.explanation) for error in errors} == {str(errors[0].explanation)}
    assert len(set(map(id, errors))) == 3
    gone = weakref.ref(tensor)
    del tensor, errors
    gc.collect()
    assert gone() is None
    assert len(cache) == 1


def refusal(cache, counts, tensor):
    """Return the error of a call that no backend serves."""

    def refuse():
        next(counts)
        attention(tensor, tensor, tensor, backend="flashinfer")

    with pytest.raises(NoBackendError, match="flashinfer") as caught:
        cache.get("call", CPU, refuse)
    return caught.value


def test_other_errors_are_raised_and_not_kept() -> None:
    cache = DecisionCache(refusals=(NoBackendError,))

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            cache.get("call", CPU, lambda: 1 // 0)
    assert len(cache) == 0


def test_everything_is_forgotten_in_every_thread() -> None:
    cache, ready, cleared, found = DecisionCache(per_thread=True), threading.Event(), threading.Event(), []

    def work():
        numbers(cache)
        ready.set()
        cleared.wait(10)
        found.append(len(cache))

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(10)
    numbers(cache)
    clear_decisions()
    cleared.set()
    thread.join()

    assert found == [0]
    assert len(cache) == 0
