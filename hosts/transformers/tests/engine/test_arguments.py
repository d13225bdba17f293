"""Invalid models, options, prompts and requests are refused with a fix, and change nothing."""

from __future__ import annotations

from math import inf
from threading import Event, Thread

import numpy as np
import pytest
import torch
import transformers

from attnplug.errors import (
    AttnplugError,
    BatchError,
    LimitsError,
    NoBackendError,
    NotNegotiatedError,
    RequirementsError,
)
from attnplug_transformers.engine import Engine, EngineStats, Request, Sampling
from hosts.transformers.tests.models import SIZES, config, model

GREEDY, DRAWING = Sampling(), Sampling(temperature=1.5, seed=4)


@pytest.fixture
def engine(host):
    with Engine(model("llama")) as engine:
        yield engine


def refusal(call, kind=AttnplugError):
    with pytest.raises(kind) as refused:
        call()
    assert all((refused.value.problem, refused.value.expected, refused.value.fix))
    return str(refused.value)


@pytest.mark.parametrize("made", [torch.nn.Linear(2, 2), config("llama"), None, "gpt2", transformers.LlamaForCausalLM])
def test_objects_that_are_not_models(made):
    assert "AutoModelForCausalLM" in refusal(lambda: Engine(made), RequirementsError)


def test_a_compiled_model_and_one_on_the_meta_device(host):
    made = model("llama")
    compiled = torch.compile(made, backend="eager")
    assert "pass the model that was compiled" in refusal(lambda: Engine(compiled), RequirementsError)
    assert "on the meta device" in refusal(lambda: Engine(made.to("meta")), RequirementsError)


def test_the_class_is_checked_before_the_length(host):
    """A fix may not lead to the next refusal."""
    states = transformers.AutoModelForCausalLM.from_config(
        transformers.MambaConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, state_size=4)
    )
    hybrid = transformers.AutoModelForCausalLM.from_config(
        transformers.Lfm2Config(**(SIZES | {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 16}))
    )
    relative = transformers.AutoModelForSeq2SeqLM.from_config(
        transformers.T5Config(vocab_size=32, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=4)
    )

    for made, why in ((states, "recurrence"), (hybrid, "2 of 4 layers are conv"), (relative, "an encoder-decoder")):
        for max_seq_len in (None, 10**6):
            said = refusal(
                lambda made=made, max_seq_len=max_seq_len: Engine(made.eval(), max_seq_len=max_seq_len),
                RequirementsError,
            )
            assert why in said
            assert "keep transformers' own attention" in said
            assert "partial" not in said


def test_a_known_type_is_not_read_as_another(host):
    made = model("llama")

    assert "assume='mistral'" in refusal(lambda: Engine(made, assume="mistral"), RequirementsError)
    assert "assume='neither'" in refusal(lambda: Engine(made, assume="neither"), RequirementsError)
    with Engine(made, assume="llama") as engine:
        assert len(engine.generate([[1]], max_new_tokens=1)[0]) == 1


@pytest.mark.parametrize(
    "choice",
    [{"graphs": "yes"}, {"graphs": 1}, {"prefix_caching": "no"}, {"kv_cache_dtype": None}, {"kv_cache_dtype": 8}],
)
def test_options_of_another_type(host, choice):
    name, value = next(iter(choice.items()))

    assert f"{name}={value!r} was given" in refusal(lambda: Engine(model("llama"), **choice), RequirementsError)


@pytest.mark.parametrize("prompts", [[1, 2, 3], 5, None, "text", ["text"], [[1, 2], 3], torch.tensor([1, 2])])
def test_objects_that_are_not_lists_of_prompts(engine, prompts):
    assert "pass [ids] for one prompt" in refusal(lambda: engine.generate(prompts, max_new_tokens=1), BatchError)
    assert not engine.has_work


def test_more_blocks_than_memory(host):
    said = refusal(lambda: Engine(model("llama"), num_blocks=10**9), LimitsError)
    assert "KV caches of 1000000000 blocks" in said
    assert "of memory in all" in said


def test_autocast_is_named(host):
    made = model("llama")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert "torch.autocast to torch.bfloat16 is on" in refusal(lambda: Engine(made), NotNegotiatedError)
    with Engine(made) as engine:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            said = refusal(lambda: engine.generate([[1]], max_new_tokens=1), NotNegotiatedError)
        assert "load the model in that dtype" in said
        assert len(engine.generate([[1]], max_new_tokens=1)[0]) == 1


