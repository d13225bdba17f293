"""Blocks that a sliding window or a chunk has left are released, and the tokens stay those of transformers."""

from __future__ import annotations

from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug.errors import CacheError
from attnplug_transformers.engine import Engine
from attnplug_transformers.engine.request import Request
from hosts.transformers.tests.engine.reference import NEW, reference
from hosts.transformers.tests.fakes import model as fake
from hosts.transformers.tests.models import WINDOW, generate, model
from tests.examples import examples


@given(st.data(), st.integers(2, 9), st.integers(1, 4), st.booleans())
@settings(max_examples=examples(100))
def test_no_token_depends_on_a_released_block(data, window, block_size, prefix_caching):
    random = Random(data.draw(st.integers(0, 10**6)))
    least = max(2, 1 + -(-(window - 1) // block_size))  # blocks of a token and of those that it attends to
    host = fake.Host(
        data.draw(st.integers(least, 60 // block_size + 1)) + 1,
        block_size,
        prefix_caching=prefix_caching,
        max_num_reqs=4,
        max_num_tokens=data.draw(st.integers(4, 12)),
        sliding_window=window,
    )
    requests = []
    for number in range(8):
        prompt = [random.randrange(fake.VOCABULARY) for _ in range(random.randint(1, 16))]
        if requests and random.random() < 0.5:
            prompt = requests[-1].tokens[: random.randint(1, 20)]  # a prefix that may be released
        requests.append(Request(id=number, tokens=prompt, max_new_tokens=random.randint(1, 9)))
        host.scheduler.add(requests[-1])
        for _ in range(random.randrange(5)):
            host.step()
            host.check()
    while host.scheduler.has_work:
        host.step()
        host.check()

    for request in requests:
        prompt, length = request.tokens[: request.num_prompt_tokens], request.max_new_tokens
        assert request.new_tokens == fake.generate(prompt, length, sliding_window=window)
    assert host.pool.num_free == host.pool.num_usable


def test_a_released_prefix_is_matched_until_it_is_evicted():
    host = fake.Host(40, 2, sliding_window=4)
    first = Request(id=0, tokens=range(20), max_new_tokens=1)
    host.scheduler.add(first)
    host.finish()

    again = Request(id=1, tokens=range(20), max_new_tokens=2)
    host.scheduler.add(again)
    host.step()

    assert again.num_cached_tokens == 18
    assert again.blocks.count(0) == 8  # the next query, at 20, attends to the keys from 17 on
    host.check()
    host.finish()
    assert again.new_tokens == fake.generate(range(20), 2, sliding_window=4)


def test_released_blocks_of_a_failed_request_are_not_shared():
    host = fake.Host(40, 2, sliding_window=4)
    bad = Request(id=0, tokens=range(20), max_new_tokens=3)
    host.scheduler.add(bad)
    host.step()
    step = host.scheduler.schedule()
    host.run(step)
    assert bad.blocks.count(0)

    host.scheduler.finish_step(step, [-1])

    host.check()
    assert host.pool.match(range(20)) == []
    assert not host.pool._prefixes


@pytest.mark.parametrize(
    ("block_size", "most"),
    [*(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, WINDOW - 1), (2, 3), (8, 2))), (4, 2)],
)
def test_a_long_decode_holds_the_blocks_of_its_window(host, block_size, most):
    made, held = model("mistral", max_position_embeddings=256), []
    expected = generate(made, torch.tensor([[1, 2, 3]]), torch.ones(1, 3), 180)[0].tolist()
    with Engine(made, block_size=block_size) as engine:
        request = engine.submit([1, 2, 3], max_new_tokens=180)
        while engine.has_work:
            engine.step()
            held.append(engine.stats.blocks_in_use)

    assert [request.new_tokens] == expected
    assert max(held) == most  # of 183 / block_size


@pytest.mark.parametrize("window", [1, 5, 8, *(pytest.param(window, marks=pytest.mark.slow) for window in (2, 9))])
@pytest.mark.parametrize("max_num_tokens", [4, 64, pytest.param(7, marks=pytest.mark.slow)])
def test_chunked_prefill_with_cached_prefixes(host, window, max_num_tokens):
    made = model("mistral", sliding_window=window)
    prompts = [[*range(1, 40)], [*range(1, 30), 77, 78], [5, 6, 7]]
    # Without a cache: that of transformers holds all keys for a window of 1.
    expected = [
        generate(made, torch.tensor([one]), torch.ones(1, len(one)), NEW, use_cache=False)[0][0].tolist()
        for one in prompts
    ]
    with Engine(made, block_size=4, num_blocks=24, max_num_tokens=max_num_tokens, max_num_reqs=4) as engine:
        for _ in range(2):
            assert engine.generate(prompts, max_new_tokens=NEW) == expected
        assert engine.stats.blocks_in_use == 0


@pytest.mark.parametrize("num_blocks", [9, 4])  # the least: the null block, 8 tokens before each, and its own block
def test_a_prompt_is_admitted_into_the_blocks_of_its_window(host, num_blocks):
    made, prompt = model("mistral", sliding_window=9, max_position_embeddings=256), list(range(1, 111))
    expected = generate(made, torch.tensor([prompt]), torch.ones(1, 110), 20)[0].tolist()
    with Engine(made, block_size=7, num_blocks=num_blocks) as engine:
        assert engine.generate([prompt, prompt], max_new_tokens=20) == expected * 2  # of 19 blocks
        assert engine.stats.preemptions == 0 or num_blocks == 4

    with Engine(made, block_size=7, num_blocks=3) as engine, pytest.raises(CacheError, match="which take 3 blocks"):
        engine.submit(prompt, max_new_tokens=20)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "llama4", "llama"])
def test_a_layer_without_a_window_keeps_all_blocks(host, name):
    made, prompts, expected = reference(name)
    with Engine(made, block_size=4) as engine:
        request = engine.submit(prompts[3], max_new_tokens=NEW)
        while engine.has_work:
            assert 0 not in request.blocks
            engine.step()

        assert request.new_tokens == expected[3]


def test_chunks_release_the_blocks_of_earlier_ones(host):
    """All layers of this Llama 4 attend within chunks of 8."""
    made = model("llama4", layer_types=["chunked_attention"] * 4, no_rope_layers=[1] * 4)
    prompt = list(range(1, 36))
    expected = generate(made, torch.tensor([prompt]), torch.ones(1, 35), NEW)[0].tolist()
    with Engine(made, block_size=4) as engine:
        request = engine.submit(prompt, max_new_tokens=NEW)
        engine.step()
        assert request.blocks == [0] * 7 + request.blocks[7:]  # of 35 tokens; the last full block is kept
        while engine.has_work:
            engine.step()

        assert [request.new_tokens] == expected
