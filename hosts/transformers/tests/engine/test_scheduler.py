from __future__ import annotations

from itertools import count

import pytest

from attnplug.contract import Limits
from attnplug.errors import BatchError, CacheError, LimitsError
from attnplug_transformers.engine.request import Request
from attnplug_transformers.engine.scheduler import Scheduler
from hosts.transformers.tests.fakes import model as fake

_ids = count()


def add(host: fake.Host, length: int, max_new_tokens: int = 4, first: int = 0) -> Request:
    """Add a request for a prompt of `length` tokens from `first` on."""
    request = Request(id=next(_ids), tokens=range(first, first + length), max_new_tokens=max_new_tokens)
    host.scheduler.add(request)
    return request


def parts(host: fake.Host) -> list[tuple[Request, int, int]]:
    """Run one step, and return what it computed of each request."""
    step = host.scheduler.schedule()
    assert step is not None
    host.check_step(step)
    found = [(one.request, one.start, one.num_new_tokens) for one in step]
    host.scheduler.finish_step(step, host.run(step))
    host.check()
    return found


def test_a_prompt_is_prefilled_in_chunks_beside_decodes() -> None:
    host = fake.Host(100, 4, max_num_tokens=10)
    first = add(host, 6)
    assert parts(host) == [(first, 0, 6)]
    second = add(host, 20, first=50)

    assert parts(host) == [(first, 6, 1), (second, 0, 9)]
    assert second.new_tokens == []
    assert parts(host) == [(first, 7, 1), (second, 9, 9)]
    assert parts(host) == [(first, 8, 1), (second, 18, 2)]
    assert (first.status, len(second.new_tokens)) == ("finished", 1)


def test_the_last_token_of_a_prompt_counts_as_a_decode() -> None:
    host = fake.Host(100, 4, max_num_reqs=3, max_num_tokens=7)
    first = add(host, 8)
    assert parts(host) == [(first, 0, 7)]
    second = add(host, 3, first=50)
    third = add(host, 9, first=70)

    assert parts(host) == [(first, 7, 1), (second, 0, 3), (third, 0, 3)]


def test_equal_prompts_share_their_prefix() -> None:
    host = fake.Host(100, 4, max_num_tokens=8)
    first = add(host, 10)
    assert parts(host) == [(first, 0, 8)]
    second = add(host, 10)  # before the first is finished

    assert parts(host) == [(first, 8, 2), (second, 8, 2)]
    assert second.num_cached_tokens == 8
    assert second.blocks[:2] == first.blocks[:2]
    assert second.blocks[2] != first.blocks[2]
    assert second.new_tokens == first.new_tokens


def test_blocks_are_shared_once_they_are_computed() -> None:
    host = fake.Host(100, 4, max_num_tokens=20)
    first, second = add(host, 8), add(host, 8)

    assert parts(host) == [(first, 0, 8), (second, 0, 8)]
    assert not set(first.blocks) & set(second.blocks)


def test_the_last_block_of_a_cached_prompt_is_recomputed() -> None:
    host = fake.Host(100, 4)
    add(host, 8)
    host.finish()

    again = add(host, 8)

    assert parts(host) == [(again, 4, 4)]


def test_generated_tokens_are_reused_too() -> None:
    host = fake.Host(100, 2)
    first = add(host, 3, max_new_tokens=6)
    host.finish()

    more = Request(id=1, tokens=[*first.tokens, 99], max_new_tokens=1)
    host.scheduler.add(more)

    assert parts(host) == [(more, 8, 2)]


def test_without_prefix_caching_everything_is_computed() -> None:
    host = fake.Host(100, 4, prefix_caching=False)
    add(host, 8)
    host.finish()

    again = add(host, 8)

    assert parts(host) == [(again, 0, 8)]


def test_a_waiting_request_is_not_overtaken() -> None:
    host = fake.Host(11, 1, max_num_tokens=20)
    first = add(host, 6, max_new_tokens=1)
    second = add(host, 6, max_new_tokens=2, first=50)
    third = add(host, 2, max_new_tokens=1, first=80)

    assert parts(host) == [(first, 0, 6)]
    assert host.scheduler.waiting == (second, third)
    assert parts(host) == [(second, 0, 6), (third, 0, 2)]


def test_admission_reserves_blocks_for_running_requests() -> None:
    host = fake.Host(10, 2, max_num_tokens=20)
    first, second = (add(host, 4, max_new_tokens=4, first=first) for first in (0, 50))
    third = add(host, 7, max_new_tokens=2, first=80)
    host.step()

    assert host.scheduler.running == (first, second)
    assert host.pool.num_free == 5  # enough for the third, but the others may need one each
    host.finish()
    assert third.status == "finished"
    assert host.scheduler.num_preemptions == 0


def test_the_last_block_is_allocated() -> None:
    host = fake.Host(2, 4)
    request = add(host, 3, max_new_tokens=2)
    host.finish()

    assert request.new_tokens == fake.generate(range(3), 2)


def test_max_num_reqs_run_concurrently() -> None:
    host = fake.Host(100, 4, max_num_reqs=2)
    requests = [add(host, 2, max_new_tokens=1, first=10 * number) for number in range(3)]

    assert [part[0] for part in parts(host)] == requests[:2]
    assert [part[0] for part in parts(host)] == requests[2:]