def test_prompts_as_tensors_and_arrays(engine):
    expected = engine.generate([[1, 2], [3, 4]], max_new_tokens=2)

    for rows in (torch.tensor([[1, 2], [3, 4]]), np.array([[1, 2], [3, 4]]), [np.array([1, 2]), torch.tensor([3, 4])]):
        assert engine.generate(rows, max_new_tokens=2) == expected
        assert engine.submit(rows[0], max_new_tokens=2).tokens == [1, 2]
    assert "call submit() for each" in refusal(lambda: engine.submit(torch.ones(1, 2).long()), BatchError)


def test_a_bias_that_rules_all_tokens_out(engine):
    nothing = Sampling(logit_bias=dict.fromkeys(range(257), -inf))

    assert "-inf was given for all 257 tokens" in refusal(
        lambda: engine.submit([1], max_new_tokens=1, sampling=nothing), LimitsError
    )


def test_prompts_from_a_generator(engine):
    expected = engine.generate([[1, 2], [3]], max_new_tokens=2)

    assert engine.generate((bytes(prompt) for prompt in ([1, 2], [3])), max_new_tokens=2) == expected
    assert engine.generate([], max_new_tokens=2) == []


@pytest.mark.parametrize("stop_tokens", [5, 2.5, "a", [None]])
def test_invalid_stop_tokens(engine, stop_tokens):
    for call in (engine.generate, lambda prompts, **how: engine.submit(prompts[0], **how)):
        said = refusal(lambda call=call: call([[1]], max_new_tokens=1, stop_tokens=stop_tokens), BatchError)
        assert "a flat list of token ids" in said
    assert not engine.has_work


@pytest.mark.parametrize("sampling", ["greedy", {"temperature": 1.0}, 0.5, [{}]])
def test_objects_that_are_not_a_sampling(engine, sampling):
    said = refusal(lambda: engine.generate([[1]], max_new_tokens=1, sampling=sampling), BatchError)
    assert "it is a Sampling" in said
    assert "it is a Sampling" in refusal(lambda: engine.submit([1], max_new_tokens=1, sampling=sampling), BatchError)
    assert not engine.has_work


def test_a_sampling_for_each_prompt(engine):
    prompts = [[1, 2, 3], [4, 5], [6]]
    greedy = engine.generate(prompts, max_new_tokens=6)
    drawn = engine.generate(prompts, max_new_tokens=6, sampling=DRAWING)

    assert engine.generate(prompts, max_new_tokens=6, sampling=[GREEDY, DRAWING, GREEDY]) == [
        greedy[0],
        drawn[1],
        greedy[2],
    ]
    assert drawn[1] != greedy[1]
    assert "2 SamplingParams were given for 3 prompts" in refusal(
        lambda: engine.generate(prompts, max_new_tokens=1, sampling=[GREEDY] * 2), BatchError
    )


def test_requests_of_another_engine_are_not_cancelled(engine):
    foreign = Request(id=0, tokens=[1], max_new_tokens=1)
    with Engine(model("llama")) as other:
        theirs = other.submit([1], max_new_tokens=1)
        for request in (foreign, theirs, 0, None, [theirs]):
            assert "it takes a request of this engine" in refusal(
                lambda request=request: engine.cancel(request), BatchError
            )
        assert theirs.finish_reason is None

    own = engine.submit([1], max_new_tokens=1)
    engine.step()
    engine.cancel(own)
    assert own.finish_reason == "length"


def test_a_concurrent_call_is_refused(engine, monkeypatch):
    entered, left = Event(), Event()
    head = engine.model.lm_head
    run = head.forward

    def slow(*given):
        entered.set()
        assert left.wait(30)
        return run(*given)

    request = engine.submit([1, 2], max_new_tokens=2)
    with monkeypatch.context() as patch:
        patch.setattr(head, "forward", slow)
        thread = Thread(target=engine.step)
        thread.start()
        assert entered.wait(30)
        try:
            calls = {
                "step": engine.step,
                "submit": lambda: engine.submit([1], max_new_tokens=1),
                "cancel": lambda: engine.cancel(request),
                "reset_prefix_cache": engine.reset_prefix_cache,
                "close": engine.close,
            }
            for name, call in calls.items():
                said = refusal(call, LimitsError)
                assert f"{name}() was called during" in said
                assert "one engine serves one thread" in said
        finally:
            left.set()
            thread.join()

    assert engine.step() == [request]
    assert request.finish_reason == "length"


