"""transformers' continuous batching on attnplug: `generate_batch` beside `generate`, token by token in float32."""

from __future__ import annotations

import random

import pytest
import torch
import transformers

import attnplug
import attnplug_transformers
from attnplug.errors import AttnplugError, NotNegotiatedError
from attnplug.torch_backend.impl import TorchImpl
from attnplug_transformers import continuous, continuous_batching
from hosts.transformers.tests.models import PAD, SIZES, model

NAMES = ("llama", "qwen3", "mistral", "gemma2", "gpt_oss")
LENGTHS = (5, 33, 50, 12, 1, 40, 9)
NEW = 10


@pytest.fixture
def runs(monkeypatch):
    """Record the query lengths of each run of the built-in backend."""
    found, run = [], TorchImpl.run

    def recorded(self, *given):
        found.append(given[4].batch.query_start_loc.diff().tolist())
        run(self, *given)

    monkeypatch.setattr(TorchImpl, "run", recorded)
    return found


def prompts_of(lengths):
    numbers = random.Random(0)
    return [[numbers.randrange(0, PAD) for _ in range(length)] for length in lengths]


def options():
    return transformers.GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=PAD)


def by_generate(made, prompts):
    """Return the new tokens of each prompt, one generated after another, by transformers alone."""
    with torch.inference_mode():
        found = [made.generate(torch.tensor([one]), generation_config=options())[0] for one in prompts]
    return {tuple(one): row[len(one) :].tolist() for one, row in zip(prompts, found, strict=True)}


def in_batches(made, prompts, **more):
    """Return the results of `generate_batch`."""
    if continuous.NAME.startswith("paged|") and made.device.type == "cpu":
        pytest.importorskip("psutil", reason="transformers 5.17 measures the memory of the CPU by psutil")
    settings = {"max_batch_tokens": 24, "num_blocks": 64} | more
    size = "page_size" if hasattr(transformers.ContinuousBatchingConfig(), "page_size") else "block_size"
    config = transformers.ContinuousBatchingConfig(**{size: 16}, **settings)
    return made.generate_batch(
        inputs=prompts, generation_config=options(), continuous_batching_config=config, progress_bar=False
    )


def tokens_of(results):
    assert [one.error for one in results.values()] == [None] * len(results)
    return {tuple(one.prompt_ids): one.generated_tokens for one in results.values()}


def eager(name):
    made = model(name)
    made.set_attn_implementation("eager")
    return made


@pytest.mark.parametrize(
    "name", [name if name == "llama" else pytest.param(name, marks=pytest.mark.slow) for name in NAMES]
)
def test_tokens_are_those_of_generate(name, host, runs):
    made, prompts = eager(name), prompts_of(LENGTHS)
    wanted = by_generate(made, prompts)
    assert not runs

    with continuous_batching(made) as handle:
        found = tokens_of(in_batches(made, prompts))

    assert found == wanted
    assert handle.calls == len(runs) > NEW
    assert any(max(lengths) == 1 for lengths in runs)  # a step of decodes
    assert any(len(lengths) > 1 and max(lengths) > 1 for lengths in runs)


def test_a_shared_prefix_is_computed_once(host, runs):
    made, (prefix, *ends) = eager("llama"), prompts_of((40, 3, 20, 7))
    prompts = [prefix + end for end in ends]
    wanted = by_generate(made, prompts)

    with continuous_batching(made):
        found = tokens_of(in_batches(made, prompts))

    layers = made.config.num_hidden_layers
    assert found == wanted
    assert sum(map(sum, runs)) // layers < sum(map(len, prompts)) + len(prompts) * (NEW - 1)


def test_more_requests_than_fit_are_served(host, runs):
    made, prompts = eager("llama"), prompts_of((30, 30, 30, 30, 30, 30))
    wanted = by_generate(made, prompts)

    with continuous_batching(made):
        found = tokens_of(in_batches(made, prompts, num_blocks=8))

    assert found == wanted
    assert max(map(len, runs)) < len(prompts)


def test_other_models_keep_their_attention(host, runs):
    made, other, prompts = eager("llama"), eager("qwen3"), prompts_of((5, 9))
    wanted = by_generate(other, prompts)

    with continuous_batching(made):
        assert other.config._attn_implementation == "eager"
        assert by_generate(other, prompts) == wanted
        assert not runs


@pytest.mark.slow
def test_the_attention_of_before_is_restored(host, runs):
    made, prompts = eager("llama"), prompts_of((5, 9))
    wanted = by_generate(made, prompts)

    def interrupted():
        with continuous_batching(made) as handle:
            assert made.config._attn_implementation == handle.name
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        interrupted()

    assert made.config._attn_implementation == "eager"
    assert by_generate(made, prompts) == wanted
    assert tokens_of(in_batches(made, prompts)) == wanted
    assert not runs


