"""The times of a request, by a clock that the test sets."""

from __future__ import annotations

import pytest

from attnplug_transformers.engine import Engine, RequestMetrics, scheduler
from attnplug_transformers.engine import request as request_module
from hosts.transformers.tests.models import model


@pytest.fixture
def clock(monkeypatch):
    """Return a list whose last element is the time."""
    times = [100.0]
    for module in (request_module, scheduler):
        monkeypatch.setattr(module, "perf_counter", lambda: times[-1])
    return times


def test_times_are_from_the_submission_on(host, clock):
    with Engine(model("llama"), max_num_reqs=1, max_num_tokens=4, block_size=4) as engine:
        first = engine.submit([1, 2, 3], max_new_tokens=2)
        second = engine.submit([1, 2, 3, 4, 5, 6], max_new_tokens=3)
        assert second.metrics == RequestMetrics(
            queue_time=None,
            time_to_first_token=None,
            inter_token_latencies=(),
            total_time=None,
            num_prompt_tokens=6,
            num_cached_tokens=0,
            num_new_tokens=0,
            num_preemptions=0,
        )
        for now in (101, 103, 106, 110, 115, 121):
            clock.append(float(now))
            engine.step()

        assert first.metrics.queue_time == 1
        assert first.metrics.time_to_first_token == 1
        assert first.metrics.inter_token_latencies == (2,)
        assert second.metrics.queue_time == 6  # the prompt is computed in two chunks
        assert second.metrics.time_to_first_token == 10
        assert second.metrics.inter_token_latencies == (5, 6)
        assert second.metrics.mean_inter_token_latency == 5.5
        assert second.metrics.total_time == 21
        assert second.metrics.num_new_tokens == 3


def test_one_token_has_no_latency_between_tokens(host, clock):
    with Engine(model("llama")) as engine:
        (request,) = engine.generate([[1]], max_new_tokens=1, return_requests=True)

    assert request.metrics.mean_inter_token_latency is None
    assert request.metrics.total_time == 0


def test_preemptions_and_prefixes_count(host):
    prompts = [[*range(index, index + 12)] for index in (1, 50, 100)]
    with Engine(model("llama"), block_size=4, num_blocks=12, max_num_reqs=3) as engine:
        found = engine.generate(prompts, max_new_tokens=14, return_requests=True)
        assert sum(request.metrics.num_preemptions for request in found) == engine.stats.preemptions > 0
        assert [len(request.metrics.inter_token_latencies) for request in found] == [13] * 3
        first, again = (
            engine.generate([[9] * 12], max_new_tokens=1, return_requests=True)[0].metrics for _ in range(2)
        )

    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 8)
