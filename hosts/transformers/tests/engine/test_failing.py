"""Requests with non-finite logits fail, and the others get their tokens."""

from __future__ import annotations

import pytest
import torch

from attnplug.errors import TensorError
from attnplug_transformers.engine import Engine, Sampling
from hosts.transformers.tests.models import model

BAD = 123
GOOD = list(range(1, 12))
DRAWING = Sampling(temperature=1.0, seed=1)


@pytest.fixture(params=[("llama", True), ("gemma2", False)])
def engine(host, request):
    """Make an engine over few blocks, on a model that computes NaN from one token."""
    name, ahead = request.param
    made, limits = model(name), {"max_num_reqs": 4, "max_num_tokens": 16, "max_seq_len": 64}
    with torch.no_grad():
        made.get_input_embeddings().weight[BAD] = float("nan")
    with Engine(made, num_blocks=12, block_size=8, **limits, async_scheduling=ahead) as engine:
        yield engine


def finish(engine):
    moved = []
    while engine.has_work:
        moved += engine.step()
    return moved


@pytest.mark.parametrize("sampling", [Sampling(), DRAWING])
def test_other_requests_go_on(engine, sampling, caplog):
    expected = engine.generate([GOOD], max_new_tokens=12, sampling=DRAWING)[0]
    bad = engine.submit([*GOOD[:3], BAD, *range(30, 60)], max_new_tokens=12, sampling=sampling)
    good = engine.submit(GOOD, max_new_tokens=12, sampling=DRAWING)

    moved = finish(engine)

    assert (bad.finish_reason, bad.status, bad.new_tokens, bad.blocks) == ("failed", "finished", [], [])
    assert moved.count(bad) == 1
    assert (good.finish_reason, good.new_tokens) == ("length", expected)
    assert f"requests [{bad.id}] have failed" in caplog.text
    # The blocks that held NaN are reused, fully and in part.
    assert engine.generate([GOOD, GOOD[3:], GOOD], max_new_tokens=12, sampling=DRAWING)[::2] == [expected] * 2
    assert engine.stats.blocks_in_use == 0


def test_blocks_of_a_failed_request_are_not_shared(engine):
    prompt = [*GOOD, *GOOD[:9]]
    weights = engine.model.lm_head.weight
    before = weights.detach().clone()
    with torch.no_grad():
        weights.fill_(float("nan"))
    request = engine.submit(prompt, max_new_tokens=4)
    engine.step()  # 16 of 20 tokens, in two blocks that are in the prefix cache now
    finish(engine)
    assert request.finish_reason == "failed"
    weights.data.copy_(before)  # which the engine does not detect

    again = engine.submit(prompt, max_new_tokens=4)
    finish(engine)

    assert (again.num_cached_tokens, again.finish_reason) == (0, "length")


def test_generate_names_the_prompt_and_the_request(engine):
    waiting = engine.submit(GOOD, max_new_tokens=12)

    with pytest.raises(TensorError, match=r"prompts \[1\], as requests \[2\], are non-finite"):
        engine.generate([GOOD, [BAD], GOOD[2:]], max_new_tokens=12)

    finish(engine)
    assert waiting.finish_reason == "length"
    assert engine.stats.blocks_in_use == 0


def test_a_request_fails_in_a_replayed_step(host):
    made = model("llama")
    with Engine(made, graphs=True, max_num_reqs=4, max_seq_len=64, async_scheduling=True) as engine:
        requests = [engine.submit([token, 1], max_new_tokens=5, stop_tokens=()) for token in (5, 6)]
        expected = engine.generate([[6, 1]], max_new_tokens=5)[0]
        assert [request.finish_reason for request in requests] == ["length"] * 2

        with torch.no_grad():
            made.get_input_embeddings().weight[requests[0].new_tokens[0]] = float("nan")
        bad, good = (engine.submit([token, 1], max_new_tokens=5) for token in (5, 6))
        finish(engine)

    assert (bad.finish_reason, len(bad.new_tokens)) == ("failed", 1)
    assert requests[0].new_tokens[0] not in expected
    assert good.new_tokens == expected
