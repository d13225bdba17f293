"""Views of a cache are kept as long as it is the same, in the same place and form, and keep no memory."""

from __future__ import annotations

import gc
import pickle
import sys
from copy import copy, deepcopy
from weakref import ref

import pytest
import torch

from attnplug.contract import CacheViews


class Made:
    """Views that say how often they were made."""

    def __init__(self):
        self.count = 0
        self.views = CacheViews(self.make)

    def make(self, cache):
        self.count += 1
        return cache.unbind(0)

    def of(self, cache):
        """Return the views, once it is sure that they are what the cache's own would be."""
        found = self.views.of(cache)
        for view, own in zip(found, cache.unbind(0), strict=True):
            assert (view.data_ptr(), view.shape, view.stride()) == (own.data_ptr(), own.shape, own.stride())
        return found


@pytest.fixture
def made():
    return Made()


def test_they_are_made_once_for_a_cache(made):
    cache = torch.zeros(2, 3, 4)

    assert made.of(cache)[0] is made.of(cache)[0]
    assert made.count == 1


def test_what_is_written_into_them_is_in_the_cache(made):
    cache = torch.zeros(2, 3)
    made.of(cache)[1].fill_(5)

    assert cache.tolist() == [[0, 0, 0], [5, 5, 5]]


def test_another_cache_has_its_own(made):
    one, two = torch.zeros(2, 3), torch.zeros(2, 3)

    assert made.of(one)[0].data_ptr() != made.of(two)[0].data_ptr()
    assert made.count == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.set_(torch.zeros(2, 6)),
        lambda cache: setattr(cache, "data", torch.zeros(2, 6)),
        lambda cache: cache.resize_(2, 3),
        lambda cache: cache.as_strided_((2, 6), (1, 2)),
        lambda cache: cache.as_strided_((2, 5), (6, 1), 1),
    ],
    ids=["other memory", "other data", "fewer", "another order", "another start"],
)
def test_a_cache_that_was_changed_has_new_ones(made, change):
    cache = torch.zeros(2, 6)
    made.of(cache)
    change(cache)
    made.of(cache)

    assert made.count == 2


def test_they_go_with_the_cache(made):
    cache = torch.zeros(2, 3)
    view = ref(made.of(cache)[0])
    gc.disable()  # nothing waits for a collection
    try:
        del cache
        assert view() is None
    finally:
        gc.enable()


def test_a_cache_that_has_gone_takes_no_others_along(made):
    one, two = torch.zeros(2, 3), torch.zeros(2, 3)
    made.of(one)
    made.of(two)
    del one
    made.of(two)

    assert made.count == 2


@pytest.mark.parametrize("cache_mode", [True, False])
@pytest.mark.parametrize("first_mode", [True, False])
def test_modes_of_inference_do_not_matter(made, cache_mode, first_mode):
    with torch.inference_mode(cache_mode):
        cache = torch.zeros(2, 3)
    with torch.inference_mode(first_mode):
        keys = made.of(cache)[0]
    if cache_mode:
        with torch.inference_mode():
            keys.fill_(1)
    else:
        keys.fill_(1)

    assert cache.sum() == 3


@pytest.mark.parametrize(
    "duplicate", [copy, deepcopy, lambda kept: pickle.loads(pickle.dumps(kept))], ids=["copy", "deepcopy", "pickle"]
)
def test_a_copy_has_views_of_the_cache_that_it_is_given(duplicate):
    """The deep copy of a view would be other memory, and what is written into it lost."""
    cache, views = torch.zeros(2, 3), CacheViews(torch.unbind)
    views.of(cache)
    duplicate(views).of(cache)[1].fill_(5)

    assert cache.tolist() == [[0, 0, 0], [5, 5, 5]]


class Interrupted:
    """Runs something before one instruction of `CacheViews.of`, as a switch of threads would let another thread."""

    def __init__(self, instruction, run):
        self.instruction, self.run, self.count = instruction, run, 0

    def __call__(self, frame, event, _):
        if frame.f_code is not CacheViews.of.__code__:
            return None
        frame.f_trace_opcodes = True
        self.count += event == "opcode"
        if event == "opcode" and self.count == self.instruction:
            self.run()
        return self

    def call(self, function):
        """Return what a function returns."""
        outer = sys.gettrace()
        sys.settrace(self)
        try:
            return function()
        finally:
            sys.settrace(outer)


@pytest.mark.parametrize("before", [0, 1])
@pytest.mark.parametrize("between", [0, 1])
def test_another_thread_may_come_in_between_anywhere(before, between):
    caches, views = (torch.zeros(2, 3), torch.zeros(2, 3)), CacheViews(torch.unbind)

    def check(which):
        assert views.of(caches[which])[0].data_ptr() == caches[which].data_ptr()

    instructions = count = 1
    while count <= instructions:
        check(before)
        interrupted = Interrupted(count, lambda: check(between))
        interrupted.call(lambda: check(0))
        check(between)
        instructions, count = interrupted.count, count + 1
    assert count > 20


def test_memory_that_is_exchanged_is_held_until_the_next_call(made):
    cache = torch.zeros(2, 3)
    view = ref(made.of(cache)[0])
    cache.data = torch.zeros(2, 3)
    made.of(cache)

    assert view() is None
