"""Requests that arrive, finish and are canceled at random, in KV caches that are too small for them."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug.errors import CacheError
from attnplug_transformers.engine import Sampling
from attnplug_transformers.engine.request import Request
from attnplug_transformers.engine.sampling import NO_TOKEN, sample
from hosts.transformers.tests.fakes import model as fake
from tests.examples import examples

pytestmark = pytest.mark.unmeasured


def some_request(random: Random, number: int) -> Request:
    # With a vocabulary of three most prompts share a prefix with another one.
    prompt = [random.randrange(fake.VOCABULARY) for _ in range(random.randint(1, 11))]
    stops = {random.randrange(fake.VOCABULARY)} if random.random() < 0.1 else set()
    return Request(id=number, tokens=prompt, max_new_tokens=random.randint(1, 11), stop_tokens=stops)


def check_result(request: Request, window: int | None = None) -> None:
    prompt = request.tokens[: request.num_prompt_tokens]
    wanted = fake.generate(prompt, request.max_new_tokens, request.stop_tokens, window)
    assert not request.blocks
    if request.finish_reason in ("cancelled", "failed"):
        assert request.new_tokens == wanted[: len(request.new_tokens)]
    else:
        assert request.status == "finished"
        assert request.new_tokens == wanted
        assert request.finish_reason == ("stop" if wanted[-1] in request.stop_tokens else "length")


def small_host(random: Random, *, prefix_caching: bool) -> fake.Host:
    size, window = random.randint(1, 4), random.choice([None, None, 3])
    fewest = 22 // size if window is None else 3
    return fake.Host(
        random.randint(fewest + 2, 2 * fewest + 2),  # any one request fits, and never many
        size,
        prefix_caching=prefix_caching,
        sliding_window=window,
        max_num_reqs=random.randint(1, 8),
        max_num_tokens=random.randint(8, 24),
        ahead=random.random() < 0.5,
    )


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_ten_thousand_requests_leak_no_block(prefix_caching: bool) -> None:
    random, seen = Random(20 + prefix_caching), Counter[str]()
    for _ in range(100):
        host, alive = small_host(random, prefix_caching=prefix_caching), list[Request]()
        left = 100
        while left or alive:
            if left and random.random() < 0.3:
                request = some_request(random, 100 - left)
                host.scheduler.add(request)
                alive.append(request)
                left -= 1
            if alive and random.random() < 0.01:
                host.scheduler.cancel(random.choice(alive))
            host.step()
            host.check()
            for request in [request for request in alive if request.is_finished]:
                alive.remove(request)
                check_result(request, host.sliding_window)
                seen[request.status] += 1
                seen["reused"] += request.num_cached_tokens
        assert host.pool.num_free == host.pool.num_usable
        seen["preempted"] += host.scheduler.num_preemptions
        seen["ahead"] += host.num_ahead
    assert seen["finished"] + seen["cancelled"] == 10_000
    assert seen["cancelled"] > 100
    assert seen["preempted"] > 300
    assert seen["ahead"] > 1000
    assert (seen["reused"] > 1000) if prefix_caching else not seen["reused"]


prompts = st.lists(
    st.tuples(st.lists(st.integers(0, fake.VOCABULARY - 1), min_size=1, max_size=20), st.integers(1, 10)),
    min_size=1,
    max_size=8,
)


@given(
    prompts,
    st.integers(1, 5),
    st.integers(0, 30),
    st.booleans(),
    st.integers(1, 5),
    st.integers(0, 20),
    st.lists(st.integers(0, 5), max_size=8),
    st.booleans(),
)
@settings(max_examples=examples(150))
def test_tokens_do_not_depend_on_the_schedule(
    prompts: list[tuple[list[int], int]],
    block_size: int,
    spare_blocks: int,
    prefix_caching: bool,
    max_num_reqs: int,
    spare_tokens: int,
    pauses: list[int],
    ahead: bool,
) -> None:
    host = fake.Host(
        30 // block_size + 2 + spare_blocks,
        block_size,
        prefix_caching=prefix_caching,
        max_num_reqs=max_num_reqs,
        max_num_tokens=max_num_reqs + spare_tokens,
        ahead=ahead,
    )
    requests = []
    for number, (prompt, length) in enumerate(prompts):
        requests.append(Request(id=number, tokens=prompt, max_new_tokens=length))
        host.scheduler.add(requests[-1])
        for _ in range(pauses[number] if number < len(pauses) else 0):
            host.step()
            host.check()
    host.finish()
    host.check()

    assert [request.new_tokens for request in requests] == [fake.generate(*one) for one in prompts]


@given(prompts, st.integers(1, 4), st.data())
@settings(max_examples=examples(100))
def test_every_request_finishes_whatever_is_cancelled(
    prompts: list[tuple[list[int], int]], block_size: int, data: st.DataObject
) -> None:
    host = fake.Host(data.draw(st.integers(3, 20)), block_size, max_num_reqs=4, max_num_tokens=5)
    requests = []
    for number, (prompt, length) in enumerate(prompts):
        request = Request(id=number, tokens=prompt, max_new_tokens=length)
        try:
            host.scheduler.add(request)
        except CacheError:
            assert len(prompt) + length - 1 > host.pool.num_usable * block_size
            continue
        requests.append(request)
    while host.scheduler.has_work:
        if data.draw(st.booleans()):
            host.scheduler.cancel(data.draw(st.sampled_from(requests)))
        step = host.scheduler.schedule()
        if step is None:
            break
        tokens = host.run(step)
        if tokens and data.draw(st.sampled_from([True, False, False])):
            tokens[data.draw(st.integers(0, len(tokens) - 1))] = NO_TOKEN
        if data.draw(st.sampled_from([True, False, False])):
            host.pool.reset_prefix_cache()
        if data.draw(st.booleans()):
            host.scheduler.cancel(data.draw(st.sampled_from(requests)))  # during its step
        host.scheduler.finish_step(step, tokens)
        host.check()

    for request in requests:
        check_result(request)


def choose_by_logits(states: list[int], requests: list[Request]) -> list[int]:
    """Sample from logits that follow from the KV cache."""
    logits = [[Random(hash((state, token))).gauss(0, 1) for token in range(20)] for state in states]
    return sample(torch.tensor(logits), requests).tolist() if states else []


def drawn_tokens(host: fake.Host, lengths: list[int], *, together: bool) -> list[list[int]]:
    requests = []
    for number, length in enumerate(lengths):
        sampling = Sampling(temperature=[0.0, 1.0, 2.0][number % 3], top_p=[None, 0.8][number % 2], seed=number % 4)
        requests.append(Request(id=number, tokens=range(length), max_new_tokens=8, sampling=sampling))
        host.scheduler.add(requests[-1])
        if not together:
            host.finish()
    host.finish()
    return [request.new_tokens for request in requests]


@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 4), st.integers(0, 6), st.integers(6, 20))
@settings(max_examples=40)
def test_drawn_tokens_do_not_depend_on_the_schedule(
    lengths: list[int], block_size: int, spare_blocks: int, max_num_tokens: int
) -> None:
    alone = fake.Host(1000, 4, prefix_caching=False, max_num_reqs=1, max_num_tokens=1000, choose=choose_by_logits)
    crowd = fake.Host(
        20 // block_size + 2 + spare_blocks,
        block_size,
        max_num_reqs=6,
        max_num_tokens=max_num_tokens,
        choose=choose_by_logits,
        ahead=True,
    )

    assert drawn_tokens(crowd, lengths, together=True) == drawn_tokens(alone, lengths, together=False)