def finished(manager, count):
    """Return the results of so many requests."""
    found = []
    for _ in range(200):
        result = manager.get_result(timeout=0.1)
        if result is not None and result.is_finished():
            found.append(result)
        if len(found) == count:
            break
    return found


def managed(made, prompts):
    """Return a manager, started, with requests."""
    size = "page_size" if hasattr(transformers.ContinuousBatchingConfig(), "page_size") else "block_size"
    config = transformers.ContinuousBatchingConfig(**{size: 16}, max_batch_tokens=24, num_blocks=64)
    manager = made.init_continuous_batching(options(), config)
    manager.start()
    manager.add_requests(prompts, max_new_tokens=NEW)
    return manager


@pytest.mark.slow
def test_a_manager_that_runs_finishes_before_its_attention_ends(host, runs):
    """Its steps have no masks: with the model's own attention, requests would attend to each other."""
    made, prompts = eager("llama"), prompts_of((5, 33, 9))
    wanted = by_generate(made, prompts)

    with continuous_batching(made) as handle:
        manager = managed(made, prompts)

    assert not manager.is_running()
    found = finished(manager, len(prompts))
    assert {tuple(one.prompt_ids): one.generated_tokens for one in found} == wanted
    assert handle.calls == len(runs)
    with pytest.raises(NotNegotiatedError, match="started after"):
        manager.start()


@pytest.mark.slow
def test_an_error_inside_ends_a_manager_that_runs(host):
    made, managers = eager("llama"), []

    def interrupted():
        with continuous_batching(made):
            managers.append(managed(made, prompts_of((5, 33, 9))))
            raise KeyError("stop")

    with pytest.raises(KeyError, match="stop"):
        interrupted()

    assert not managers[0].is_running()
    assert made.config._attn_implementation == "eager"
    with continuous_batching(made) as handle:
        assert handle.model is made


def test_an_error_of_a_manager_leaves_the_attention_restored(host, monkeypatch):
    made = eager("llama")

    def fail():
        raise KeyError("destroyed")

    def left():
        with continuous_batching(made):
            monkeypatch.setattr(made, "destroy_cached_continuous_batching_manager", fail, raising=False)

    with pytest.raises(KeyError, match="destroyed"):
        left()

    assert made.config._attn_implementation == "eager"
    assert "init_continuous_batching" not in vars(made)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"options": {"torch": {"no_such_option": 1}}}, "no_such_option"),
        ({"backend": "no_such_backend"}, "no_such_backend"),
    ],
)
def test_settings_reach_each_call(settings, reason) -> None:
    made = eager("llama")
    with continuous_batching(made, **settings):
        results = in_batches(made, prompts_of([5]))

    assert [reason in str(one.error) for one in results.values()] == [True]


@pytest.mark.slow
def test_managers_of_one_model_and_of_two_run_at_once(host):
    one, other, prompts = eager("llama"), eager("mistral"), prompts_of((5, 33, 9))
    wanted = [by_generate(made, prompts) for made in (one, one, other)]

    with continuous_batching(one), continuous_batching(other):
        managers = [managed(made, prompts) for made in (one, one, other)]
        found = [finished(manager, len(prompts)) for manager in managers]

    assert [{tuple(each.prompt_ids): each.generated_tokens for each in results} for results in found] == wanted


@pytest.mark.slow
def test_a_canceled_request_changes_no_other(host):
    made, prompts = eager("llama"), prompts_of((5, 33, 9))
    wanted = by_generate(made, prompts)

    with continuous_batching(made):
        manager = managed(made, prompts)
        manager.cancel_request(manager.add_request(prompts[0][:-1], max_new_tokens=NEW))
        found = finished(manager, len(prompts))

    assert {tuple(one.prompt_ids): one.generated_tokens for one in found} == wanted


@pytest.mark.slow
def test_training_mode_has_no_dropout(host):
    """The manager puts the model into its mode for evaluation, whichever attention it has."""
    made, prompts = eager("llama"), prompts_of((5, 9))
    wanted = by_generate(made, prompts)
    for layer in made.model.layers:
        layer.self_attn.attention_dropout = 0.5

    made.train()
    with continuous_batching(made):
        found = tokens_of(in_batches(made, prompts))

    assert found == wanted


