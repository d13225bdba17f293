"""Biases and penalties are those of transformers and of the OpenAI API, in batches that mix requests."""

from __future__ import annotations

from collections import Counter
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from attnplug.errors import BatchError
from attnplug_transformers.engine import Engine, SamplingParams, penalties
from attnplug_transformers.engine.penalties import TokenCounts
from attnplug_transformers.engine.request import Request
from attnplug_transformers.engine.sampler import process
from hosts.transformers.tests.engine.reference import reference
from hosts.transformers.tests.fakes import interrupts
from hosts.transformers.tests.models import PAD, model

pytestmark = pytest.mark.unmeasured

VOCABULARY, NEW = 12, 14


def request(number: int, prompt: list[int], generated: list[int], sampling: SamplingParams) -> Request:
    made = Request(id=number, tokens=prompt, max_new_tokens=100, sampling=sampling)
    for token in generated:
        made.append(token)
    return made


def oracle(row: torch.Tensor, one: Request) -> torch.Tensor:
    """Apply the definitions in float64, one token at a time."""
    found = row.double().tolist()
    sampling, prompt, counts = one.sampling, one.tokens[: one.num_prompt_tokens], Counter(one.new_tokens)
    for token, bias in sampling.logit_bias:
        found[token] += bias
    for token in {*prompt, *counts}:
        penalty = sampling.repetition_penalty or 1.0
        found[token] = found[token] * penalty if found[token] < 0 else found[token] / penalty
    for token, count in counts.items():
        found[token] -= count * sampling.frequency_penalty + (count > 0) * sampling.presence_penalty
    return torch.tensor(found, dtype=torch.float64)


tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=9)
samplings = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([None, 1.0, 1.3, 0.7]),
    presence_penalty=st.sampled_from([0.0, 0.0, 1.5, -2.0]),
    frequency_penalty=st.sampled_from([0.0, 0.0, 0.25, -1.0]),
    logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.sampled_from([-5.0, 3.5, -inf]), max_size=3),
)


@given(st.lists(st.tuples(tokens.filter(bool), tokens, samplings), min_size=1, max_size=10), st.data())
def test_logits_are_those_of_the_definitions(batch, data: st.DataObject) -> None:
    """Over steps, with other requests in each: what was counted before is not counted again, and none is missing."""
    requests = [request(number, *one) for number, one in enumerate(batch)]
    counts = TokenCounts()
    for _ in range(4):
        some = data.draw(st.permutations(requests))[: data.draw(st.integers(1, len(requests)))]
        logits = torch.randn(len(some), VOCABULARY, generator=torch.Generator().manual_seed(3))
        before = logits.clone()

        found = process(logits, some, counts)

        wanted = torch.stack([oracle(row, one) for row, one in zip(logits, some, strict=True)])
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)
        assert logits.equal(before)
        for one in some:
            one.append(data.draw(st.integers(0, VOCABULARY - 1)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_bit_for_bit_those_of_transformers(dtype: torch.dtype) -> None:
    prompt, generated, bias = [3, 3, 5], [7, 3], {3: 1.7, 9: -0.3, 11: -inf}
    one = request(0, prompt, generated, SamplingParams(repetition_penalty=1.3, logit_bias=bias))
    logits = torch.randn(1, VOCABULARY, generator=torch.Generator().manual_seed(5)).to(dtype)
    theirs = LogitsProcessorList(
        [
            SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()}),
            RepetitionPenaltyLogitsProcessor(1.3),
        ]
    )

    wanted = theirs(torch.tensor([prompt + generated]), logits.float())

    assert process(logits, [one], TokenCounts()).equal(wanted)


def test_without_biases_and_penalties_the_logits_are_the_same_tensor() -> None:
    logits = torch.zeros(1, VOCABULARY)

    assert process(logits, [request(0, [1], [2], SamplingParams(top_k=3))], TokenCounts()) is logits


def test_tokens_without_a_logit_are_not_counted() -> None:
    one = request(0, [VOCABULARY + 3, 2], [], SamplingParams(repetition_penalty=2.0))

    assert process(torch.ones(1, VOCABULARY), [one], TokenCounts())[0].tolist() == [1, 1, 0.5] + [1] * 9