def test_leaving_the_with_block_closes_the_engine(host):
    made = model("llama")
    requests = []

    def fail():
        with Engine(made) as engine:
            requests.append(engine.submit([1], max_new_tokens=3))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert requests[0].finish_reason == "cancelled"
    assert made.config._attn_implementation == "eager"
    with Engine(made) as engine:
        pass
    with pytest.raises(LimitsError, match="closed engine"):
        engine.step()


def test_stats(host):
    with Engine(model("llama"), block_size=4, num_blocks=6, max_num_reqs=2, max_num_tokens=8) as engine:
        assert engine.stats == EngineStats(steps=0, replayed_steps=0, steps_ahead=0, preemptions=0, blocks_in_use=0)
        requests = [engine.submit([token] * 4, max_new_tokens=9) for token in (1, 2)]
        engine.step()
        assert engine.stats == EngineStats(steps=1, replayed_steps=0, steps_ahead=0, preemptions=0, blocks_in_use=2)
        while engine.has_work:
            engine.step()

        assert engine.step() == []
        assert engine.stats.steps > 9
        assert engine.stats.preemptions == engine._scheduler.num_preemptions > 0
        assert engine.stats.blocks_in_use == 0
        assert all(request.finish_reason == "length" for request in requests)

    with Engine(model("llama"), graphs=True, max_num_reqs=2, max_seq_len=64) as engine:
        engine.generate([[1, 2, 3]], max_new_tokens=5)
        assert (engine.stats.steps, engine.stats.replayed_steps) == (5, 4)


def test_selections_have_the_names_of_dense_attention(host):
    made = model("gemma2")
    with Engine(made) as engine:
        names = list(engine.selections)
        assert dict(made.named_modules()).keys() >= set(names)
    made.set_attn_implementation("attnplug")

    assert names == list(host.selections(made)) == [f"model.layers.{index}.self_attn" for index in range(4)]


def test_implementations_have_the_same_names(host):
    with Engine(model("gemma2")) as engine:
        found = engine.implementations

        assert list(found) == list(engine.selections)
        assert [impl.layer.name for impl in found.values()] == [f"layers.{index}.self_attn" for index in range(4)]


def test_features_are_required_of_every_layer(host):
    """One that no backend supports is named, and not dropped."""
    said = refusal(lambda: Engine(model("llama"), features=("acme.rope_fused",)), NoBackendError)

    assert "acme.rope_fused" in said
    assert "is a list" in refusal(lambda: Engine(model("llama"), features="acme.rope_fused"), RequirementsError)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"temperature": 0.5}, "pass sampling=SamplingParams(temperature=...)"),
        ({"max_new_token": 3}, "'max_new_token'; did you mean 'max_new_tokens'?"),
        ({"max_tokens": 3}, "pass max_new_tokens=..."),
        ({"num_beams": 3}, "the engine has no beam search"),
        ({"streamer": None}, "it has max_new_tokens, sampling, stop_tokens"),
    ],
)
def test_unknown_names_are_refused(engine, option, said):
    """The fields of SamplingParams with the way to pass them."""
    for call in (engine.generate, engine.stream, lambda prompts, **how: engine.submit(prompts[0], **how)):
        assert said in refusal(lambda call=call: call([[1]], **{"max_new_tokens": 1, **option}), RequirementsError)
    assert not engine.has_work


def test_a_request_without_a_length_is_refused(engine):
    assert "pass max_new_tokens=..." in refusal(lambda: engine.submit([1]), LimitsError)
    sampling = Sampling(max_new_tokens=2)
    assert [len(one) for one in engine.generate([[1], [2]], max_new_tokens=4, sampling=[sampling, GREEDY])] == [2, 4]
    assert len(engine.generate([[1]], sampling=sampling)[0]) == 2


def test_submit_takes_one_prompt(engine):
    for prompts in ([[1], [2]], ["a", "b"]):
        assert "generate() or stream()" in refusal(lambda prompts=prompts: engine.submit(prompts, max_new_tokens=1))
    assert "the engine has no tokenizer" in refusal(lambda: engine.submit("text", max_new_tokens=1), BatchError)
