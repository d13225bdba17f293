"""The table of architectures against the library: its modules' calls, its masks, its defaults."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from attnplug.models import requirements
from attnplug.models.architectures import ARCHITECTURES, REMOTE
from hosts.transformers.tests.models import sharpen

TOKENS = 14
SIZES = {
    "hidden_size": 32,
    "n_embd": 32,
    "d_model": 32,
    "dim": 32,
    "num_attention_heads": 4,
    "n_head": 4,
    "n_heads": 4,
    "attention_heads": 4,
    "num_layers": 4,
    "rotary_dim": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "kv_lora_rank": 16,
    "q_lora_rank": 12,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "hidden_dim": 32,
    "ffn_dim": 32,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "n_layers": 4,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "vocab_size": 300,
    "vocab_size_per_layer_input": 300,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 1,
    "sliding_window": 6,
    "attention_chunk_size": 6,
    "local_attention": 10,
    "max_position_embeddings": 64,
    "n_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_THREE_AXES = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 8}
_YARN |= {"llama_4_scaling_beta": 0.5, "partial_rotary_factor": 1.0}
_ROUTED = {"num_key_value_heads": 4, "head_dim": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_INDEXED = _ROUTED | {"index_topk": 4, "index_n_heads": 8, "index_head_dim": 8}
MORE = {
    "axk2": _INDEXED,
    "deepseek_v32": _INDEXED,
    "glm_moe_dsa": _INDEXED | {"indexer_types": ["full", "shared", "full", "shared"]},
    "hy_v4": _INDEXED | {"indexer_types": ["full", "shared", "full", "shared"]},
    "axk1": _ROUTED,
    "deepseek_v2": _ROUTED | {"first_k_dense_replace": 1},
    "deepseek_v3": _ROUTED | {"first_k_dense_replace": 1},
    "glm4_moe_lite": _ROUTED,
    "longcat_flash": _ROUTED | {"num_layers": 2, "moe_topk": 2, "zero_expert_num": 2},
    "minicpm3": {"num_key_value_heads": 4, "head_dim": 4, "scale_emb": 1, "scale_depth": 2.0},
    "mistral4": _ROUTED | {"rope_parameters": _YARN},
    "youtu": {"num_key_value_heads": 4, "head_dim": 4},
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 16, "attn_layer_indices": [1, 3]},
    "beam": {"n_group": 1, "topk_group": 1},
    "laguna": {"num_attention_heads_per_layer": [4, 2, 4, 8]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}},
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16},
    },
    "dots1": {"n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "granitemoehybrid": {
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4, "use_mamba_kernels": False},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"] * 2},
    "glm4v_text": _THREE_AXES,
    "glm4v_moe_text": {"rope_parameters": {**_THREE_AXES["rope_parameters"], "partial_rotary_factor": 1.0}},
    "ernie4_5_vl_moe_text": {**_THREE_AXES, "moe_intermediate_size": [16, 16]},
    "qwen2_vl_text": _THREE_AXES,
    "qwen2_5_omni_text": _THREE_AXES,
    "qwen2_5_vl_text": _THREE_AXES,
    "roc_bert": {"enable_pronunciation": False, "enable_shape": False},
    "step3p5": {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 6},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 2, "mamba_dt_rank": 4},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 4},
}
"""Fields beyond `SIZES` that a small configuration has to set."""
DECODERS = [
    *("llama", "gemma", "glm4", "granite", "olmo2", "stablelm", "gpt2", "gpt_bigcode", "gpt_neox", "opt", "biogpt"),
    *("mistral", "mixtral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "starcoder2", "ministral", "cwm"),
    *("cohere2", "olmo3", "exaone4", "smollm3", "afmoe", "gemma2", "gemma3_text", "gemma4_text", "gpt_oss"),
    *("granite_swa", "llama4_text", "modernbert-decoder", "lfm2", "qwen3_next", "olmo_hybrid"),
    *("dbrx", "jamba", "nemotron", "beam", "laguna", "lfm3", "gemma4_unified_text", "zaya", "zamba"),
]
ADAPTED = ["bloom", "codegen", "falcon", "gptj", "mpt", "xglm"]
ENCODERS = ["bert", "roberta", "electra", "distilbert", "eurobert", "modernbert", "nomic_bert", "clip_text_model"]
ENCODER_DECODERS = ["bart", "mbart", "plbart"]


def tiny(model_type):
    """Return a small configuration of any architecture; its layers have all the kinds that its default has."""
    cls = CONFIG_MAPPING[model_type]
    usual = cls().to_dict()
    sizes = {name: value for name, value in SIZES.items() if name in usual}
    if usual.get("sliding_window") is None and usual.get("layer_types") is not None:
        sizes.pop("sliding_window", None)
    if usual.get("layer_types"):
        sizes["layer_types"] = (list(dict.fromkeys(usual["layer_types"])) * 4)[:4]
    for name in ("mlp_layer_types", "no_rope_layers", "moe_layers"):
        if usual.get(name):
            sizes[name] = usual[name][:4] if name != "moe_layers" else [0, 1, 2, 3]
    return cls(**(sizes | MORE.get(model_type, {})))


@pytest.fixture
def witness():
    """Register an attention function that notes how it is called, under the name that is returned with the notes."""
    notes = []

    def attention(module, query, key, value, attention_mask, **rest):
        notes.append((module, query.shape, key.shape, value.shape, attention_mask, dict(rest)))
        rest.pop("softcap", None)
        return sdpa_attention_forward(module, query, key, value, attention_mask, **rest)

    def mask(*args, **rest):
        return sdpa_mask(*args, **(rest | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}))

    transformers.AttentionInterface.register("witness", attention)
    AttentionMaskInterface.register("witness", mask)
    yield "witness", notes
    transformers.AttentionInterface._global_mapping.pop("witness")
    AttentionMaskInterface._global_mapping.pop("witness")


def attended(required, queries, keys):
    """Return the mask that requirements mean, without padding."""
    distance = torch.arange(keys - queries, keys)[:, None] - torch.arange(keys)
    mask = distance >= 0 if required.causal else torch.ones_like(distance, dtype=torch.bool)
    if required.sliding_window is not None:
        mask &= distance.abs() < required.sliding_window
    if required.attention_chunk is not None:
        mask &= (
            torch.arange(queries)[:, None] // required.attention_chunk == torch.arange(keys) // required.attention_chunk
        )
    return mask


@pytest.mark.parametrize("model_type", [*DECODERS, *ENCODERS, *ENCODER_DECODERS])
def test_requirements_are_those_of_the_modules(host, witness, model_type):
    name, notes = witness
    config = tiny(model_type)
    auto = transformers.AutoModelForCausalLM if model_type in DECODERS else transformers.AutoModel
    made = auto.from_config(config, attn_implementation=name).eval()
    names = {module: label for label, module in made.named_modules()}
    ids = torch.randint(3, 300, (2, TOKENS), generator=torch.Generator().manual_seed(0))

    found = requirements(config, dtype="float32", partial=True)
    with torch.no_grad():
        made(input_ids=ids, attention_mask=torch.ones_like(ids))

    called = [_match(found, names[module]) for module, *_ in notes]
    assert sorted(called) == sorted(found)
    for layer, (_, query, key, value, mask, rest) in zip(called, notes, strict=True):
        required = found[layer]
        assert (required.num_q_heads, required.head_size) == (query[1], query[3])
        assert (required.num_kv_heads, required.head_size_v) == (key[1], value[3])
        assert required.sinks == (rest.get("s_aux") is not None)
        assert required.logits_soft_cap == rest.get("softcap")
        assert rest.get("sliding_window") in (None, required.sliding_window)
        assert torch.equal(mask[0, 0].expand(query[2], -1), attended(required, query[2], key[2]))


@pytest.mark.parametrize("model_type", [*DECODERS, *ENCODERS])
def test_padded_sequences(host, mirror, model_type):
    auto = transformers.AutoModelForCausalLM if model_type in DECODERS else transformers.AutoModel
    compare_padded(sharpen(auto.from_config(tiny(model_type), attn_implementation="eager")))


def test_a_decoder_that_attends_to_both_sides(host, mirror):
    fields = {"use_bidirectional_attention": True, "layer_types": ["sliding_attention", "full_attention"] * 2}
    config = CONFIG_MAPPING["gemma3_text"](**(tiny("gemma3_text").to_dict() | fields | {"sliding_window": 6}))
    made = sharpen(transformers.AutoModel.from_config(config, attn_implementation="eager"))

    compare_padded(made)

    described = requirements(config, dtype="float32").values()
    bound = [selection.requirements for selection in host.selections(made).values()]
    assert [(one.attn_type, one.sliding_window) for one in bound] == [("encoder_only", 4), ("encoder_only", None)] * 2
    assert bound == list(described)


def compare_padded(made):
    """Compare a model on a backend with the same model on eager attention, with sequences of three lengths."""
    ids = torch.randint(3, 300, (3, TOKENS), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :5] = mask[1, : TOKENS - 1] = 0

    def run(implementation):
        made.set_attn_implementation(implementation)
        with torch.no_grad():
            return made(input_ids=ids, attention_mask=mask)[0]

    expected = run("eager")
    torch.testing.assert_close(run("attnplug"), expected, rtol=1e-3, atol=1e-3)


def test_windows_of_minimax(host, mirror):
    config = tiny("minimax")
    config.sliding_window = 6
    made = sharpen(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    ids = torch.randint(3, 300, (2, TOKENS), generator=torch.Generator().manual_seed(0))

    def run(implementation):
        made.set_attn_implementation(implementation)
        with torch.no_grad():
            return made(input_ids=ids).logits

    expected = run("eager")
    torch.testing.assert_close(run("attnplug"), expected, rtol=1e-4, atol=1e-4)
    assert {layer.sliding_window for layer in requirements(config, dtype="float32", partial=True).values()} == {6}


def _match(found, name):
    matches = [layer for layer in found if f".{name}".endswith(f".{layer}")]
    assert len(matches) == 1, name
    return matches[0]


@pytest.mark.parametrize("model_type", [*DECODERS, *ADAPTED, *ENCODERS, *ENCODER_DECODERS])
def test_a_saved_configuration(model_type):
    config = tiny(model_type)
    saved = json.loads(config.to_json_string())

    assert requirements(saved, dtype="float32", partial=True) == requirements(config, dtype="float32", partial=True)


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "cohere2", "qwen2", "qwen3", "olmo3", "llama4_text"])
def test_a_configuration_from_before_layer_types(model_type):
    config = CONFIG_MAPPING[model_type]()
    old = {name: value for name, value in config.to_dict().items() if name != "layer_types"}

    assert requirements(old, dtype="bfloat16") == requirements(config, dtype="bfloat16")


def test_every_described_type_is_one_of_the_library():
    assert set(ARCHITECTURES) - set(CONFIG_MAPPING) <= set(REMOTE)  # published with their own code, or before a release


def _uneven(name):
    """Return a configuration of one layer whose eight heads do not divide its hidden size."""
    defaults = CONFIG_MAPPING[name]().to_dict()
    optional = {"num_key_value_heads": 8, "layer_types": ["full_attention"], "pad_token_id": 0, "head_dim": None}
    sizes = {"hidden_size": 66, "num_attention_heads": 8, "num_hidden_layers": 1, "vocab_size": 100}
    experts = {"num_experts": 2, "num_local_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    present = {key: value for key, value in (optional | experts).items() if key in defaults}
    return CONFIG_MAPPING[name](**sizes, intermediate_size=32, **present)


PARTS = {"glm4v_moe_text", "qwen3_omni_moe_text"}
"""Parts of composite models, whose default heads do not divide their hidden size: `test_descriptions` builds them."""


@pytest.mark.parametrize("name", sorted({name for name, known in ARCHITECTURES.items() if known.floors} - PARTS))
def test_modules_that_floor_the_head_size(name):
    config = _uneven(name)
    layer_of_module = requirements({**config.to_dict(), "head_dim": None}, dtype="float32")
    made = transformers.AutoModel.from_config(config, attn_implementation="eager", experts_implementation="eager")
    attention = [module for end in layer_of_module for path, module in made.named_modules() if path.endswith(end)]

    with torch.no_grad():
        made.eval()(torch.ones(1, 4, dtype=torch.long))

    assert {layer.head_size for layer in layer_of_module.values()} == {module.head_dim for module in attention} == {8}
