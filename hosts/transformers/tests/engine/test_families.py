"""Every causal family of the table through the engine: its tokens are those of transformers' own `generate`."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from attnplug.errors import NotNegotiatedError, RequirementsError
from attnplug.models.architectures import ARCHITECTURES
from attnplug_transformers.engine import Engine
from hosts.transformers.tests.models import generate, sharpen
from hosts.transformers.tests.test_architectures import tiny

LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "mistral4", "youtu")
"""Families whose layers all are multi-head latent attention (MLA)."""
SPARSE = ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4")
"""Those whose indexers select latents."""
SOME = {
    *("bloom", "codegen", "falcon", "gemma2", "gpt2", "gpt_oss", "llama", "mpt", "nemotron", "qwen3_moe", "stablelm"),
    *LATENT,
    *SPARSE,
}
"""Families of different attention modules; the others run with the slow tests."""

NEW = 10
PROMPTS = [[5, 9, 20, 33, 7, 101, 64, 3, 250, 18, 77], [12, 4, 199]]
RECURRENT = {
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe", "granitemoehybrid", "olmo_hybrid", "jamba"),
    *("bailing_hybrid", "kimi_linear"),
    *("bamba", "falcon_h1", "minimax", "nemotron_h", "recurrent_gemma", "zamba2", "zamba", "zaya", "lfm3", "lara_mini"),
}
OWN = {"gpt_neox_japanese", "openai-gpt"}
"""Families whose classes in transformers do not go through the AttentionInterface."""
UNMADE = {"sarvam_mla", "qwen4_exp_text"}
"""Families of which `tiny` makes no model that runs."""
CAUSAL = sorted(
    name
    for name in set(ARCHITECTURES) & set(CONFIG_MAPPING)
    if ARCHITECTURES[name].family == "decoder"
    and CONFIG_MAPPING[name] in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    and name not in RECURRENT | OWN | UNMADE
)


def made_of(config, seed=0, implementation="eager"):
    """Return a small model that never ends a text, and whose tokens depend on their context."""
    config.eos_token_id = None
    torch.manual_seed(seed)
    how = {"attn_implementation": implementation, "dtype": torch.float32}
    if config.model_type == "mistral4":  # the text of composite models, which the automatic class does not make
        made = transformers.Mistral4ForCausalLM._from_config(config, **how)
    else:
        made = transformers.AutoModelForCausalLM.from_config(config, **how)
    made.generation_config.eos_token_id = None
    return sharpen(made, seed)


def expected_of(made):
    """Return the tokens that follow each prompt alone, and the smallest logit margin."""
    ids = [torch.tensor([prompt]) for prompt in PROMPTS]
    found = [generate(made, one, torch.ones_like(one), NEW) for one in ids]
    return [tokens[0].tolist() for tokens, _ in found], min(margin for _, margin in found)


def check_tokens(config, implementation="eager", **how):
    """Compare the tokens of both prompts, in steps of several tokens of one and one of the other."""
    least = 1 if config.model_type == "ctrl" else 4  # of CTRL every small random model repeats itself
    for seed in range(16):
        made = made_of(config, seed, implementation)
        expected, margin = expected_of(made)
        variety = len({token for tokens in expected for token in tokens})  # a model that repeats itself proves little
        if margin > 1e-3 and variety > least:
            break
    assert margin > 1e-3
    assert variety > least

    with Engine(made, max_num_tokens=7, max_num_reqs=4, block_size=4, **how) as engine:
        assert engine.generate(PROMPTS, max_new_tokens=NEW) == expected
        assert engine.generate(PROMPTS, max_new_tokens=NEW) == expected  # with all prefixes cached
        assert bool(engine.stats.replayed_steps) == bool(how.get("graphs"))
    assert made.config._attn_implementation == implementation
    assert expected_of(made)[0] == expected  # its own attention is back


@pytest.mark.parametrize(
    "model_type",
    [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in sorted({*CAUSAL, *LATENT})],
)
def test_tokens_are_those_of_generate(host, model_type):
    check_tokens(tiny(model_type), max_seq_len=32)


@pytest.mark.parametrize("model_type", sorted(RECURRENT))
def test_recurrent_layers_are_refused(host, model_type):
    with pytest.raises(RequirementsError, match="not attention over keys"):
        Engine(made_of(tiny(model_type)), max_seq_len=32)


@pytest.mark.parametrize("model_type", sorted(OWN))
def test_classes_with_their_own_attention_are_refused(host, model_type):
    with pytest.raises(RequirementsError, match="does not take an attention implementation"):
        Engine(made_of(tiny(model_type)), max_seq_len=32)


FALCON = {"vocab_size": 300, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "ffn_hidden_size": 32}
MPT = {"vocab_size": 300, "d_model": 48, "n_heads": 6, "n_layers": 3, "max_seq_len": 64}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def changed(model_type, **fields):
    """Return a small configuration with other fields."""
    return CONFIG_MAPPING[model_type](**(tiny(model_type).to_dict() | fields))


VARIANTS = {
    "falcon of grouped queries": lambda: transformers.FalconConfig(
        **FALCON, new_decoder_architecture=True, num_kv_heads=2
    ),
    "falcon of one key per query": lambda: transformers.FalconConfig(**FALCON, multi_query=False, parallel_attn=False),
    "falcon with alibi": lambda: transformers.FalconConfig(**FALCON, alibi=True),
    "falcon with alibi and bias": lambda: transformers.FalconConfig(
        **FALCON, alibi=True, multi_query=False, parallel_attn=False, bias=True
    ),
    "bloom of six heads": lambda: transformers.BloomConfig(vocab_size=300, hidden_size=48, n_layer=3, n_head=6),
    "mpt of six heads": lambda: transformers.MptConfig(**MPT),
    "mpt with every option": lambda: transformers.MptConfig(**MPT, attn_config={"clip_qkv": 0.5, "softmax_scale": 0.3}),
    "deepseek with whole queries": lambda: changed("deepseek_v3", q_lora_rank=None, rope_interleave=False),
    "deepseek with yarn": lambda: changed("deepseek_v3", rope_parameters=YARN),
    "deepseek with values wider than keys": lambda: changed("deepseek_v2", v_head_dim=20, q_lora_rank=None),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants_of_modules(host, variant):
    # Falcon adds ALiBi twice in eager attention; SDPA attention is its default.
    implementation = "sdpa" if variant.startswith("falcon") else "eager"
    check_tokens(VARIANTS[variant](), implementation, max_seq_len=32)


@pytest.mark.parametrize("model_type", ["bloom", "codegen", "falcon", "gptj", "mpt", "stablelm", "xglm", *LATENT])
def test_captured_steps(host, model_type):
    check_tokens(tiny(model_type), max_seq_len=32, graphs=True)


def test_adapted_modules_get_their_methods_back(host):
    made = made_of(tiny("mpt"))
    attention = made.transformer.blocks[0].attn
    expected, _ = expected_of(made)

    with Engine(made, max_seq_len=32) as first:
        with Engine(made, max_seq_len=32) as second:
            assert second.generate(PROMPTS, max_new_tokens=NEW) == expected
        assert first.generate(PROMPTS, max_new_tokens=NEW) == expected
        assert "forward" in vars(attention)
        with torch.no_grad(), pytest.raises(NotNegotiatedError, match="without a step of an engine"):
            made(input_ids=torch.tensor(PROMPTS[:1]))

    assert "forward" not in vars(attention)
    assert expected_of(made)[0] == expected


def test_a_method_that_was_replaced_before_comes_back(host):
    made = made_of(tiny("bloom"))
    attention = made.transformer.h[0].self_attention
    attention.forward = own = attention.forward

    Engine(made, max_seq_len=32).close()

    assert vars(attention)["forward"] is own
    assert "forward" not in vars(made.transformer.h[1].self_attention)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alibi", False),
        ("alibi_bias_max", 4),
        ("prefix_lm", True),
        ("qk_ln", True),
        ("attn_type", "multiquery_attention"),
    ],
)
def test_what_mpt_ignores_is_refused(host, field, value):
    made = made_of(transformers.MptConfig(**MPT, attn_config={field: value}))

    with pytest.raises(RequirementsError, match=rf"attn_config.{field}={value!r}"):
        Engine(made, max_seq_len=32)


class TestSharedCaches:
    """Layers that read the KV cache of an earlier layer: the last ones of Gemma 3n and Gemma 4."""

    @staticmethod
    def config(model_type, shared=2):
        config = tiny(model_type)
        fields = config.to_dict() | {"num_kv_shared_layers": shared, "num_hidden_layers": 6, "eos_token_id": None}
        fields |= {"layer_types": ["sliding_attention", "full_attention"] * 3, "use_double_wide_mlp": False}
        if model_type == "gemma3n_text":
            fields |= {"intermediate_size": [32] * 6, "activation_sparsity_pattern": [0.0] * 6}
        else:
            fields |= {"per_layer_config": {1: {"head_dim": 16}, 3: {"head_dim": 16}, 5: {"head_dim": 16}}}
        return type(config)(**fields)

    @pytest.mark.parametrize("shared", [2, 3, 4])
    @pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
    def test_the_engine_serves_them(self, host, model_type, shared):
        check_tokens(self.config(model_type, shared), max_seq_len=32)

    @pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
    def test_the_dense_host_serves_them(self, host, model_type):
        made = made_of(self.config(model_type))
        expected, margin = expected_of(made)

        made.set_attn_implementation("attnplug")

        assert margin > 1e-3
        assert expected_of(made)[0] == expected

    @pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
    def test_captured_steps_serve_them(self, host, model_type):
        check_tokens(self.config(model_type), max_seq_len=32, graphs=True)

    def test_they_have_no_cache_for_themselves(self, host):
        with Engine(made_of(self.config("gemma3n_text")), max_seq_len=32, num_blocks=9) as engine:
            caches = engine._runner._caches
            groups = engine._groups
            targets = {layer.spec.name: layer.spec.kv_sharing_target for layer in groups.layers}

        assert list(caches) == [f"layers.{index}.self_attn" for index in range(4)]
        assert targets["layers.4.self_attn"] == "layers.2.self_attn"
        assert targets["layers.5.self_attn"] == "layers.3.self_attn"
        assert groups.bytes_per_block == 4 * groups.backends[0].bytes_per_block

    @pytest.mark.parametrize("cache", ["dynamic", "static"])
    @pytest.mark.parametrize("model_type", ["gemma3n_text", "gemma4_text"])
    def test_padded_rows_through_the_dense_host(self, host, model_type, cache):
        made = made_of(self.config(model_type))
        ids = torch.zeros(2, len(PROMPTS[0]), dtype=torch.long)
        for row, prompt in enumerate(PROMPTS):
            ids[row, -len(prompt) :] = torch.tensor(prompt)
        mask = (ids != 0).long()
        expected, margin = generate(made, ids, mask, NEW, cache_implementation=cache)

        made.set_attn_implementation("attnplug")

        assert margin > 1e-3
        assert torch.equal(generate(made, ids, mask, NEW, cache_implementation=cache)[0], expected)