def test_the_youngest_is_preempted_and_recomputed() -> None:
    host = fake.Host(9, 1, prefix_caching=False, max_num_tokens=20)
    first = add(host, 2, max_new_tokens=6)
    second = add(host, 2, max_new_tokens=6, first=50)
    third = add(host, 5, first=80)
    while not host.scheduler.num_preemptions:
        host.step()
        host.check()

    assert host.scheduler.running == (first,)
    assert host.scheduler.waiting == (second, third)
    assert second.new_tokens  # what it generated is kept
    computed = len(second.tokens)
    while second not in host.scheduler.running:
        host.step()
    assert second.num_computed_tokens == computed
    host.finish()
    assert first.new_tokens == fake.generate(range(2), 6)
    assert second.new_tokens == fake.generate(range(50, 52), 6)


def test_a_decode_may_preempt_itself() -> None:
    host = fake.Host(6, 2, prefix_caching=False, max_num_tokens=20)
    first = add(host, 4, max_new_tokens=5)  # grows into a third and fourth block
    second = add(host, 2, max_new_tokens=5, first=50)
    host.step()
    host.step()
    assert (len(first.blocks), len(second.blocks)) == (3, 2)

    while not host.scheduler.num_preemptions:
        host.step()
        host.check()

    assert host.scheduler.running == (first,)
    host.finish()
    assert second.new_tokens == fake.generate([50, 51], 5)


def test_a_request_that_just_fits_finishes() -> None:
    host = fake.Host(4, 2)
    request = add(host, 3, max_new_tokens=4)  # the last token is never computed
    host.finish()

    assert request.new_tokens == fake.generate(range(3), 4)


def test_a_cancelled_request_releases_its_blocks() -> None:
    host = fake.Host(10, 2, max_num_reqs=1, max_num_tokens=4)
    running, waiting = add(host, 6), add(host, 6)
    host.step()
    for request in (running, waiting):
        host.scheduler.cancel(request)
        host.check()

    assert not host.scheduler.has_work
    assert host.scheduler.schedule() is None
    assert host.pool.num_free == 9
    assert [(request.status, request.finish_reason) for request in (running, waiting)] == [("cancelled",) * 2] * 2


def test_a_request_cancelled_during_its_step_gets_no_token() -> None:
    host = fake.Host(10, 2)
    first, second = add(host, 3), add(host, 3, first=50)
    step = host.scheduler.schedule()
    tokens = host.run(step)
    host.scheduler.cancel(first)

    assert host.scheduler.finish_step(step, tokens) == [second]
    assert first.new_tokens == []
    assert second.new_tokens == fake.generate(range(50, 53), 1)


def test_cancelling_a_finished_or_unknown_request() -> None:
    host = fake.Host(10, 2)
    ended = add(host, 3, max_new_tokens=1)
    host.finish()
    stranger = Request(id=9, tokens=[1], max_new_tokens=1)
    for request in (ended, stranger):
        host.scheduler.cancel(request)

    assert (ended.status, ended.finish_reason) == ("finished", "length")
    assert (stranger.status, stranger.finish_reason) == ("waiting", None)


def test_a_step_that_failed_is_scheduled_again() -> None:
    host = fake.Host(20, 2, max_num_tokens=8)
    request = add(host, 12)
    host.step()
    lost = host.scheduler.schedule()

    again = host.scheduler.schedule()

    assert [(one.start, one.num_new_tokens) for one in again] == [(one.start, one.num_new_tokens) for one in lost]
    with pytest.raises(BatchError, match="not the last one scheduled"):
        host.scheduler.finish_step(lost, host.run(lost))
    host.scheduler.finish_step(again, tokens := host.run(again))
    with pytest.raises(BatchError, match="finished once"):
        host.scheduler.finish_step(again, tokens)
    host.finish()
    assert request.new_tokens == fake.generate(range(12), 4)


@pytest.mark.parametrize("tokens", [[], [1, 2], ["1"], [1.0], [True]])
def test_results_without_a_token_each_are_refused(tokens: list[object]) -> None:
    host = fake.Host(20, 2)
    request = add(host, 3)
    step = host.scheduler.schedule()

    with pytest.raises(BatchError, match="for the 1 requests that sample"):
        host.scheduler.finish_step(step, tokens)

    assert (request.num_computed_tokens, request.new_tokens) == (0, [])
    assert host.scheduler.finish_step(step, [1]) == [request]


def test_a_request_that_can_never_fit_is_refused() -> None:
    host = fake.Host(5, 4, max_seq_len=18)
    with pytest.raises(LimitsError, match=r"17 tokens of prompt and max_new_tokens=2[\s\S]*max_seq_len=18") as caught:
        add(host, 17, max_new_tokens=2)
    assert "raise max_seq_len" in caught.value.fix
    with pytest.raises(CacheError, match=r"take 5 blocks of 4 tokens[\s\S]*4 of the cache's 5 blocks") as caught:
        add(host, 16, max_new_tokens=2)
    assert "more blocks" in caught.value.fix

    assert not host.scheduler.has_work
    add(host, 16, max_new_tokens=1)
    host.finish()


def test_a_request_is_added_once() -> None:
    host = fake.Host(20, 2)
    request = add(host, 3, max_new_tokens=2)
    for status in ("waiting", "running", "finished"):
        assert request.status == status
        with pytest.raises(BatchError, match=f"it is {status} already"):
            host.scheduler.add(request)
        host.step()
    assert not host.scheduler.has_work


def test_a_step_has_a_token_for_each_request() -> None:
    limits = Limits(max_num_reqs=9, max_num_tokens=8, max_seq_len=8)

    with pytest.raises(LimitsError, match="max_num_tokens=8 was given with max_num_reqs=9"):
        Scheduler(fake.BlockPool(10, 2), limits)
