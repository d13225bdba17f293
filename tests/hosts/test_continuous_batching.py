"""`generate_batch` of transformers on attnplug, in the manager's own KV cache, beside `generate`."""

from __future__ import annotations

import random
from importlib import import_module

import pytest
import torch

import attnplug
from attnplug.contract import LoadedBackend
from attnplug.torch_backend.impl import TorchImpl

pytestmark = pytest.mark.slow

LENGTHS = (5, 33, 70, 12, 1, 40, 9)
LAYERS = 3
MODELS = {"Llama": {}, "Qwen3": {"head_dim": 32}}


@pytest.fixture
def transformers():
    """Return the package, which takes seconds to import."""
    package = pytest.importorskip("transformers", minversion="5.23", reason="the adapter is for 5.23 and 5.24")
    verbosity = package.logging.get_verbosity()
    package.logging.set_verbosity_error()
    yield package
    package.logging.set_verbosity(verbosity)


@pytest.fixture
def runs(monkeypatch):
    """Return the KV cache, the metadata and the query lengths of each run of the built-in backend."""
    runs, run = [], TorchImpl.run

    def recorded(self, *given):
        cache, metadata = given[3:5]
        runs.append((cache, metadata, metadata.batch.query_start_loc.diff().tolist()))  # the manager reuses its tensors
        run(self, *given)

    monkeypatch.setattr(TorchImpl, "run", recorded)
    return runs


def tiny(transformers, kind, **more):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, eos_token_id=511, bos_token_id=1, **more,
    )  # fmt: skip
    return getattr(transformers, f"{kind}ForCausalLM")(config).eval()


def prompts_of(lengths):
    numbers = random.Random(0)
    return [[numbers.randrange(2, 510) for _ in range(length)] for length in lengths]


def options(transformers):
    return transformers.GenerationConfig(max_new_tokens=24, do_sample=False, eos_token_id=511, pad_token_id=0)


def by_generate(transformers, model, prompts):
    """Return the new tokens of each prompt, one generated after another."""
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        outputs = [model.generate(torch.tensor([one]), generation_config=options(transformers))[0] for one in prompts]
    return {tuple(one): output[len(one) :].tolist() for one, output in zip(prompts, outputs, strict=True)}


def in_batches(transformers, model, prompts, errors=False, **more):
    """Return the new tokens of each prompt, generated together on attnplug; or the errors."""
    adapter = import_module("tests.hosts.continuous_batching")
    settings = transformers.ContinuousBatchingConfig(
        page_size=16, num_blocks=64, max_batch_tokens=48, auto_switch_to_flash=False, **more
    )
    with adapter.registered() as name:
        model.set_attn_implementation(name)
        results = model.generate_batch(
            inputs=prompts,
            generation_config=options(transformers),
            continuous_batching_config=settings,
            progress_bar=False,
        )
    if errors:
        return [one.error for one in results.values()]
    assert [one.error for one in results.values()] == [None] * len(prompts)
    return {tuple(one.prompt_ids): one.generated_tokens for one in results.values()}


@pytest.mark.parametrize(("kind", "more"), MODELS.items(), ids=MODELS)
def test_tokens_are_those_of_generate(kind, more, transformers, runs) -> None:
    model, prompts = tiny(transformers, kind, **more), prompts_of(LENGTHS)
    wanted = by_generate(transformers, model, prompts)
    assert not runs

    assert in_batches(transformers, model, prompts) == wanted
    assert runs


def test_a_shared_prefix_is_computed_once(transformers, runs) -> None:
    model, (prefix, *ends) = tiny(transformers, "Llama"), prompts_of((40, 3, 20, 7))
    prompts = [prefix + end for end in ends]

    found = in_batches(transformers, model, prompts)

    written = sum(sum(lengths) for *_, lengths in runs) // LAYERS
    assert found == by_generate(transformers, model, prompts)
    assert written < sum(map(len, prompts)) + len(prompts) * 23  # each prompt, and each new token but the last


def test_requests_keep_the_order_of_the_manager(transformers, runs) -> None:
    model, prompts = tiny(transformers, "Llama"), prompts_of(LENGTHS)

    found = in_batches(transformers, model, prompts, scheduler_type="prefill_first")

    steps = list({id(metadata): lengths for _, metadata, lengths in runs}.values())
    assert len(runs) == LAYERS * len(steps)  # one build for all layers
    assert any(one[0] > 1 and 1 in one for one in steps)  # decodes behind a prefill
    assert found == by_generate(transformers, model, prompts)


def test_layers_are_bound_to_the_managers_memory(transformers, runs) -> None:
    in_batches(transformers, tiny(transformers, "Llama"), prompts_of((5, 33)))

    caches = list({id(cache): cache for cache, *_ in runs}.values())
    keys, values = ([cache[role] for cache in caches] for role in ("k", "v"))
    page = 16 * 2 * 16 * 4  # bytes of a layer's keys in a block: tokens, heads, size, float32
    assert [cache.form for cache in caches] == ["interleaved"] * LAYERS
    assert len({one.untyped_storage().data_ptr() for one in (*keys, *values)}) == 1
    assert [key.data_ptr() - keys[0].data_ptr() for key in keys] == [0, 2 * page, 4 * page]
    assert [value.data_ptr() - key.data_ptr() for key, value in zip(keys, values, strict=True)] == [page] * LAYERS


def test_the_scope_around_reaches_the_thread_of_the_manager(transformers, monkeypatch) -> None:
    model, prompts = tiny(transformers, "Llama"), prompts_of((5, 9))
    loaded, make_impl = [], LoadedBackend.make_impl
    monkeypatch.setattr(LoadedBackend, "make_impl", lambda self, layer: loaded.append(self) or make_impl(self, layer))

    with attnplug.using(backend="torch", source="the test"):
        in_batches(transformers, model, prompts)

    (provenance,) = {backend.selection.provenance["backend"] for backend in loaded}
    assert provenance == "the test"
    with attnplug.using(backend="flashinfer"):
        errors = in_batches(transformers, model, prompts, errors=True)
    assert len(errors) == 2
    assert all("flashinfer" in str(error) for error in errors)


def test_what_is_registered_ends_with_the_block(transformers) -> None:
    adapter = import_module("tests.hosts.continuous_batching")
    functions = import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    own = functions[adapter.NAME]

    with adapter.registered():
        assert functions[adapter.NAME] is adapter.attend

    assert functions[adapter.NAME] is own