@pytest.mark.slow
@pytest.mark.parametrize("compiles", ["model", "forward"])
def test_a_compiled_model_is_served_and_restored(compiles, host, runs):
    made, prompts = eager("llama"), prompts_of((5, 9))
    wanted = by_generate(made, prompts)
    compiled = torch.compile(made, backend="eager") if compiles == "model" else made
    if compiles == "forward":
        made.forward = torch.compile(made.forward, backend="eager")

    with continuous_batching(compiled) as handle:
        found = tokens_of(in_batches(compiled, prompts))

    assert found == wanted
    assert handle.calls == len(runs) > 0
    assert made.config._attn_implementation == "eager"
    assert "init_continuous_batching" not in vars(made)


@pytest.mark.slow
def test_the_scope_around_reaches_the_thread_of_the_manager(host):
    made, prompts = eager("llama"), prompts_of((5, 9))

    with attnplug.using(backend="flashinfer"), continuous_batching(made):
        scoped = [str(one.error) for one in in_batches(made, prompts).values()]
    with continuous_batching(made, backend="flashinfer"):
        named = [str(one.error) for one in in_batches(made, prompts).values()]

    assert len(scoped) == len(named) == 2
    assert all("flashinfer" in error for error in scoped + named)


def test_a_call_outside_of_continuous_batching_is_refused(host):
    made = eager("llama")

    with continuous_batching(made), pytest.raises(NotNegotiatedError, match="not by continuous batching"):
        made(torch.tensor([[1, 2, 3]]))

    rows, starts = torch.zeros(1, 4, 3, 8), torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises(NotNegotiatedError, match="not by continuous batching"):  # a step's arguments, and no handle
        continuous.attend(made.model.layers[0].self_attn, *[rows] * 3, None, write_index=[], cu_seq_lens_k=starts)


def test_a_model_is_entered_once(host):
    made = eager("llama")

    with continuous_batching(made), pytest.raises(AttnplugError, match="already"), continuous_batching(made):
        pass

    with continuous_batching(made) as handle:
        assert handle.model is made


@pytest.mark.parametrize(("name", "words"), [("bert", "no generate_batch"), ("bart", "encoder-decoder")])
def test_other_models_are_refused(name, words, host):
    with pytest.raises(AttnplugError, match=words), continuous_batching(model(name)):
        pass


def causal(name):
    """Return a tiny decoder of a class that `models.model` does not make."""
    sizes = {key: value for key, value in SIZES.items() if key != "head_dim"}
    made = getattr(transformers, name)
    return transformers.AutoModelForCausalLM.from_config(made(**sizes, is_encoder_decoder=False, is_decoder=True))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        *((name, "takes no position_ids") for name in ("BartConfig", "MBartConfig", "PegasusConfig")),
        *((name, "does not pass the arguments of a step") for name in ("StableLmConfig", "NemotronConfig")),
    ],
)
def test_models_that_a_step_does_not_reach_are_refused(name, words, host):
    """The first would compute positions from the row of a step, and the others have no KV cache to write."""
    made = causal(name)
    before = made.config._attn_implementation

    with pytest.raises(AttnplugError, match=words), continuous_batching(made):
        pass

    assert made.config._attn_implementation == before
    assert "init_continuous_batching" not in vars(made)


def test_entering_leaves_random_numbers_alone(host):
    made, before = eager("gpt2").train(), torch.get_rng_state()  # it drops embeddings before the first attention

    with continuous_batching(made):
        assert torch.equal(torch.get_rng_state(), before)


def test_another_version_of_transformers_is_refused(host, monkeypatch):
    monkeypatch.setattr(continuous, "_UPDATE", ("self", "keys"))

    with pytest.raises(AttnplugError, match=r"5\.17, 5\.23 and 5\.24"), continuous_batching(eager("llama")):
        pass


ARGUMENTS = {
    "mask": ({"attention_mask": torch.ones(1)}, "a mask"),
    "causality": ({"is_causal": False}, "is_causal=False"),
    "block table": ({"block_table": torch.zeros(1, 1, 1)}, "max_blocks_per_request=0"),
    "dropout": ({"dropout": 0.5}, "dropout=0.5"),
    "unknown": ({"position_bias": torch.ones(1)}, "position_bias"),
}


