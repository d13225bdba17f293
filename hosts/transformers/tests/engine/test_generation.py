"""Each field of a generation_config that changes tokens is applied as by `generate`, or refused with a reason."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from transformers import GenerationConfig

from attnplug.errors import BatchError, LimitsError, RequirementsError
from attnplug_transformers.engine import Engine, Sampling, generation
from attnplug_transformers.engine.sampling import ranked_weights
from hosts.transformers.tests.models import PAD, model

EOS, NEW = 7, 12
PROMPTS = [[*range(20, 75), 7, 9], [3, 4, 3, 4, 3], [11]]
FIELDS = [name for name in vars(GenerationConfig()) if not name.startswith("_")]


@pytest.fixture
def made(host):
    return model("llama", seed=5)


def generated(made, prompt, **how):
    """Return what `generate` of transformers appends to a prompt."""
    ids = torch.tensor([prompt])
    found = made.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, pad_token_id=PAD, **how)
    return found[0, len(prompt) :].tolist()


def configure(made, **fields):
    for name, value in fields.items():
        setattr(made.generation_config, name, value)


def plain(made):
    """Return the tokens without any field set, by prompt."""
    return [generated(made, prompt) for prompt in PROMPTS]


# What changes the tokens of a model, from its tokens without: the first and most others are ruled out or forced.
APPLIED = {
    "eos_token_id": lambda free: {"eos_token_id": [free[0][3], free[1][2]]},
    "repetition_penalty": lambda free: {"repetition_penalty": 4.0},
    "encoder_repetition_penalty": lambda free: {"encoder_repetition_penalty": 4.0},
    "no_repeat_ngram_size": lambda free: {"no_repeat_ngram_size": 1},
    "encoder_no_repeat_ngram_size": lambda free: {"encoder_no_repeat_ngram_size": 1},
    "bad_words_ids": lambda free: {"bad_words_ids": [[free[0][0]], free[0][1:3], [free[1][1]]]},
    "sequence_bias": lambda free: {"sequence_bias": [[[free[0][0]], -30.0], [[free[1][1], 5], 30.0]]},
    "min_length": lambda free: {"eos_token_id": free[2][0], "min_length": 6},
    "min_new_tokens": lambda free: {"eos_token_id": [free[0][0], free[1][0]], "min_new_tokens": 5},
    "forced_bos_token_id": lambda free: {"forced_bos_token_id": 99},
    "forced_eos_token_id": lambda free: {"eos_token_id": EOS, "forced_eos_token_id": EOS},
    "exponential_decay_length_penalty": lambda free: {
        "eos_token_id": EOS,
        "exponential_decay_length_penalty": (2, 3.0),
    },
    "suppress_tokens": lambda free: {"suppress_tokens": [free[0][0], free[1][2]]},
    "begin_suppress_tokens": lambda free: {"begin_suppress_tokens": [one[0] for one in free]},
}
REFUSED = {
    "num_beams": 2,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "constraints": ["one"],
    "force_words_ids": [[1]],
    "num_return_sequences": 2,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "guidance_scale": 1.5,
    "watermarking_config": {"bias": 2.0},
    "is_assistant": True,
    "assistant_ensemble_weight": 0.5,
    "max_time": 1.0,
    "token_healing": True,
    "cache_implementation": "quantized",
}
FILTERS = {"top_h": 0.5, "typical_p": 0.9, "epsilon_cutoff": 3e-4, "eta_cutoff": 3e-4}


def test_every_field_is_applied_refused_or_irrelevant():
    kinds = (generation.APPLIED, generation.REFUSED, generation.REFUSED_FILTERS, generation.IRRELEVANT)

    assert {name: sum(name in kind for kind in kinds) for name in FIELDS} == dict.fromkeys(FIELDS, 1)
    assert all(generation.IRRELEVANT.values())
    assert APPLIED.keys() | generation.SAMPLING | {"max_new_tokens", "remove_invalid_values", "stop_strings"} == (
        generation.APPLIED
    )
    assert REFUSED.keys() == generation.REFUSED.keys()
    assert FILTERS.keys() == generation.REFUSED_FILTERS.keys()


@pytest.mark.parametrize("name", APPLIED)
def test_tokens_are_those_of_generate(made, name):
    free = plain(made)
    configure(made, **APPLIED[name](free))
    expected = plain(made)
    assert expected != free

    with Engine(made, max_num_tokens=8, max_num_reqs=4, num_blocks=12, block_size=8) as engine:
        assert engine.generate(PROMPTS, max_new_tokens=NEW) == expected  # in chunks, together, some preempted
        assert engine.generate(PROMPTS, max_new_tokens=NEW, sampling=Sampling()) == expected
    configure(made, **dict.fromkeys(APPLIED[name](free)))
    assert plain(made) == free


def test_all_processors_together_are_in_the_order_of_generate(made):
    free = plain(made)
    fields = {}
    # A decay after these others gives NaN, which generate() takes for the highest logit.
    for name in generation.PROCESSORS - {"remove_invalid_values", "exponential_decay_length_penalty"}:
        fields |= APPLIED[name](free)
    configure(made, **fields | {"eos_token_id": EOS, "forced_bos_token_id": 99})
    expected = plain(made)

    with Engine(made) as engine:
        assert engine.generate(PROMPTS, max_new_tokens=NEW) == expected


def test_the_most_tokens_are_those_of_the_generation_config(made):
    free = plain(made)
    configure(made, max_new_tokens=5)
    with Engine(made) as engine:
        assert engine.generate(PROMPTS) == [tokens[:5] for tokens in free]
        assert len(engine.generate(PROMPTS[:1], max_new_tokens=3)[0]) == 3


def test_least_tokens_and_bad_words_of_a_request(made):
    free = plain(made)
    words, stop = [[free[0][0]], free[0][1:3]], free[1][1]
    expected = (
        generated(made, PROMPTS[0], bad_words_ids=words),
        generated(made, PROMPTS[1], eos_token_id=stop, min_new_tokens=4),
    )
    with Engine(made) as engine:
        found = engine.generate(
            PROMPTS[:2],
            max_new_tokens=NEW,
            sampling=[Sampling(bad_words=words), Sampling(min_tokens=4, stop_token_ids=[stop])],
        )
        assert found == list(expected)
        with pytest.raises(BatchError, match="bad_words with the token 5000"):
            engine.submit([1], max_new_tokens=1, sampling=Sampling(bad_words=[[5000]]))
        with pytest.raises(RequirementsError, match=r"the bad_words \['no'\] were given"):
            engine.submit([1], max_new_tokens=1, sampling=Sampling(bad_words="no"))


def test_stop_tokens_of_a_request_take_the_place_of_the_models(made):
    free = plain(made)
    configure(made, eos_token_id=free[0][0], min_new_tokens=3)
    expected = generated(made, PROMPTS[0], eos_token_id=free[0][1])
    with Engine(made) as engine:
        assert engine.generate(PROMPTS[:1], max_new_tokens=NEW, stop_tokens=[free[0][1]]) == [expected]
        assert engine.generate(PROMPTS[:1], max_new_tokens=NEW, stop_tokens=()) == free[:1]


def test_invalid_logits_are_removed(made):
    with torch.no_grad():
        made.lm_head.weight[5] = float("nan")
    configure(made, remove_invalid_values=True)
    expected = plain(made)

    with Engine(made) as engine:
        assert engine.generate(PROMPTS, max_new_tokens=NEW) == expected


@pytest.mark.parametrize(
    "fields",
    [{}, {"temperature": 0.7}, {"top_k": 5, "top_p": 0.6}, {"top_k": 0, "top_p": 0.9}, {"top_k": 40, "min_p": 0.4}],
)
def test_requests_without_a_sampling_draw_as_generate_does(made, fields):
    configure(made, do_sample=True, **fields)
    ids = torch.tensor([PROMPTS[0]])
    found = made.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=1,
        output_scores=True,
        output_logits=True,
        return_dict_in_generate=True,
    )
    with Engine(made) as engine:
        request = engine.submit(PROMPTS[0], max_new_tokens=1)
        engine.step()

        # All of the vocabulary is no top-k.
        sampling = evolve(request.sampling, top_k=request.sampling.top_k or PAD + 1)
        order, weights = ranked_weights(found.logits[0], [sampling])
        drawn = torch.zeros(1, PAD + 1).scatter_(-1, order, (weights / weights.sum()).float())
        torch.testing.assert_close(drawn, found.scores[0].softmax(-1), atol=1e-6, rtol=1e-4)
        chosen = engine.submit(PROMPTS[0], max_new_tokens=1, sampling=Sampling())
        assert chosen.sampling == Sampling()


def test_top_k_of_one_is_greedy_in_both(made):
    free = plain(made)
    configure(made, do_sample=True, top_k=1)
    assert plain(made) == free
    with Engine(made) as engine:
        assert engine.generate(PROMPTS, max_new_tokens=NEW) == free


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_fields_are_refused(made, name):
    with Engine(made) as engine:
        configure(made, **{name: REFUSED[name]})
        with pytest.raises(RequirementsError, match=f"{name}=.* is set in the model's generation_config") as refused:
            engine.submit([1, 2], max_new_tokens=1)
        assert f"model.generation_config.{name} = None" in refused.value.fix
        assert refused.value.expected
        assert not engine.has_work
        configure(made, **{name: None})
        assert engine.generate([[1, 2]], max_new_tokens=1)


@pytest.mark.parametrize("name", FILTERS)
def test_filters_are_refused_where_they_apply(made, name):
    free = plain(made)
    configure(made, **{name: FILTERS[name]})
    with Engine(made) as engine:
        assert engine.generate(PROMPTS, max_new_tokens=NEW) == free  # greedy, as in generate
        configure(made, do_sample=True)
        with pytest.raises(RequirementsError, match=f"{name}=") as refused:
            engine.generate(PROMPTS, max_new_tokens=NEW)
        assert "or pass SamplingParams" in refused.value.fix
        assert engine.generate(PROMPTS, max_new_tokens=NEW, sampling=Sampling()) == free


def test_irrelevant_fields_change_nothing(made):
    with Engine(made) as engine:
        free = engine.generate(PROMPTS, max_new_tokens=NEW)
        for name in generation.IRRELEVANT:
            configure(made, **{name: 3})
            assert engine.generate(PROMPTS, max_new_tokens=2) == [one[:2] for one in free]
            configure(made, **{name: None})


def test_fields_of_later_versions_are_refused(made, monkeypatch):
    monkeypatch.setattr(generation, "_unclassified", lambda: (("charm", None),))
    with Engine(made) as engine:
        assert engine.generate([[1]], max_new_tokens=1)
        configure(made, charm=0.5)
        with pytest.raises(RequirementsError, match=r"charm=0\.5"):
            engine.submit([1], max_new_tokens=1)


@pytest.mark.parametrize(
    "fields", [{"repetition_penalty": -1.0}, {"no_repeat_ngram_size": 1.5}, {"sequence_bias": [[[5000], 1.0]]}]
)
def test_invalid_values_are_refused(made, fields):
    configure(made, **fields)
    with Engine(made) as engine:
        with pytest.raises(RequirementsError, match="generation_config cannot be applied"):
            engine.submit([1], max_new_tokens=1)
        assert not engine.has_work


def test_a_temperature_out_of_range_is_refused(made):
    configure(made, do_sample=True, temperature=-1.0)
    with Engine(made) as engine, pytest.raises(LimitsError, match="temperature"):
        engine.submit([1], max_new_tokens=1)


def test_a_model_without_a_generation_config(made):
    free = plain(made)
    made.generation_config = None
    with Engine(made) as engine:
        assert engine.generate(PROMPTS, max_new_tokens=NEW) == free
