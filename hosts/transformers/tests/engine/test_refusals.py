"""Models that the engine would run into wrong tokens are refused, with the reason and the fix."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers import masking_utils
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.deepseek_v3 import modeling_deepseek_v3
from transformers.models.llama import modeling_llama

from attnplug.errors import LimitsError, NoBackendError, NotNegotiatedError, RequirementsError, TensorError
from attnplug.models import describe_model
from attnplug_transformers.engine import Engine, latent
from attnplug_transformers.engine.model_attention import serving
from core.tests.models import published
from hosts.transformers.tests.engine.reference import reference
from hosts.transformers.tests.models import CACHE, SIZES, model, sharpen
from hosts.transformers.tests.test_architectures import tiny


@pytest.fixture(autouse=True)
def on_one_thread(host):
    """Make models as the other tests of the host do."""


def refusal(made, **how):
    """Return the refusal; the model keeps its own attention."""
    before = made.config._attn_implementation
    with pytest.raises((RequirementsError, NotNegotiatedError)) as refused:
        Engine(made, **how)
    assert made.config._attn_implementation == before
    return str(refused.value)


def rotary(kind, **parameters):
    return model("llama", rope_parameters={"rope_type": kind, "rope_theta": 10000.0, **parameters})


LONG = {"original_max_position_embeddings": 64, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "factor": 2.0}


def test_frequencies_that_follow_the_longest_sequence():
    assert "beyond 64 positions" in refusal(rotary("longrope", **LONG))
    assert "pass max_seq_len=64" in refusal(rotary("longrope", **LONG), max_seq_len=65)

    made = rotary("longrope", **LONG)
    engine = Engine(made, max_seq_len=64)
    assert len(engine.generate([[1, 2, 3]], max_new_tokens=3)[0]) == 3


def test_dynamic_frequencies_below_their_threshold():
    engine = Engine(rotary("dynamic", factor=2.0))  # which is all positions that the configuration has

    assert len(engine.generate([[1, 2, 3]], max_new_tokens=3)[0]) == 3


def test_recurrent_layers():
    config = transformers.Lfm2Config(
        **(SIZES | {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 16, "conv_L_cache": 3})
    )
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()

    assert "not attention over keys" in refusal(made)


def test_indexers_of_other_seams():
    """Mistral Large 4 shares latents between layers besides, and GLM-5.3-Flash selects pools of tokens."""
    for model_type in ("mistral_large4", "glm5_next"):
        found = describe_model(CONFIG_MAPPING[model_type](), dtype="float32")

        assert not found.layers
        assert "a learned indexer" in found.unserved[0].why


def test_graphs_of_a_model_with_indexers():
    made = transformers.AutoModelForCausalLM.from_config(tiny("deepseek_v32"), attn_implementation="eager").eval()

    assert "score as many keys as the requests of a step have" in refusal(made, max_seq_len=32, graphs=True)


def test_an_indexer_whose_selection_is_not_passed(monkeypatch):
    made = transformers.AutoModelForCausalLM.from_config(tiny("deepseek_v32"), attn_implementation="eager").eval()
    run = latent.LatentCache.absorb
    monkeypatch.setattr(latent.LatentCache, "absorb", lambda cache, call, chosen: run(cache, call))

    assert "the call has no tokens that an indexer selects" in refusal(made, max_seq_len=32)


class Scaled(torch.nn.Linear):
    """A linear layer that is quantized, as libraries make it."""


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda one: setattr(one, "__class__", Scaled), "is a Scaled with a Parameter of torch.float32"),
        (lambda one: setattr(one, "bias", torch.nn.Parameter(torch.zeros(56))), "of a Linear without bias"),
        (lambda one: setattr(one, "weight", None), "is a Linear with no weight"),
        (lambda one: setattr(one, "weight", _int8(one.weight)), "a Parameter of torch.int8"),
    ],
)
def test_projections_of_latents_that_are_not_plain(change, found):
    made = model("deepseek_v3")
    change(made.model.layers[1].self_attn.kv_b_proj)
    heads = torch.zeros(1, 4, 1, 12)
    made.model.layers[1].self_attn.expand_kv = lambda *_: (heads, heads[..., :6])  # such a layer has its own kernel

    message = refusal(made)

    assert found in message
    assert "DeepseekV3Attention 1" in message
    assert "where the module expands its latents" in message


def _int8(weight):
    return torch.nn.Parameter(weight.to(torch.int8), requires_grad=False)


def _by_kind(module):
    """Read the weight as the keys of all heads, then all values, as no module has it."""
    return torch.cat([part.view(4, -1, 16) for part in module.kv_b_proj.weight.split([4 * 8, 4 * 6])], 1)


def _before_the_norm(cache, latent, rotated, layer_idx, **_):
    cache._latents[layer_idx] = (3 * latent, rotated)
    return latent, rotated


@pytest.mark.parametrize(
    ("where", "name", "wrong"),
    [(latent, "up_projection", _by_kind), (latent.LatentCache, "update", _before_the_norm)],
    ids=["up-projections that are not split per head", "latents that are not normalized"],
)
def test_wrong_adapters_of_latents(monkeypatch, where, name, wrong):
    monkeypatch.setattr(where, name, wrong)
    made, prompts, expected = reference("deepseek_v3")

    assert "to other keys or values than its kv_b_proj" in refusal(made)

    monkeypatch.setattr(latent, "_compare", lambda *_: None)
    with Engine(made) as engine:
        assert engine.generate(prompts, max_new_tokens=14) != expected


def test_modules_that_store_expanded_keys(monkeypatch):
    """As those of transformers before 5.15, and published code."""
    made = model("deepseek_v3")
    run, attention = latent.LatentCache.update, made.model.layers[0].self_attn
    expand = attention.expand_kv

    def update(cache, latents, rotated, layer_idx, **_):
        return run(cache, *expand(latents, rotated), layer_idx)

    monkeypatch.setattr(latent.LatentCache, "update", update)
    monkeypatch.setattr(modeling_deepseek_v3.DeepseekV3Attention, "expand_kv", lambda _, key, value: (key, value))

    assert "does not store latents in its KV cache" in refusal(made)


def test_encoder_decoders_and_encoders():
    assert "an encoder-decoder" in refusal(model("bart"))
    assert "encoder_only attention" in refusal(
        transformers.AutoModelForMaskedLM.from_config(model("bert").config).eval()
    )


def test_the_decoder_of_an_encoder_decoder():
    made = transformers.BartForCausalLM(model("bart").config).eval()

    text = refusal(made)

    assert "BartForCausalLM was given to the engine: its forward takes no position_ids" in text
    assert "encoder" not in text


@pytest.mark.parametrize("assume", [{}, {"assume": "llama"}])
def test_classes_with_their_own_attention(assume):
    made = transformers.OpenAIGPTLMHeadModel(
        transformers.OpenAIGPTConfig(vocab_size=99, n_embd=16, n_layer=1, n_head=2)
    )

    assert "does not take an attention implementation" in refusal(made.eval(), **assume)


def test_models_without_a_head():
    assert "without a language-model head" in refusal(model("llama").model)


def test_training_mode():
    assert "call model.eval() first" in refusal(model("llama").train())


def test_unknown_model_types_are_read_as_assume():
    made = model("llama")
    made.config.__class__ = type("UnknownConfig", (transformers.LlamaConfig,), {"model_type": "unknown_type"})

    assert "pass assume='llama' if its layers are alike" in refusal(made)
    assert len(Engine(made, assume="llama").generate([[1, 2]], max_new_tokens=2)[0]) == 2


def test_temperatures_by_position():
    made = model("llama4", floor_scale=64, attn_temperature_tuning=True, no_rope_layers=[1, 0, 1, 0])

    assert "pass max_seq_len and max_num_tokens below 64" in refusal(made)
    engine = Engine(made, max_seq_len=63, max_num_tokens=63, max_num_reqs=8)
    assert len(engine.generate([[1, 2, 3]], max_new_tokens=3)[0]) == 3


def test_classes_that_do_not_take_an_attention_implementation(monkeypatch):
    made = model("llama")
    monkeypatch.setattr(type(made), "_can_set_attn_implementation", classmethod(lambda _: False))

    assert "does not take an attention implementation" in refusal(made)


def test_published_code_with_its_own_attention():
    message = refusal(published.model())

    assert "Phi3SmallForCausalLM was given to the engine: it does not take an attention implementation" in message
    assert "code that a model is published with often calls its own kernels" in message
    assert "run it from classes that go through the interface" in message


def test_a_layer_that_does_not_call_its_attention(monkeypatch):
    made = model("llama")
    monkeypatch.setattr(made.model.layers[2].self_attn, "forward", lambda hidden_states, **_: (hidden_states, None))

    assert "'layers.2.self_attn' first, did not call the engine" in refusal(made)


def test_a_layer_that_attends_twice(monkeypatch):
    made = model("llama")
    made.model.layers[3].self_attn = made.model.layers[2].self_attn

    assert "each of which attends once" in refusal(made)


def test_positions_that_follow_the_row(monkeypatch):
    made = model("llama")
    run = made.model.rotary_emb.forward
    monkeypatch.setattr(
        made.model.rotary_emb, "forward", lambda x, position_ids: run(x, torch.arange(x.shape[1])[None])
    )

    assert "one token at one position" in refusal(made)


def test_another_window_than_the_configuration_says():
    made = model("gemma2")
    made.model.layers[0].self_attn.sliding_window = 9
    assert "sliding_window 9" in refusal(made)


def _both_ways(create):
    return lambda **arguments: create(**arguments, or_mask_function=lambda batch, head, q, kv: kv < 2)


def test_masks_of_another_pattern(monkeypatch):
    monkeypatch.setattr(modeling_llama, "create_causal_mask", _both_ways(masking_utils.create_causal_mask))

    assert "tokens attend to other keys" in refusal(model("llama"))


def test_masks_that_the_model_computes_with(monkeypatch):
    create = masking_utils.create_causal_mask

    def copied(**arguments):
        mask = create(**arguments)
        return mask.clone() if isinstance(mask, torch.Tensor) else mask

    monkeypatch.setattr(modeling_llama, "create_causal_mask", copied)

    assert "a mask that the model computed" in refusal(model("llama"))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda attention: setattr(attention, "scaling", 0.1), "scaling 0.1"),
        (lambda attention: setattr(attention, "sinks", torch.nn.Parameter(torch.ones(4))), "other sinks"),
        (lambda attention: _in_place(attention.sinks), "other sinks"),
        (lambda attention: setattr(attention, "sliding_window", 3), "the signature"),
    ],
)
def test_changes_of_a_model_in_use(change, found):
    made = model("gpt_oss")
    engine = Engine(made)
    engine.generate([[1, 2]], max_new_tokens=2)

    change(made.model.layers[0].self_attn)

    with pytest.raises(NotNegotiatedError, match=found):
        engine.generate([[1, 2]], max_new_tokens=2)


def _in_place(parameter):
    with torch.no_grad():
        parameter.add_(1)


def test_attention_arguments_that_were_not_negotiated(monkeypatch):
    made = model("llama")
    attention = made.model.layers[0].self_attn
    run = attention.forward
    monkeypatch.setattr(attention, "forward", lambda **given: run(**given, position_bias=torch.ones(1)))

    assert "position_bias" in refusal(made)


def test_numbers_out_of_range():
    made = model("llama")

    for wrong in ({"max_seq_len": 129}, {"max_seq_len": 0}, {"max_num_reqs": 0}, {"num_blocks": 1}):
        with pytest.raises(LimitsError):
            Engine(made, **wrong)
    with pytest.raises(LimitsError, match="memory_fraction"):
        Engine(made, memory_fraction=1.5)
    with pytest.raises(LimitsError, match="at least one token for each"):
        Engine(made, max_num_reqs=9, max_num_tokens=8)
    with pytest.raises(NoBackendError, match="kv_cache_dtype"):
        Engine(made, kv_cache_dtype="nvfp4")
    assert made.config._attn_implementation == "eager"


def test_a_model_without_a_number_of_positions():
    made = model("llama")
    vars(made.config)["max_position_embeddings"] = None  # the class checks what is set

    with pytest.raises(LimitsError, match="pass max_seq_len"):
        Engine(made)
    assert Engine(made, max_seq_len=20).limits.max_seq_len == 20


def test_a_model_on_several_devices():
    made = sharpen(model("llama"))
    made.model.layers[1].to("meta")

    assert "its weights are on cpu, meta" in refusal(made)


def test_a_forward_without_position_ids():
    class NoPositions(transformers.LlamaForCausalLM):
        def forward(self, input_ids, **rest):
            return super().forward(input_ids, **rest)

    config = model("llama").config
    assert "takes no position_ids" in refusal(NoPositions(config).eval())


def test_a_model_without_a_mask(monkeypatch):
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **_: None)
    engine = Engine(model("llama"))

    assert len(engine.generate([[1, 2, 3]], max_new_tokens=2)[0]) == 2
    monkeypatch.undo()
    with pytest.raises(NotNegotiatedError, match="another mask"):
        engine.generate([[1, 2, 3]], max_new_tokens=2)


def test_a_layer_that_attends_once_more():
    made = model("llama")
    engine = Engine(made)
    made.model.layers[3].self_attn = made.model.layers[2].self_attn

    with pytest.raises(NotNegotiatedError, match="LlamaAttention 2 attends once more"):
        engine.generate([[1, 2, 3]], max_new_tokens=2)


def test_calls_without_a_step():
    engine = Engine(model("llama"))
    rows = torch.tensor([[1, 2], [3, 4]])

    with torch.no_grad(), pytest.raises(NotNegotiatedError, match="without a step of an engine"):
        engine.model(input_ids=rows[:1], use_cache=False)
    with serving(object()):
        with torch.no_grad(), pytest.raises(TensorError, match="has one row of tokens"):
            engine.model(input_ids=rows, use_cache=False)
        with torch.no_grad(), pytest.raises(TensorError, match="its own key and value"):
            engine.model(input_ids=rows[:1], **{CACHE: _cached(engine.model)})
        with pytest.raises(NotNegotiatedError, match="gradients are recorded"):
            engine.model(input_ids=rows[:1], use_cache=False)


def _cached(made):
    cache = transformers.DynamicCache(config=made.config)
    for layer in range(4):
        cache.update(torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 8), layer)
    return cache
