"""Several samples of a prompt are those of separate requests, and share the blocks of the prompt."""

from __future__ import annotations

from random import Random

import pytest
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug.errors import CacheError
from attnplug_transformers.engine import Engine, SamplingParams
from attnplug_transformers.engine.request import Request
from hosts.transformers.tests.engine.reference import reference
from hosts.transformers.tests.fakes import model as fake
from tests.examples import examples

DRAWING = SamplingParams(temperature=1.2, seed=5, n=3)
NEW = 10


@pytest.fixture
def engine(host):
    with Engine(reference("llama")[0], block_size=4, num_blocks=60, max_num_tokens=16, max_num_reqs=8) as engine:
        yield engine


def alone(engine, prompts, sampling, **how):
    """Return the tokens of each sample, one request after another, without shared blocks."""
    found = []
    for prompt in prompts:
        for sample in range(sampling.n):
            engine.reset_prefix_cache()
            one = evolve(sampling, n=1, seed=sampling.seed + sample)
            found += engine.generate([prompt], max_new_tokens=NEW, sampling=one, **how)
    return found


def test_samples_are_those_of_separate_requests(engine):
    prompts = [reference("llama")[1][index] for index in (3, 1, 0)]  # of 33, 1 and 19 tokens
    expected = alone(engine, prompts, DRAWING)
    engine.reset_prefix_cache()

    found = engine.generate(prompts, max_new_tokens=NEW, sampling=DRAWING, return_requests=True)

    assert [request.new_tokens for request in found] == expected
    assert len({tuple(tokens) for tokens in expected}) == 9
    assert [request.sample for request in found] == [0, 1, 2] * 3
    assert [len(request.samples) for request in found] == [3] * 9
    # The first one computes the prompt, in three chunks; the others at most its last block.
    assert [request.metrics.num_cached_tokens for request in found[:3]] == [0, 32, 32]
    assert [request.metrics.num_cached_tokens for request in found[6:]] == [0, 16, 16]
    assert engine.stats.blocks_in_use == 0


def test_a_prompt_is_computed_once(engine):
    """All samples run at once, and a step has no more tokens than the prompt, once, and one block for each sample."""
    prompt, before = list(range(1, 34)), engine.stats.steps
    request = engine.submit(prompt, max_new_tokens=NEW, sampling=evolve(DRAWING, n=8))
    while not all(one.new_tokens for one in request.samples):
        engine.step()

    # The prompt is chunks of 16, 16 and 1 token; with the last one the other samples compute a token each.
    assert engine.stats.steps - before == 3
    # 8 full blocks are shared, and each sample has one of its own.
    assert engine.stats.blocks_in_use == 8 + 8


def test_samples_end_by_themselves(engine):
    request = engine.submit(list(range(1, 20)), max_new_tokens=NEW, sampling=DRAWING)
    first, second, third = request.samples
    assert request is first
    for _ in range(6):
        engine.step()
    engine.cancel(first)
    while engine.has_work:
        engine.step()

    assert (first.finish_reason, second.finish_reason, third.finish_reason) == ("cancelled", "length", "length")
    assert [second.new_tokens, third.new_tokens] == alone(engine, [list(range(1, 20))], DRAWING)[1:]
    assert engine.stats.blocks_in_use == 0


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_samples_go_on_without_the_first(engine, steps):
    """Canceled while it waits, and while it computes the prompt that the others wait for."""
    prompt = list(range(1, 34))
    first, *others = engine.submit(prompt, max_new_tokens=NEW, sampling=DRAWING).samples
    for _ in range(steps):
        engine.step()
    engine.cancel(first)
    while engine.has_work:
        engine.step()

    assert [one.new_tokens for one in others] == alone(engine, [prompt], DRAWING)[1:]


def test_without_prefix_caching_each_computes_the_prompt(host):
    made, prompts, _ = reference("llama")
    with Engine(made, block_size=4, prefix_caching=False) as engine:
        expected = alone(engine, prompts[:1], DRAWING)
        found = engine.generate(prompts[:1], max_new_tokens=NEW, sampling=DRAWING, return_requests=True)

    assert [request.new_tokens for request in found] == expected
    assert [request.metrics.num_cached_tokens for request in found] == [0] * 3


def test_a_stream_names_the_sample(engine):
    expected = engine.generate([[4, 5], [6]], max_new_tokens=NEW, sampling=DRAWING)
    found = {}
    for output in engine.stream([[4, 5], [6]], max_new_tokens=NEW, sampling=DRAWING):
        found.setdefault((output.prompt, output.sample), []).extend(output.tokens)

    assert [found[prompt, sample] for prompt in range(2) for sample in range(3)] == expected


def test_samples_that_can_never_fit_leave_nothing(host):
    with Engine(reference("llama")[0], block_size=4, num_blocks=10) as engine:
        with pytest.raises(CacheError):
            engine.submit([1] * 60, max_new_tokens=8, sampling=DRAWING)

        assert not engine.has_work


def samples(number: int, prompt: list[int], length: int, count: int) -> list[Request]:
    sampling = SamplingParams(n=count, temperature=1.0)
    made = [
        Request(id=number * 10 + sample, tokens=prompt, max_new_tokens=length, sampling=sampling, sample=sample)
        for sample in range(count)
    ]
    for one in made:
        one.samples = tuple(made)
    return made


prompts = st.lists(
    st.tuples(
        st.lists(st.integers(0, fake.VOCABULARY - 1), min_size=1, max_size=20), st.integers(1, 8), st.integers(2, 4)
    ),
    min_size=1,
    max_size=4,
)


@given(prompts, st.integers(1, 4), st.integers(0, 10), st.integers(1, 5), st.integers(0, 12), st.integers(0, 99))
@settings(max_examples=examples(150))
def test_samples_finish_whatever_the_schedule(prompts, block_size, spare, max_num_reqs, more_tokens, seed) -> None:
    """With few blocks, and samples that are canceled at random."""
    random = Random(seed)
    blocks = 30 // block_size + 2 + spare
    host = fake.Host(blocks, block_size, max_num_reqs=max_num_reqs, max_num_tokens=max_num_reqs + more_tokens)
    requests = [one for number, it in enumerate(prompts) for one in samples(number, *it)]
    for one in requests:
        host.scheduler.add(one)
    for _ in range(2000):
        if not host.scheduler.has_work:
            break
        host.step()
        if random.random() < 0.05:
            host.scheduler.cancel(random.choice(requests))
    assert not host.scheduler.has_work

    assert host.pool.num_free == host.pool.num_usable
    for one in requests:
        wanted = fake.generate(one.tokens[: one.num_prompt_tokens], one.max_new_tokens)
        assert one.new_tokens == (wanted[: len(one.new_tokens)] if one.finish_reason == "cancelled" else wanted)