@pytest.mark.parametrize(("arguments", "words"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_that_change_the_attention_are_refused(arguments, words, host):
    made = eager("llama")
    layer, cache = made.model.layers[0].self_attn, object.__new__(continuous.PagedAttentionCache)
    rows = torch.zeros(1, 4, 3, 8)

    with continuous_batching(made), pytest.raises(NotNegotiatedError, match=words):
        continuous.attend(layer, rows, rows, rows, **{"attention_mask": None, "cache": cache, **arguments})


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_decodes_read_the_pages_of_the_manager(compiled, host, monkeypatch):
    """The last prompt outgrows the block table: its steps are gathered from then on."""
    if continuous._UPDATE != continuous._BY_KEYWORDS:
        pytest.skip("this release has block tables for its own flash implementations only")
    made, prompts, paged, read = eager("llama"), prompts_of((5, 15, 20, 40)), [], continuous.flash_attn_with_kvcache

    def recorded(*given, **more):
        paged.append(more["block_table"].shape)
        return read(*given, **more)

    monkeypatch.setattr(continuous, "flash_attn_with_kvcache", recorded)
    wanted = by_generate(made, prompts)
    compile_config = transformers.CompileConfig(backend="eager", fullgraph=False) if compiled else None

    with continuous_batching(made) as handle:
        more = {"varlen_compile_config": compile_config} if compiled else {}
        found = tokens_of(in_batches(made, prompts, max_batch_tokens=96, max_blocks_per_request=3, **more))

    layers = made.config.num_hidden_layers
    assert found == wanted
    assert layers < len(paged) < handle.calls - layers
    assert {table[1] for table in paged} == {3}
    assert max(table[0] for table in paged) > 1


def test_sliding_layers_have_no_block_table(host, monkeypatch):
    monkeypatch.setattr(continuous, "flash_attn_with_kvcache", None)
    made, prompts = eager("mistral"), prompts_of((5, 9))
    wanted = by_generate(made, prompts)

    with continuous_batching(made):
        assert tokens_of(in_batches(made, prompts, max_blocks_per_request=3)) == wanted


@pytest.mark.parametrize("writer", ["layer", "function"])
def test_padding_of_a_step_is_zero(writer, host):
    """A compiled model has steps of more rows than the requests have tokens, whoever writes the KV cache."""

    class Cache(continuous.PagedAttentionCache):
        def __init__(self):
            """Keep nothing: the first step reads no KV cache."""

        def update(self, key_states, value_states, **more):
            if "kwargs" in more:
                more["kwargs"]["cu_seq_lens_k"] = more["kwargs"]["cu_seq_lens_k"]["full_attention"]
                return key_states, value_states
            return key_states[0].transpose(0, 1), value_states[0].transpose(0, 1)

    made = eager("llama")
    query, key = torch.randn(1, 4, 7, 8), torch.randn(1, 2, 7, 8)
    starts = torch.tensor([0, 2, 5, 5], dtype=torch.int32)
    step = {"cu_seq_lens_q": starts, "read_index": [], "write_index": []}
    by_type = {"full_attention": starts}
    step |= {"cu_seq_lens_k": starts} if writer == "layer" else {"cu_seq_lens_k": by_type, "cache": Cache()}

    with continuous_batching(made):
        layer = made.model.layers[0].self_attn
        output, _ = continuous.attend(layer, query, key, key, None, **step)

    wanted = attnplug.attention_varlen(
        query[0].transpose(0, 1)[:5], *[key[0].transpose(0, 1)[:5]] * 2, starts, causal=True
    )
    assert torch.equal(output[0, :5], wanted)
    assert output.shape == (1, 7, 4, 8)
    assert not output[0, 5:].any()


def test_lengths_are_read_from_the_device_once_for_each_step(host):
    """A step begins with the first layer: a kernel may have written into the same tensor since."""

    class OnDevice:
        is_cpu = False

        def __init__(self):
            self.reads = 0

        def cpu(self):
            self.reads += 1
            return torch.tensor([0, self.reads])

    made, starts = eager("llama"), OnDevice()
    with continuous_batching(made) as handle:
        for step in (1, 2):
            for layer in made.model.layers:
                handle.begin(layer)
                assert handle.on_cpu(starts).tolist() == [0, step]

    assert len(made.model.layers) > 1


@pytest.mark.parametrize("graphs", [True, (True, False)])
def test_cuda_graphs_are_refused(graphs, host):
    made = eager("llama")
    config = transformers.ContinuousBatchingConfig(use_cuda_graph=graphs)

    with continuous_batching(made), pytest.raises(NotNegotiatedError, match="use_cuda_graph=False"):
        made.init_continuous_batching(options(), config)

    assert config.use_cuda_graph == graphs
    assert "init_continuous_batching" not in vars(made)


def test_the_names_are_public():
    assert {"ContinuousBatching", "continuous_batching"} <= set(attnplug_transformers.__all__)
    assert attnplug_transformers.ContinuousBatching is continuous.ContinuousBatching
