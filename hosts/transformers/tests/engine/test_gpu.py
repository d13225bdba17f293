"""The engine on an NVIDIA GPU."""

from __future__ import annotations

from threading import Thread

import pytest
import torch

from attnplug_transformers.engine import Engine, Sampling, SamplingParams
from attnplug_transformers.engine.sampling import sample
from hosts.transformers.tests.engine.reference import NAMES, NEW
from hosts.transformers.tests.engine.test_families import changed, made_of
from hosts.transformers.tests.engine.test_indexer import reference as indexed
from hosts.transformers.tests.models import PAD, generate, model, prompts
from tests.backends.harness import no_synchronization

pytestmark = pytest.mark.gpu


@pytest.fixture
def on_gpu(host):
    """Make a model with the tokens that it generates on the GPU, all with a wide logit margin."""

    def make(name, dtype=torch.float32):
        for seed in range(16):
            torch.manual_seed(seed)
            made = model(name, seed=seed, dtype=dtype).cuda()
            ids, mask = prompts(19, 1, 12, 33, 7, 22, seed=seed)
            found, margin = generate(made, ids.cuda(), mask.cuda(), NEW)
            if margin > 1e-3:
                break
        return made, [[token for token in row if token != PAD] for row in ids.tolist()], found.tolist()

    return make


@pytest.mark.parametrize("backend", [["torch/sdpa"], ["auto"]])
@pytest.mark.parametrize("name", NAMES)
def test_the_tokens_are_those_of_transformers(on_gpu, name, backend):
    made, inputs, expected = on_gpu(name)
    engine = Engine(made, max_num_tokens=24, max_num_reqs=4, backend=backend, max_seq_len=64)

    assert engine.generate(inputs, max_new_tokens=NEW) == expected
    assert {selection.device.type for selection in engine.selections.values()} == {"cuda"}
    engine.close()


def test_kv_caches_fill_the_free_memory(host):
    made = model("llama", head_dim=64, num_key_value_heads=4).cuda()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    free, total = torch.cuda.mem_get_info()
    fraction = 1 - free / total + 0.03

    engine = Engine(made, max_num_reqs=8192, max_num_tokens=8192, memory_fraction=fraction, graphs=False)

    free, total = torch.cuda.mem_get_info()
    assert 1 - free / total < fraction + 0.01
    assert 2 < engine.limits.num_blocks < 8192 * 8 + 1
    assert len(engine.generate([[1, 2, 3]], max_new_tokens=4)[0]) == 4
    engine.close()
    del engine
    assert torch.cuda.memory_allocated() < before + 2**28


def test_sampling_on_the_gpu(on_gpu):
    made, inputs, _ = on_gpu("mistral")
    engine = Engine(made, max_num_tokens=24, max_num_reqs=6)
    sampling = Sampling(temperature=1.2, top_p=0.9, seed=3)

    crowd = engine.generate(inputs, max_new_tokens=NEW, sampling=sampling)

    assert engine.generate(inputs[2:3], max_new_tokens=NEW, sampling=sampling) == crowd[2:3]
    engine.close()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_decode_step_synchronizes_once(on_gpu):
    """The tokens are copied to the host, and nothing else is."""
    made, inputs, _ = on_gpu("gemma2")
    engine = Engine(made)
    requests = [engine.submit(prompt, max_new_tokens=NEW) for prompt in inputs]
    for _ in range(3):
        engine.step()
    step = engine._scheduler.schedule()

    with no_synchronization():
        logits = engine._runner.run(engine._runner.prepare(step))
        tokens = sample(logits, step.sampling)

    assert engine._scheduler.finish_step(step, tokens.tolist()) == requests
    engine.close()


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize(("name", "kv_cache_dtype"), [("deepseek_v3", "auto"), ("deepseek_v3", "fp8"), ("v32", "auto")])
def test_prefills_of_latents_do_not_synchronize(host, name, kv_cache_dtype):
    """A decode, and a long prefill behind a cached prefix; of sparse layers, in one forward pass."""
    if name == "v32":  # experts, which wait, are left out
        made = made_of(changed("deepseek_v32", index_topk=8, mlp_layer_types=["dense"] * 4)).cuda()
    else:
        made = model(name, first_k_dense_replace=4).cuda()
    how = {
        "max_num_tokens": 40,
        "max_num_reqs": 4,
        "backend": "torch/sdpa",
        "kv_cache_dtype": kv_cache_dtype,
        "async_scheduling": False,
    }
    engine = Engine(made, max_seq_len=64, prefix_caching=False, graphs=False, **how)
    steps = []
    for _ in range(2):  # the first pass decides, and compiles
        requests = [engine.submit(list(range(1, length)), max_new_tokens=2) for length in (10, 50)]
        engine.step()
        engine._runner._ranges = {}  # the check of FP8 KV caches reads values
        step = engine._scheduler.schedule()
        steps.append([(one.start, one.num_new_tokens) for one in step])
        if len(steps) == 2:
            torch.cuda.set_sync_debug_mode("error")
        try:
            logits = engine._runner.run(engine._runner.prepare(step))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        engine._scheduler.finish_step(step, sample(logits, step.sampling).tolist())
        for request in requests:
            engine.cancel(request)

    assert steps[0] == steps[1] == [(9, 1), (31, 18)]
    engine.close()


