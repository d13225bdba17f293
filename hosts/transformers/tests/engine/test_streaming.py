"""A stream has the tokens and the text of each request as they come, and leaves nothing behind."""

from __future__ import annotations

import gc

import pytest
import torch

from attnplug.errors import RequirementsError
from attnplug_transformers.engine import Engine, SamplingParams
from hosts.transformers.tests.models import model
from hosts.transformers.tests.tokenizers import SIZE, byte_level

NEW = 12
PROMPTS = [[5, 6, 7], [200, 9], [*range(40, 70)]]


@pytest.fixture
def engine(host):
    made = model("llama", seed=2, vocab_size=SIZE, pad_token_id=None)
    with Engine(made, tokenizer=byte_level(), block_size=4, num_blocks=40, max_num_tokens=16, max_num_reqs=4) as engine:
        yield engine


def test_outputs_are_the_tokens_and_the_text_of_generate(engine):
    requests = engine.generate(PROMPTS, max_new_tokens=NEW, return_requests=True)
    tokens, texts, ends = [[], [], []], ["", "", ""], []

    for output in engine.stream(PROMPTS, max_new_tokens=NEW):
        assert len(output.tokens) == 1
        assert output.finish_reason is None or output.prompt not in ends
        tokens[output.prompt] += output.tokens
        texts[output.prompt] += output.text
        ends += [output.prompt] * (output.finish_reason == "length")

    assert tokens == [request.new_tokens for request in requests]
    assert texts == [request.text for request in requests]
    assert sorted(ends) == [0, 1, 2]


def test_requests_stream_while_they_run(engine):
    stream = engine.stream(PROMPTS[:2], max_new_tokens=NEW)
    assert not engine.has_work

    first = next(stream)

    assert (first.prompt, first.sample, first.request.num_tokens) == (0, 0, len(PROMPTS[0]) + 1)
    assert engine.stats.steps == 1
    assert next(stream).prompt == 1  # of the same step
    assert engine.stats.steps == 1


@pytest.mark.parametrize("leave", ["close", "forget", "error"])
def test_a_stream_that_ends_early_cancels_its_requests(engine, leave):
    expected = engine.generate(PROMPTS[2:], max_new_tokens=NEW)[0]
    other = engine.submit(PROMPTS[2], max_new_tokens=NEW)
    stream = engine.stream(PROMPTS[:2], max_new_tokens=NEW)
    request = next(stream).request
    if leave == "close":
        stream.close()
    elif leave == "forget":
        del stream
        gc.collect()
    else:
        with pytest.raises(KeyboardInterrupt):
            stream.throw(KeyboardInterrupt)

    assert (request.finish_reason, len(request.new_tokens)) == ("cancelled", 1)
    while engine.has_work:
        engine.step()
    assert other.new_tokens == expected
    assert engine.stats.blocks_in_use == 0


def test_a_canceled_request_ends_in_its_stream(engine):
    found = []
    for output in engine.stream(PROMPTS[:2], max_new_tokens=NEW):
        found.append(output)
        if len(found) == 3:
            engine.cancel(output.request)

    canceled = [output for output in found if output.prompt == 0]
    assert [output.finish_reason for output in canceled] == [None, None, "cancelled"]
    assert canceled[-1].tokens == ()
    assert sum(len(output.tokens) for output in found if output.prompt == 1) == NEW


def test_a_request_that_fails_ends_alone(engine):
    with torch.no_grad():
        engine.model.get_input_embeddings().weight[123] = float("nan")

    found = list(engine.stream([[123], PROMPTS[0]], max_new_tokens=3, stop_tokens=()))

    assert [(output.tokens, output.finish_reason) for output in found if output.prompt == 0] == [((), "failed")]
    assert [output.finish_reason for output in found if output.prompt == 1] == [None, None, "length"]


def test_steps_between_outputs_lose_nothing(engine):
    expected = engine.generate(PROMPTS, max_new_tokens=NEW)
    first, second = (engine.stream([prompt], max_new_tokens=NEW) for prompt in PROMPTS[:2])
    found = [[], []]
    for _ in range(3):
        found[0] += next(first).tokens
        found[1] += next(second).tokens
        engine.step()
    for tokens, stream in zip(found, (first, second), strict=True):
        for output in stream:
            tokens.extend(output.tokens)

    assert found == expected[:2]


def test_a_stop_string_is_in_no_output(engine):
    engine.model.generation_config.suppress_tokens = [0, *range(96, SIZE)]
    (whole,) = engine.generate(PROMPTS[:1], max_new_tokens=NEW, return_requests=True)
    stop = whole.text[4:7]
    outputs = list(engine.stream(PROMPTS[:1], max_new_tokens=NEW, sampling=SamplingParams(stop=stop)))

    assert "".join(output.text for output in outputs) == whole.text[: whole.text.index(stop)]
    assert outputs[-1].finish_reason == "stop"
    assert outputs[-1].request.stop_reason == stop


def test_a_refusal_comes_before_the_iteration(engine):
    with pytest.raises(RequirementsError, match="'temperature'"):
        engine.stream(PROMPTS, max_new_tokens=NEW, temperature=0.5)
    engine.stream(PROMPTS, max_new_tokens=NEW)  # never begun

    assert not engine.has_work
