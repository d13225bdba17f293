"""The engine on complete models: its tokens are those of transformers alone, independent of the rest of the batch."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnplug
from attnplug.contract import StepBuilder, read_steps, recording
from attnplug.errors import (
    BatchError,
    CacheError,
    LimitsError,
    NotNegotiatedError,
    RequirementsError,
    UnknownBackendError,
)
from attnplug_transformers.engine import Engine, Sampling
from attnplug_transformers.engine.sampling import sample
from hosts.transformers.tests.engine.reference import NAMES, NEW, reference
from hosts.transformers.tests.fakes.separate_plans import MANIFEST
from hosts.transformers.tests.models import model
from tests.examples import examples
from tests.threads import together
from tests.torch_pair import RUNS, offer_pair


@pytest.fixture
def open_engine(host):
    """Make engines, and close them afterwards: the tests share their models."""
    made = []

    def opened(name="mistral", **how):
        made.append(Engine(reference(name)[0] if isinstance(name, str) else name, **how))
        return made[-1]

    yield opened
    for engine in made:
        engine.close()


def pool_of(engine):
    return engine._scheduler.pool


def assert_idle(engine):
    assert not engine.has_work
    assert pool_of(engine).num_free == pool_of(engine).num_usable


@pytest.mark.parametrize("name", ["mistral", "gemma2"])
def test_a_routed_pair_decodes_on_one_side(open_engine, tmp_path, monkeypatch, name):
    _, prompts, expected = reference(name)
    engine = open_engine(name, async_scheduling=True, backend=offer_pair(tmp_path, monkeypatch))

    assert engine.generate(prompts, max_new_tokens=NEW) == expected
    sides = {(side, len(set(lens)) == 1 and lens[0] == 1) for side, lens in RUNS}
    assert sides == {("first", True), ("second", False)}


def test_recorded_steps_are_those_that_ran(open_engine, tmp_path, monkeypatch):
    """Whose lengths are those of the prompts and of the tokens behind them, and which a plan of the engine names."""
    file = tmp_path / "steps.jsonl"
    monkeypatch.setenv("ATTNPLUG_RECORD", str(file))
    attnplug.refresh()
    recording.recorder.cache_clear()
    _, prompts, expected = reference("gemma2")  # windows in every second layer
    try:
        engine = open_engine("gemma2", prefix_caching=False)
        assert engine.generate(prompts, max_new_tokens=NEW) == expected
    finally:
        monkeypatch.undo()
        attnplug.refresh()
        recording.recorder.cache_clear()

    steps = read_steps(file).steps

    layers = {step.layer for step in steps}
    assert len({layer.agreement.requirements.sliding_window for layer in layers}) == 2
    for layer in layers:
        keys = [length for step in steps if step.layer is layer for length in step.seq_lens]
        new = [length for step in steps if step.layer is layer for length in step.query_lens]
        assert sum(new) == sum(len(prompt) + NEW - 1 for prompt in prompts)  # the last token is not an input
        assert max(keys) == max(map(len, prompts)) + NEW - 1
        assert {length for length in keys if length in map(len, prompts)} >= set(map(len, prompts))
    assert "gemma" not in file.read_text(encoding="utf-8").lower()


@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_are_those_of_transformers(open_engine, name):
    _, prompts, expected = reference(name)
    engine = open_engine(name, async_scheduling=True)

    assert engine.generate(prompts, max_new_tokens=NEW) == expected
    assert engine.generate(prompts, max_new_tokens=NEW) == expected  # with all prefixes cached
    assert engine.stats.steps_ahead > NEW
    assert_idle(engine)
    assert len({token for tokens in expected for token in tokens}) > 8  # a model that repeats itself proves little


@pytest.mark.parametrize("name", ["gpt2", "llama4"])
def test_learned_positions_and_chunks(open_engine, name):
    _, prompts, expected = reference(name)

    assert open_engine(name, max_num_tokens=16, max_num_reqs=4).generate(prompts, max_new_tokens=NEW) == expected


@pytest.mark.unmeasured
@settings(max_examples=examples(30))
@given(
    name=st.sampled_from(NAMES),
    block_size=st.sampled_from([1, 3, 8, 16, 32]),
    sizes=st.tuples(st.integers(1, 9), st.integers(0, 40)),
    prefix_caching=st.booleans(),
    spare=st.sampled_from([0, 1, 3, 100]),
    ahead=st.booleans(),
    order=st.permutations(range(9)),
    arrivals=st.lists(st.integers(0, 12), min_size=9, max_size=9),
)
def test_the_tokens_depend_on_nothing_but_the_prompt(
    name, block_size, sizes, prefix_caching, spare, ahead, order, arrivals
):
    made, prompts, expected = reference(name)
    longest = -(-(max(map(len, prompts)) + NEW) // block_size)
    engine = Engine(
        made,
        block_size=block_size,
        max_num_reqs=sizes[0],
        max_num_tokens=sum(sizes),
        prefix_caching=prefix_caching,
        num_blocks=1 + longest + spare,
        async_scheduling=ahead,
    )
    try:
        found = _arriving(engine, [prompts[index] for index in order], arrivals)
        assert found == [expected[index] for index in order]
        assert_idle(engine)
    finally:
        engine.close()


def _arriving(engine, prompts, arrivals):
    """Submit each prompt at its step."""
    requests = {}
    for step in range(1 + max(arrivals)):
        for index, prompt in enumerate(prompts):
            if arrivals[index] == step:
                requests[index] = engine.submit(prompt, max_new_tokens=NEW)
        engine.step()
    while engine.has_work:
        engine.step()
    return [requests[index].new_tokens for index in range(len(prompts))]


def test_too_few_blocks_preempt_and_recompute(open_engine):
    _, prompts, expected = reference("gemma2")
    engine = open_engine("gemma2", block_size=4, num_blocks=15, prefix_caching=False)

    assert engine.generate(prompts, max_new_tokens=NEW) == expected
    assert engine._scheduler.num_preemptions > 0


def test_a_step_returns_the_requests_that_got_a_token(open_engine):
    engine = open_engine(max_num_tokens=8, max_num_reqs=2)
    _, prompts, expected = reference("mistral")
    short, long = (engine.submit(prompts[index], max_new_tokens=2) for index in (4, 0))

    assert engine.step() == [short]  # 7 tokens, and the first of the long one
    assert engine.step() == [short]
    assert short.new_tokens == expected[4][:2]
    assert short.finish_reason == "length"
    assert engine.step() == []
    assert engine.step() == [long]
    assert engine.step() == [long]
    assert engine.step() == []
    assert not engine.has_work


def test_stop_tokens_end_a_request(open_engine, monkeypatch):
    made, prompts, expected = reference("llama")
    engine = open_engine("llama")
    stop = expected[0][4]
    upto = expected[0][: expected[0].index(stop) + 1]

    assert engine.generate(prompts[:1], max_new_tokens=NEW, stop_tokens=[stop]) == [upto]
    for own in (stop, [stop, 3]):
        monkeypatch.setattr(made.generation_config, "eos_token_id", own)
        assert engine.generate(prompts[:1], max_new_tokens=NEW)[0] == upto
    assert engine.generate(prompts[:1], max_new_tokens=NEW, stop_tokens=()) == expected[:1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_seed_draws_equal_tokens_from_equal_logits(open_engine, monkeypatch, dtype):
    """Logits depend on the batch by rounding: little in float32, where the tokens are equal, and more in bfloat16."""
    made, prompts = model("llama", dtype=dtype), reference("llama")[1]
    seen = [{}, {}]
    draws = Sampling(temperature=1.5, top_k=50, top_p=0.9, seed=7)

    def run(found, how, prompts):
        def recording(logits, requests):
            tokens = sample(logits, requests)
            for row, request in enumerate(requests):
                if request.sampling is draws:
                    found[tuple(request.tokens)] = (logits[row].clone(), int(tokens[row]))
            return tokens

        monkeypatch.setattr("attnplug_transformers.engine.sampler.sample", recording)
        engine = open_engine(made, **how)
        others = [engine.submit(prompt, max_new_tokens=NEW) for prompt in prompts[1:]]
        tokens = engine.generate(prompts[:1], max_new_tokens=NEW, sampling=draws)
        preemptions = engine.stats.preemptions
        for other in others:
            engine.cancel(other)
        assert_idle(engine)
        return tokens, preemptions

    alone, _ = run(seen[0], {}, prompts[:1])
    crowded, preemptions = run(
        seen[1],
        {"num_blocks": 14, "block_size": 4, "max_num_tokens": 6, "max_num_reqs": 6, "async_scheduling": True},
        prompts,
    )

    assert preemptions > 0
    common = seen[0].keys() & seen[1].keys()
    assert common
    for tokens in common:
        (some, drawn), (others, again) = seen[0][tokens], seen[1][tokens]
        assert drawn == again or not some.equal(others)
        if dtype == torch.float32:
            torch.testing.assert_close(some, others, atol=1e-4, rtol=1e-4)
    if dtype == torch.float32:
        assert crowded == alone != [reference("llama")[2][0]]


def test_a_cancelled_request_keeps_its_tokens(open_engine):
    _, prompts, expected = reference("mistral")
    engine = open_engine()
    requests = [engine.submit(prompt, max_new_tokens=NEW) for prompt in prompts]
    for _ in range(3):
        engine.step()

    engine.cancel(requests[0])
    while engine.has_work:
        engine.step()

    assert requests[0].finish_reason == "cancelled"
    assert requests[0].new_tokens == expected[0][:3]
    assert [request.new_tokens for request in requests[1:]] == expected[1:]
    assert_idle(engine)


EVERY_SAMPLING = [
    Sampling(max_new_tokens=3),
    Sampling(max_new_tokens=9, temperature=1.0, seed=1),
    Sampling(max_new_tokens=5, temperature=1.0, top_p=0.8, seed=2),
    Sampling(max_new_tokens=9, temperature=1.0, top_k=9, seed=3),
    Sampling(max_new_tokens=9, repetition_penalty=1.3, logit_bias={5: 2.0}),
    Sampling(max_new_tokens=9, frequency_penalty=0.5, temperature=1.0, seed=4, logprobs=2),
    Sampling(max_new_tokens=9, logprobs=0),
]


@pytest.mark.parametrize("graphs", [False, True])
def test_a_step_ahead_draws_the_same_tokens(open_engine, graphs):
    """Seeds, penalties and log-probabilities are those of the tokens before, which come after the next launch."""
    made, prompts, _ = reference("llama")
    results = []
    for ahead in (False, True):
        engine = open_engine(made, async_scheduling=ahead, graphs=graphs)
        some = engine.generate(prompts[:7], sampling=EVERY_SAMPLING, return_requests=True)
        results.append([(one.new_tokens, one.logprobs) for one in some])
        assert bool(engine.stats.steps_ahead) == ahead

    assert results[0] == results[1]


def test_a_late_stop_costs_one_token(open_engine):
    made, prompts, expected = reference("llama")
    engine = open_engine(made, async_scheduling=True)
    stop = expected[0][4]
    count = expected[0].index(stop) + 1
    stopped = engine.submit(prompts[0], max_new_tokens=NEW, stop_tokens=[stop])
    while not stopped.is_finished:
        engine.step()

    assert stopped.new_tokens == expected[0][:count]
    assert (engine.stats.steps, engine.stats.steps_ahead) == (count + 1, count)
    assert_idle(engine)
    assert engine.step() == []
    assert engine.generate(prompts, max_new_tokens=NEW) == expected


def test_what_was_launched_ahead_is_dropped_with_its_reason(open_engine):
    """It is run again on other weights; nobody waits for it after a cancel."""
    made, prompts, expected = reference("llama")
    engine = open_engine(made, async_scheduling=True)
    request = engine.submit(prompts[0], max_new_tokens=NEW)
    engine.step()
    ahead = engine.stats.steps
    engine.reset_prefix_cache()
    engine.step()
    assert (ahead, engine.stats.steps) == (2, 4)
    engine.cancel(request)
    other = engine.submit(prompts[1], max_new_tokens=NEW)
    while engine.has_work:
        engine.step()

    assert (request.new_tokens, other.new_tokens) == (expected[0][:2], expected[1])
    assert_idle(engine)


def test_requests_that_never_fit_are_refused(open_engine):
    engine = open_engine("llama", num_blocks=4, block_size=8, max_seq_len=64)

    with pytest.raises(CacheError, match="3 of the cache's 4 blocks"):
        engine.submit([1] * 20, max_new_tokens=10)
    with pytest.raises(LimitsError, match="max_seq_len=64"):
        engine.submit([1] * 60, max_new_tokens=10)
    with pytest.raises(BatchError, match="stop token 257 was given"):
        engine.submit([1], max_new_tokens=1, stop_tokens=[3, 257])
    with pytest.raises(BatchError, match="tokens from 0 to 256"):
        engine.submit([1, 257], max_new_tokens=1)
    with pytest.raises(BatchError, match="empty prompt"):
        engine.generate([[1, 2], []], max_new_tokens=1)
    assert_idle(engine)


def test_a_failed_step_is_repeated(open_engine, monkeypatch):
    made, prompts, expected = reference("gemma2")
    engine = open_engine("gemma2", block_size=4, num_blocks=40, async_scheduling=True)
    requests = [engine.submit(prompt, max_new_tokens=NEW) for prompt in prompts]
    layer, run = made.model.layers[2].mlp, made.model.layers[2].mlp.forward
    count = 0

    def fails(*given, **named):
        nonlocal count
        count += 1
        if count % 3 == 0:
            raise RuntimeError("out of luck")
        return run(*given, **named)

    monkeypatch.setattr(layer, "forward", fails)
    while engine.has_work:
        try:
            engine.step()
        except RuntimeError:
            engine.cancel(requests[1])

    assert requests[1].finish_reason == "cancelled"
    assert [r.new_tokens for r in (requests[0], *requests[2:])] == [expected[0], *expected[2:]]
    assert_idle(engine)


def test_a_failure_cancels_the_requests_of_generate(open_engine, monkeypatch):
    made, prompts, expected = reference("llama")
    engine = open_engine("llama")
    before = engine.submit(prompts[3], max_new_tokens=NEW)

    def fails(*given, **named):
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(made.lm_head, "forward", fails)
        with pytest.raises(RuntimeError, match="out of luck"):
            engine.generate(prompts[:2], max_new_tokens=NEW)

    assert engine.generate(prompts[:2], max_new_tokens=NEW) == expected[:2]
    assert before.new_tokens == expected[3]
    assert_idle(engine)


def test_engines_in_two_threads(open_engine):
    """Two models, and two engines on one of them."""
    engines = {"llama": open_engine("llama"), "gpt_oss": open_engine("gpt_oss", block_size=4)}
    jobs = [("llama", engines["llama"]), ("gpt_oss", engines["gpt_oss"]), ("llama", open_engine("llama", block_size=8))]
    found = [None] * len(jobs)

    def work(index):
        name, engine = jobs[index]
        for _ in range(3):
            found[index] = engine.generate(reference(name)[1], max_new_tokens=NEW)

    together(*(partial(work, index) for index in range(len(jobs))))

    assert found == [reference(name)[2] for name, _ in jobs]


def test_a_named_backend_with_a_plan_per_layer(open_engine, tmp_path):
    manifest = tmp_path / "attnplug.toml"
    manifest.write_text(MANIFEST)
    attnplug.register("hosts.transformers.tests.fakes.separate_plans", manifest=manifest)
    _, prompts, expected = reference("gemma2")

    engine = open_engine("gemma2", backend="separate")

    assert engine.generate(prompts, max_new_tokens=NEW) == expected
    assert {selection.id for selection in engine.selections.values()} == {"separate/sdpa"}
    assert engine.block_size == 8
    assert [len(builder.plan_groups) for builder in engine._runner._builders] == [2, 2]
    with pytest.raises(UnknownBackendError, match="nosuch"):
        open_engine("gemma2", backend="nosuch")


def test_each_group_builds_once_a_step(open_engine, monkeypatch):
    engine = open_engine("gemma2")
    built, build = [], StepBuilder.build

    def counting(self, batch, **how):
        built.append((self, batch))
        return build(self, batch, **how)

    monkeypatch.setattr(StepBuilder, "build", counting)
    engine.generate(reference("gemma2")[1], max_new_tokens=3)

    assert len(built) == 3 * 2  # three steps, layers with and without a window
    assert len({builder for builder, _ in built}) == 2
    assert len({id(batch) for _, batch in built}) == 3
    assert set(engine.selections) == {f"model.layers.{index}.self_attn" for index in range(4)}


def test_a_model_without_logits_to_keep(open_engine):
    _, prompts, expected = reference("qwen3")
    engine = open_engine("qwen3")
    engine._runner._keeps = False

    assert engine.generate(prompts, max_new_tokens=NEW) == expected


@pytest.mark.parametrize("dtype", ["fp8_e4m3", torch.float8_e4m3fn])
@pytest.mark.parametrize("name", NAMES)
def test_fp8_kv_caches(open_engine, name, dtype):
    _, prompts, expected = reference(name)
    engine = open_engine(name, kv_cache_dtype=dtype, max_num_tokens=64)

    found = engine.generate(prompts, max_new_tokens=1)

    equal = sum(one == other[:1] for one, other in zip(found, expected, strict=True))
    assert equal >= len(prompts) // 2  # rounding changes some: these models are sharp
    assert {selection.agreement.kv_cache_dtype for selection in engine.selections.values()} == {"fp8_e4m3"}
    assert 4 * engine._groups.bytes_per_block == open_engine(name)._groups.bytes_per_block


def scaled(k_factors, v_factors):
    """Return a Llama with larger keys and values, by KV head, that computes the same."""
    made = model("llama")
    with torch.no_grad():
        for layer in made.model.layers:
            attention = layer.self_attn
            k, v = (torch.tensor(one).repeat_interleave(8)[:, None] for one in (k_factors, v_factors))
            attention.k_proj.weight.mul_(k)
            attention.v_proj.weight.mul_(v)
            attention.q_proj.weight.div_(k.view(2, 8, 1).repeat_interleave(2, 0).view(-1, 1))
            attention.o_proj.weight.div_(v.view(2, 8).repeat_interleave(2, 0).view(1, -1))
    return made


@pytest.mark.parametrize(
    ("k_scale", "v_scale", "shape"), [([256.0] * 2, [512.0] * 2, (1,)), ([256.0, 4096.0], [1.0, 512.0], (2, 1, 1))]
)
def test_fp8_kv_caches_use_the_scales_of_a_checkpoint(open_engine, caplog, k_scale, v_scale, shape):
    _, prompts, _ = reference("llama")
    expected = open_engine(model("llama"), kv_cache_dtype="fp8").generate(prompts, max_new_tokens=NEW)
    made = scaled(k_scale, v_scale)
    for layer in made.model.layers:
        for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
            layer.self_attn.register_buffer(name, torch.tensor(scale)[: shape[0]].view(shape))

    engine = open_engine(made, kv_cache_dtype="fp8")

    assert engine.generate(prompts, max_new_tokens=NEW) == expected  # powers of two change no rounding
    assert {one.requirements.per_head_scales for one in engine.selections.values()} == {shape[0] > 1}
    assert not caplog.records


@pytest.mark.parametrize("how", [{}, {"max_num_tokens": 16, "max_num_reqs": 4}], ids=["whole", "chunked"])
def test_fp8_latents_use_the_scale_of_keys(open_engine, caplog, how):
    _, prompts, _ = reference("deepseek_v3")
    expected = open_engine(model("deepseek_v3"), kv_cache_dtype="fp8", **how).generate(prompts, max_new_tokens=NEW)
    made = model("deepseek_v3")
    with torch.no_grad():
        for layer in made.model.layers:
            attention = layer.self_attn
            attention.kv_a_layernorm.weight.mul_(4096)
            attention.kv_b_proj.weight.div_(4096)
            attention.kv_a_proj_with_mqa.weight[16:].mul_(4096)
            attention.q_b_proj.weight.view(4, 12, 12)[:, 8:].div_(4096)
            attention.k_scale, attention.v_scale = torch.tensor(4096.0), torch.tensor(3.0)

    engine = open_engine(made, kv_cache_dtype="fp8", **how)

    assert engine.generate(prompts, max_new_tokens=NEW) == expected  # powers of two change no rounding
    assert not caplog.records


def test_values_beyond_an_fp8_kv_cache_are_reported_once(open_engine, caplog):
    _, prompts, _ = reference("llama")
    engine = open_engine(scaled([4096.0] * 2, [1.0] * 2), kv_cache_dtype="fp8")

    engine.generate(prompts, max_new_tokens=2)
    engine.generate(prompts, max_new_tokens=2)

    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 4  # one of each layer
    assert all("keys of layers." in one and "holds up to 448" in one for one in said)


def test_scales_of_another_shape_are_refused(open_engine):
    made = model("llama")
    made.model.layers[1].self_attn.k_scale = torch.ones(3)

    with pytest.raises(RequirementsError, match=r"has a k_scale of shape \(3,\)"):
        open_engine(made, kv_cache_dtype="fp8")


def test_half_precision(open_engine):
    made = model("llama", dtype=torch.bfloat16)
    engine = open_engine(made)

    assert len(engine.generate([[1, 2, 3]], max_new_tokens=4)[0]) == 4
    assert {selection.requirements.dtype for selection in engine.selections.values()} == {"bfloat16"}


class TestClosing:
    """The model's attention is restored by its last engine."""

    def test_the_last_engine_restores_the_models_attention(self, host):
        made, prompts, _ = reference("llama")
        first, second = Engine(made), Engine(made)

        second.close()
        first.generate(prompts[:1], max_new_tokens=2)
        first.close()
        first.close()

        assert made.config._attn_implementation == "eager"
        with pytest.raises(LimitsError, match="closed engine"):
            first.submit([1], max_new_tokens=1)
        with pytest.raises(LimitsError, match="closed engine"):
            first.step()

    def test_unfinished_requests_are_cancelled(self, host):
        engine = Engine(reference("llama")[0])
        request = engine.submit([1, 2], max_new_tokens=5)
        engine.step()

        engine.close()

        assert request.finish_reason == "cancelled"

    def test_a_garbage_collected_engine_restores_the_attention(self, host):
        made = reference("llama")[0]
        engine = Engine(made)
        assert made.config._attn_implementation == "attnplug_engine"

        del engine

        assert made.config._attn_implementation == "eager"

    def test_a_refused_engine_restores_the_attention(self, host):
        made = reference("llama")[0]

        with pytest.raises(UnknownBackendError):
            Engine(made, backend="nosuch")

        assert made.config._attn_implementation == "eager"

    def test_a_call_of_the_model_by_other_code_is_refused(self, open_engine):
        engine = open_engine("llama")

        with pytest.raises(NotNegotiatedError, match=r"engine\.close\(\)"):
            engine.model(input_ids=torch.tensor([[1, 2]]), use_cache=False)

    def test_another_attention_meanwhile_is_detected(self, open_engine):
        engine = open_engine("llama")
        engine.model.set_attn_implementation("eager")

        with pytest.raises(NotNegotiatedError, match="did not call the engine"):
            engine.generate([[1, 2]], max_new_tokens=1)
        assert_idle(engine)