def test_an_interrupt_at_any_line_loses_no_count() -> None:
    requests = [request(number, [1, number], [5], SamplingParams(frequency_penalty=1.0)) for number in range(3)]
    logits = torch.zeros(3, VOCABULARY)
    wanted = process(logits, requests, TokenCounts())
    found = interrupts.places((penalties,), lambda: process(logits, requests, TokenCounts()))
    assert len(found) > 20
    for place in found:
        counts = TokenCounts()
        process(logits[:2], requests[:2], counts)
        with interrupts.interrupted((penalties,), place) as reached:
            try:
                process(logits, requests, counts)
            except KeyboardInterrupt:
                assert reached == [place]

        assert process(logits, requests, counts).equal(wanted)


FIELDS = [
    {"repetition_penalty": 1.5},
    {"repetition_penalty": 0.6},
    {"logit_bias": {5: 4.0, 9: -3.0}},
    {"logit_bias": {5: 4.0, 9: -3.0}, "repetition_penalty": 1.4},
]


def generated(made, prompt, repetition_penalty=None, logit_bias=None, **how):
    """Return what `generate` of transformers appends to a prompt."""
    ids = torch.tensor([prompt])
    if logit_bias:
        how["sequence_bias"] = [[[token], bias] for token, bias in logit_bias.items()]
    if repetition_penalty:
        how["repetition_penalty"] = repetition_penalty
    found = made.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, pad_token_id=PAD, do_sample=False, **how
    )
    return found[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_tokens_are_those_of_generate_in_a_mixed_batch(host, name):
    """In chunks, with preemptions, with and without prefixes that other requests have computed."""
    made, prompts, _ = reference(name)
    hows = [FIELDS[index % 4] if index % 5 else {} for index in range(len(prompts))]
    expected = [generated(made, prompt, **how) for prompt, how in zip(prompts, hows, strict=True)]
    assert expected != [generated(made, prompt) for prompt in prompts]

    with Engine(made, block_size=4, num_blocks=16, max_num_tokens=12, max_num_reqs=6) as engine:
        for _ in range(2):
            found = engine.generate(
                prompts, max_new_tokens=NEW, sampling=[SamplingParams(**how) for how in hows], stop_tokens=()
            )
            assert found == expected
        assert engine.stats.preemptions > 0
        assert engine.stats.blocks_in_use == 0


def test_a_penalty_takes_the_place_of_the_models(host):
    made, prompts = model("llama", seed=5), [[3, 4, 3, 4, 3], [11]]
    plain = [generated(made, prompt) for prompt in prompts]
    own = [generated(made, prompt, repetition_penalty=4.0) for prompt in prompts]
    made.generation_config.repetition_penalty = 4.0
    with Engine(made) as engine:
        assert engine.generate(prompts, max_new_tokens=NEW) == own != plain
        neutral = SamplingParams(repetition_penalty=1.0)
        assert engine.generate(prompts, max_new_tokens=NEW, sampling=neutral) == plain


@pytest.mark.parametrize("fields", [{"presence_penalty": 2.0}, {"frequency_penalty": 1.0, "presence_penalty": -1.0}])
def test_penalties_of_the_openai_api_on_a_model(host, fields):
    """Token by token, from the logits that transformers computes for all tokens so far."""
    made, prompt = model("llama", seed=5), [3, 4, 3]
    sampling = SamplingParams(**fields)
    wanted = request(0, prompt, [], sampling)
    for _ in range(NEW):
        with torch.no_grad():
            logits = made(torch.tensor([wanted.tokens])).logits[0, -1]
        wanted.append(int(oracle(logits, wanted).argmax()))
    with Engine(made) as engine:
        found = engine.generate([prompt, [5]], max_new_tokens=NEW, sampling=[sampling, SamplingParams()])

    assert found[0] == wanted.new_tokens != generated(made, prompt)


def test_a_bias_of_a_token_that_has_no_logit(host):
    with Engine(model("llama")) as engine, pytest.raises(BatchError, match="a logit_bias with the token 257 was given"):
        engine.submit([1], max_new_tokens=1, sampling=SamplingParams(logit_bias={257: 1.0}))
