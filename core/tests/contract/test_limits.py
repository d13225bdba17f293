from __future__ import annotations

import pytest

from attnplug.contract import Limits, Parallel
from attnplug.errors import LimitsError
from core.tests.contract.world import ToyBackend, limits, make_backend, refused


@pytest.mark.parametrize("name", ["max_num_reqs", "max_num_tokens", "max_seq_len", "max_num_splits"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True])
def test_bounds_are_positive(name, value):
    with refused(LimitsError, problem=f"{name}={value!r}", expected="a whole number from 1 to 2147483647"):
        limits(**{name: value})


@pytest.mark.parametrize("value", [1, 0, 2.5])
def test_a_cache_has_a_block_beside_the_null_block(value):
    with refused(LimitsError, problem=f"num_blocks={value!r}", expected="null block"):
        limits(num_blocks=value)


def test_capture_sizes_are_sorted_and_within_the_tokens():
    assert limits(capture_sizes=[8, 1, 8, 4]).capture_sizes == (1, 4, 8)
    for sizes in ([0], [65], ["8"]):
        with refused(LimitsError, problem="capture_sizes=", expected="max_num_tokens=64"):
            limits(capture_sizes=sizes)


def test_a_graph_level_is_known():
    with refused(LimitsError, problem="cudagraph='sometimes'", expected="'uniform_batch'"):
        limits(cudagraph="sometimes")


@pytest.mark.parametrize(
    ("ranks", "given"),
    [
        ({"tp_size": 0}, "tp_size=0"),
        ({"dcp_size": -1}, "dcp_size=-1"),
        ({"dcp_interleave": 0}, "dcp_interleave=0"),
        ({"tp_rank": 2, "tp_size": 2}, "tp_rank=2"),
        ({"dcp_rank": -1, "dcp_size": 2}, "dcp_rank=-1"),
        ({"tp_rank": 0.0}, "tp_rank=0.0"),
    ],
)
def test_ranks_are_below_their_size(ranks, given):
    with refused(LimitsError, problem=given):
        Parallel(**ranks)


def test_limits_fit_the_agreement():
    backend = make_backend(agreed_graphs="uniform_batch", batch_invariant=True, dcp_size=2)

    state = backend.make_state(
        limits(cudagraph="single_token_decode", capture_sizes=[1, 2], batch_invariant=True), Parallel(dcp_size=2)
    )

    assert (state.limits.capture_sizes, state.parallel.dcp_size, state.backend) == ((1, 2), 2, backend)


@pytest.mark.parametrize(
    ("changes", "ranks", "given", "allowed"),
    [
        ({"cudagraph": "uniform_batch"}, {}, "cudagraph='uniform_batch'", "captures up to 'never'"),
        ({"capture_sizes": [1]}, {}, "capture_sizes=(1,)", "without CUDA graphs"),
        ({"batch_invariant": True}, {}, "batch_invariant=True", "was not requested"),
        ({}, {"dcp_size": 2}, "dcp_size=2", "dcp_size=1 was negotiated"),
    ],
)
def test_limits_that_were_not_negotiated_are_refused(changes, ranks, given, allowed):
    with refused(LimitsError, problem=given, expected=allowed, fix="select again"):
        make_backend().make_state(limits(**changes), Parallel(**ranks))


def test_a_split_kv_limit_is_kept_or_refused():
    class Keeping(ToyBackend):
        supports_max_num_splits = True

    assert make_backend(Keeping).make_state(limits(max_num_splits=4)).limits.max_num_splits == 4
    with refused(
        LimitsError,
        problem="max_num_splits=4",
        expected="toy/plain does not support a split-KV limit",
        fix="leave max_num_splits out",
    ):
        make_backend().make_state(limits(max_num_splits=4))


def test_limits_compare_and_hash_as_values():
    assert limits() == limits()
    assert hash(limits()) == hash(limits())
    assert limits() != Limits(max_num_reqs=1, max_num_tokens=1, max_seq_len=1)