@pytest.mark.parametrize("backend", [["torch/sdpa"], ["auto"]])
def test_indexers_on_a_gpu(host, backend):
    made, inputs, expected = indexed()
    made.cuda()
    try:
        with Engine(made, max_num_tokens=20, max_num_reqs=4, backend=backend, max_seq_len=64) as engine:
            assert engine.generate(inputs, max_new_tokens=8) == expected
    finally:
        made.cpu()


def test_engines_are_made_while_others_run_in_threads(on_gpu):
    """A capture that includes other threads would fail, and so would their steps."""
    made, inputs, expected = on_gpu("llama")
    sizes = {"max_num_tokens": 24, "max_num_reqs": 4, "backend": "torch/sdpa", "max_seq_len": 64, "graphs": True}
    running, found, done = Engine(made, **sizes), [], []

    def go_on():
        while not done:
            found.append(running.generate(inputs, max_new_tokens=NEW))

    thread = Thread(target=go_on)
    thread.start()
    try:
        for _ in range(4):
            engine = Engine(made, **sizes)
            assert engine.generate(inputs, max_new_tokens=NEW) == expected
            engine.close()
    finally:
        done.append(True)
        thread.join()

    assert found
    assert found == [expected] * len(found)
    running.close()


def test_penalties_and_biases_are_those_of_transformers(on_gpu):
    made, inputs, plain = on_gpu("llama")
    bias, penalty, expected = {5: 3.0, 9: -3.0}, 1.5, []
    for prompt in inputs:
        ids = torch.tensor([prompt], device="cuda")
        found = made.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=False,
            pad_token_id=PAD,
            repetition_penalty=penalty,
            sequence_bias=[[[token], value] for token, value in bias.items()],
        )
        expected.append(found[0, len(prompt) :].tolist())
    assert expected != plain

    changed = SamplingParams(repetition_penalty=penalty, logit_bias=bias, logprobs=2)
    with Engine(made, max_num_tokens=24, max_num_reqs=4, max_seq_len=64) as engine:
        how = [changed, SamplingParams(), changed, SamplingParams(), changed, SamplingParams()]
        found = engine.generate(inputs, max_new_tokens=NEW, sampling=how, return_requests=True)
        assert engine.stats.replayed_steps > 0 or engine.why_eager

    assert [request.new_tokens for request in found] == [
        expected[row] if row % 2 == 0 else plain[row] for row in range(6)
    ]
    with torch.no_grad():
        logits = made(torch.tensor([found[0].tokens], device="cuda")).logits[0, len(inputs[0]) - 1 : -1]
    wanted = logits.double().log_softmax(-1).cpu()
    for one, row in zip(found[0].logprobs, wanted, strict=True):
        assert abs(one.logprob - float(row[one.token])) < 1e-3
        assert [token for token, _ in one.top] == row.topk(2).indices.tolist()


@pytest.mark.parametrize(
    "filters", [{"min_p": 0.1}, {"top_k": 20, "top_p": 0.9, "min_p": 0.05}, {"presence_penalty": 1.0}]
)
def test_samples_of_a_prompt_are_those_of_the_cpu(on_gpu, filters):
    made, inputs, _ = on_gpu("llama")
    sampling = SamplingParams(n=3, temperature=1.0, seed=3, **filters)
    with Engine(made, max_num_reqs=4, max_seq_len=64) as engine:
        found = engine.generate(inputs[:2], max_new_tokens=8, sampling=sampling, return_requests=True)
        shared = (len(inputs[0]) - 1) // engine.block_size * engine.block_size
    with Engine(made.cpu(), max_num_reqs=4, max_seq_len=64, backend="torch/sdpa") as engine:
        assert [request.new_tokens for request in found] == engine.generate(
            inputs[:2], max_new_tokens=8, sampling=sampling
        )

    assert [request.num_cached_tokens for request in found[:3]] == [0, shared, shared]
