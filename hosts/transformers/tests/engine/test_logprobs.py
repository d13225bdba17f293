"""Log-probabilities are those of the logits that transformers computes, in float64."""

from __future__ import annotations

import pytest
import torch

from attnplug_transformers.engine import Engine, SamplingParams
from attnplug_transformers.engine.logprobs import TokenLogprobs, logprobs_of
from attnplug_transformers.engine.request import Request
from hosts.transformers.tests.engine.reference import reference

NEW = 14


def expected(made, request):
    """Return ``(generated tokens, vocabulary)`` log-probabilities in float64, from a forward pass over all tokens."""
    with torch.no_grad():
        logits = made(torch.tensor([request.tokens])).logits[0, request.num_prompt_tokens - 1 : -1]
    return logits.double().log_softmax(-1)


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("llama", {}),
        ("deepseek_v3", {}),
        ("llama", {"temperature": 0.7, "top_k": 5, "seed": 1}),
        ("llama", {"repetition_penalty": 2.0}),
        ("llama", {"logit_bias": {7: 9.0}}),
    ],
)
def test_they_are_those_of_the_model(host, name, more):
    """Whatever penalties and filters do to the choice."""
    made, prompts, _ = reference(name)
    counts = [None, 0, 3, 300, None, 1, 2, 5, 7]
    samplings = [SamplingParams(logprobs=count, **more) for count in counts]
    with Engine(made, block_size=4, num_blocks=16, max_num_tokens=12, max_num_reqs=6) as engine:
        found = engine.generate(prompts, max_new_tokens=NEW, sampling=samplings, stop_tokens=(), return_requests=True)
        assert engine.stats.preemptions > 0

    for request, count in zip(found, counts, strict=True):
        if count is None:
            assert request.logprobs is None
            continue
        wanted = expected(made, request)
        assert [one.token for one in request.logprobs] == request.new_tokens
        own = wanted.gather(-1, torch.tensor(request.new_tokens)[:, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor([one.logprob for one in request.logprobs], dtype=torch.float64), own, atol=2e-4, rtol=0
        )
        for one, row in zip(request.logprobs, wanted, strict=True):
            best = row.topk(min(count, len(row)))
            values = torch.tensor([value for _, value in one.top], dtype=torch.float64)
            torch.testing.assert_close(values, best.values, atol=2e-4, rtol=0)
            assert len({token for token, _ in one.top}) == min(count, len(row))
            for token, value in one.top:
                assert abs(float(row[token]) - value) < 2e-4


def test_of_equal_tokens_the_lowest_come_first() -> None:
    logits = torch.tensor([[0.0, 1.0, 1.0, 1.0, -torch.inf]]).expand(2, -1)
    requests = [
        Request(id=number, tokens=[1], max_new_tokens=1, sampling=SamplingParams(logprobs=2 - number))
        for number in (0, 1)
    ]

    first, second = logprobs_of(logits, [4, 3], requests)

    assert [token for token, _ in first.top] == [1, 2]
    assert first.logprob == -torch.inf
    assert second == TokenLogprobs(3, second.logprob, ((1, second.logprob),))


def test_a_row_without_a_token_has_none() -> None:
    request = Request(id=0, tokens=[1], max_new_tokens=1, sampling=SamplingParams(logprobs=1))

    assert logprobs_of(torch.full((1, 3), torch.nan), [-1], [request]) is None


def test_a_stream_has_those_of_its_tokens(host):
    made, prompts, _ = reference("llama")
    sampling = SamplingParams(logprobs=1)
    with Engine(made) as engine:
        (request,) = engine.generate(prompts[:1], max_new_tokens=NEW, sampling=sampling, return_requests=True)
        found = list(engine.stream(prompts[:1], max_new_tokens=NEW, sampling=sampling))

    assert [one.token for output in found for one in output.logprobs] == request.new_tokens
    assert [len(output.logprobs) for output in found] == [1] * NEW
