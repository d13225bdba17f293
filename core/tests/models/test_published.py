"""Published configurations, with what each publisher says of its attention beside the answer."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from attnplug.errors import RequirementsError
from attnplug.models import describe_model, model_layers

FIXTURES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("configurations.json").read_text("utf-8"))
BY_NAME = {fixture["name"]: fixture["config"] for fixture in FIXTURES}
# Layers, query heads, KV heads and size of a head: from the model cards and papers, not from this package.
SHAPES = {
    "meta-llama/Llama-2-7b-hf": (32, 32, 32, 128),
    "meta-llama/Meta-Llama-3.1-8B": (32, 32, 8, 128),
    "meta-llama/Meta-Llama-3.1-405B": (126, 128, 8, 128),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": (48, 40, 8, 128),
    "mistralai/Mixtral-8x7B-v0.1": (32, 32, 8, 128),
    "google/gemma-2-27b": (46, 32, 16, 128),
    "google/gemma-3-4b-it": (34, 8, 4, 256),
    "google/gemma-3-12b-it": (48, 16, 8, 256),
    "openai/gpt-oss-20b": (24, 64, 8, 64),
    "openai/gpt-oss-120b": (36, 64, 8, 64),
    "Qwen/Qwen2-0.5B": (24, 14, 2, 64),
    "Qwen/Qwen3-8B": (36, 32, 8, 128),
    "Qwen/Qwen3-30B-A3B": (48, 32, 4, 128),
    "Qwen/Qwen3-Next-80B-A3B-Thinking": (12, 16, 2, 256),
    "microsoft/Phi-3-small-8k-instruct": (32, 32, 8, 128),
    "THUDM/chatglm2-6b-32k": (28, 32, 2, 128),
    "zai-org/GLM-4.7-FP8": (92, 96, 8, 128),
    "Falcon 7B": (32, 71, 1, 64),
    "Falcon, new decoder architecture": (60, 128, 8, 64),
    "Jamba v0.1": (4, 32, 8, 128),
    "BERT base": (12, 12, 12, 64),
    "Qwen/Qwen2.5-7B-Instruct": (28, 28, 4, 128),
    "Qwen/Qwen2.5-72B": (80, 64, 8, 128),
    "Qwen/Qwen3-0.6B": (28, 16, 8, 128),
    "Qwen/Qwen3-4B": (36, 32, 8, 128),
    "Qwen/Qwen3-32B": (64, 64, 8, 128),
    "Qwen/Qwen3-235B-A22B": (94, 64, 4, 128),
    "Qwen/Qwen2-VL-7B-Instruct": (28, 28, 4, 128),
    "mistralai/Mistral-7B-v0.3": (32, 32, 8, 128),
    "mistralai/Mistral-Nemo-Base-2407": (40, 32, 8, 128),
    "mistralai/Mistral-Large-Instruct-2407": (88, 96, 8, 128),
    "mistralai/Mixtral-8x22B-v0.1": (56, 48, 8, 128),
    "mistralai/Ministral-8B-Instruct-2410": (36, 32, 8, 128),
    "google/gemma-2-9b": (42, 16, 8, 256),
    "google/gemma-3-27b-it": (62, 32, 16, 128),
    "google/gemma-3-1b-it": (26, 4, 1, 256),
    "google/embeddinggemma-300m": (24, 3, 1, 256),
    "microsoft/Phi-3.5-mini-instruct": (32, 32, 32, 96),
    "microsoft/phi-4": (40, 40, 10, 128),
    "microsoft/Phi-4-mini-instruct": (32, 24, 8, 128),
    "microsoft/Phi-4-multimodal-instruct": (32, 24, 8, 128),
    "microsoft/Phi-3.5-MoE-instruct": (32, 32, 8, 128),
    "microsoft/phi-2": (32, 32, 32, 80),
    "meta-llama/Llama-3.2-1B": (16, 32, 8, 64),
    "meta-llama/Llama-3.3-70B-Instruct": (80, 64, 8, 128),
    "HuggingFaceTB/SmolLM2-135M": (30, 9, 3, 64),
    "HuggingFaceTB/SmolLM3-3B": (36, 16, 4, 128),
    "allenai/OLMoE-1B-7B-0924": (16, 16, 16, 128),
    "tiiuae/falcon-40b": (60, 128, 8, 64),
    "EleutherAI/gpt-neox-20b": (44, 64, 64, 96),
    "facebook/opt-6.7b": (32, 32, 32, 128),
    "bigcode/starcoder2-7b": (32, 36, 4, 128),
    "CohereForAI/c4ai-command-r-plus": (64, 96, 8, 128),
    "ibm-granite/granite-3.1-8b-instruct": (40, 32, 8, 128),
    "MiniMaxAI/MiniMax-M1-80k": (10, 64, 8, 128),
    "MiniMaxAI/MiniMax-Text-01": (10, 64, 8, 128),
    "stepfun-ai/step3": (61, 64, 1, 256),
    "inclusionAI/Ling-mini-2.0": (20, 16, 4, 128),
    "inclusionAI/Ring-mini-linear-2.0": (4, 16, 4, 128),
    "zai-org/GLM-4.5-Air": (46, 96, 8, 128),
    "internlm/internlm3-8b-instruct": (48, 32, 2, 128),
    "baichuan-inc/Baichuan2-13B-Chat": (40, 40, 40, 128),
    "01-ai/Yi-1.5-34B": (60, 56, 8, 128),
    "ai21labs/AI21-Jamba-1.5-Large": (9, 64, 8, 128),
    "LiquidAI/LFM2-1.2B": (6, 32, 8, 64),
    "openai/whisper-large-v3": (96, 20, 20, 64),
    "answerdotai/ModernBERT-large": (28, 16, 16, 64),
    "LGAI-EXAONE/EXAONE-4.0-32B": (64, 40, 8, 128),
    "LGAI-EXAONE/EXAONE-3.5-7.8B-Instruct": (32, 32, 8, 128),
    "ByteDance-Seed/Seed-OSS-36B-Instruct": (64, 80, 8, 128),
    "databricks/dbrx-base": (40, 48, 8, 128),
    "amd/Llama-3.1-8B-Instruct-FP8-KV": (32, 32, 8, 128),
    "neuralmagic/Meta-Llama-3-8B-Instruct-FP8-KV": (32, 32, 8, 128),
}
# Layers, query heads, rank and rotary size of a latent, size of an expanded key and value, factor and weight of YaRN:
# from the papers and model cards, not from this package.
LATENT = {
    "deepseek-ai/DeepSeek-V3": (61, 128, 512, 64, 192, 128, (40, 1.0)),
    "moonshotai/Kimi-K2-Instruct": (61, 64, 512, 64, 192, 128, (32, 1.0)),
    "moonshotai/Kimi-K2.5": (61, 64, 512, 64, 192, 128, (64, 1.0)),
    "deepseek-ai/DeepSeek-V2-Lite": (27, 16, 512, 64, 192, 128, (40, 0.707)),
    "moonshotai/Moonlight-16B-A3B": (27, 16, 512, 64, 192, 128, None),
    "Kimi Linear": (6, 32, 512, 64, 192, 128, None),
    "openbmb/MiniCPM3-4B": (62, 40, 256, 32, 96, 64, None),
    "GLM-4.7-Flash": (47, 20, 512, 64, 256, 256, None),
    "Mistral 4": (36, 32, 256, 64, 128, 128, (128, 1.0)),
    "Youtu": (32, 16, 512, 64, 192, 128, None),
    "LongCat-Flash": (56, 64, 512, 64, 192, 128, None),
}
SPARSE = {"deepseek-ai/DeepSeek-V3.2": 61, "zai-org/GLM-5": 78}


def layers_of(name: str) -> list[Any]:
    return [layer.requirements for layer in describe_model(BY_NAME[name]).layers]


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    layers = layers_of(name)

    found = {(len(layers), one.num_q_heads, one.num_kv_heads, one.head_size) for one in layers}
    assert found == {SHAPES[name]}


@pytest.mark.parametrize("name", LATENT)
def test_latent_attention_is_absorbed_or_expanded(name: str) -> None:
    layers, heads, rank, rope, key, value, yarn = LATENT[name]
    paged, dense = describe_model(BY_NAME[name]), describe_model(BY_NAME[name], paged=False)

    assert len(paged.layers) == layers
    absorbed = {(r.latent, r.num_q_heads, r.num_kv_heads, r.head_size, r.head_size_v) for r in layers_of(name)}
    assert absorbed == {(True, heads, 1, rank + rope, rank)}
    expanded = {(r.num_q_heads, r.num_kv_heads, r.head_size, r.head_size_v) for r in dense.requirements.values()}
    assert expanded == {(heads, heads, key, value)}
    factor = 1.0 if yarn is None else (1 + 0.1 * yarn[1] * math.log(yarn[0])) ** 2
    for layer in (*paged.layers, *dense.layers):
        assert layer.scale == pytest.approx(key**-0.5 * factor)


@pytest.mark.parametrize("name", LATENT)
def test_an_uncompressed_prefill_is_contiguous_with_lse(name: str) -> None:
    dense = describe_model(BY_NAME[name], paged=False)

    for paged, expanded in zip(describe_model(BY_NAME[name]).layers, dense.layers, strict=True):
        assert paged.uncompressed == expanded.requirements.evolve(return_lse=True)
        assert expanded.uncompressed is None


def test_options_of_the_kv_cache_are_not_of_a_prefill() -> None:
    pages = {"block_size": 64, "cascade": True, "dcp_size": 2, "kv_cache_dtype": "fp8_e4m3", "kv_in_cache": True}
    engine = {"cudagraph": "uniform_batch", "decode_query_len": 4, "batch_invariant": True}

    layer = describe_model(BY_NAME["deepseek-ai/DeepSeek-V3"], **pages, **engine).layers[0]

    plain = describe_model(BY_NAME["deepseek-ai/DeepSeek-V3"]).layers[0].uncompressed
    assert layer.requirements.kv_cache_dtype == "fp8_e4m3"
    assert layer.uncompressed == plain.evolve(batch_invariant=True)


@pytest.mark.parametrize("name", SPARSE)
def test_sparse_selection_is_described_with_pages_and_named_without(name: str) -> None:
    paged, dense = describe_model(BY_NAME[name]), describe_model(BY_NAME[name], paged=False)

    assert [layer.requirements.topk for layer in paged.layers] == [2048] * SPARSE[name]
    assert dense.layers == paged.others == ()
    assert [(other.kind, len(other.indices)) for other in dense.unserved] == [("indexed_attention", SPARSE[name])]
    assert "2048 keys of each query (top-k)" in dense.unserved[0].why


@pytest.mark.parametrize(
    ("name", "window", "first", "full"),
    [
        ("google/gemma-2-27b", 4096, True, 23),
        ("google/gemma-3-4b-it", 1024, True, 5),
        ("google/gemma-4-26B-A4B", 1024, True, 5),
        ("openai/gpt-oss-20b", 128, True, 12),
        ("Qwen/Qwen2-0.5B", None, False, 24),
        ("Mistral 7B v0.1", 4096, True, 0),
        ("OLMo 3", 4096, True, 8),
        ("Command R7B", 4096, True, 10),
        ("google/embeddinggemma-300m", 257, True, 4),  # 256 to each side, and itself
        ("mistralai/Ministral-8B-Instruct-2410", 32768, True, 0),
        ("microsoft/Phi-4-multimodal-instruct", 262144, True, 0),
        ("stepfun-ai/Step-3.5-Flash", 512, False, 12),
    ],
)
def test_windows(name: str, window: int | None, first: bool, full: int) -> None:
    found = [one.sliding_window for one in layers_of(name)]

    assert set(found) - {None} == {window} - {None}
    assert (found[0] is not None) == first
    assert found.count(None) == full


def test_every_fourth_layer_of_llama_4_is_full() -> None:
    found = [one.attention_chunk for one in layers_of("meta-llama/Llama-4-Scout-17B-16E-Instruct")]

    assert found == [8192, 8192, 8192, None] * 12


def test_every_second_layer_of_phi_3_small_is_dense() -> None:
    found = [one.block_sparse is None for one in layers_of("microsoft/Phi-3-small-8k-instruct")]

    assert found == [False, True] * 16


def test_full_layers_of_gemma_4_have_larger_and_fewer_heads() -> None:
    layers = layers_of("google/gemma-4-26B-A4B")

    assert {(one.head_size, one.num_kv_heads) for one in layers if one.sliding_window is None} == {(512, 2)}
    assert {(one.head_size, one.num_kv_heads) for one in layers if one.sliding_window is not None} == {(256, 8)}


def test_windowed_layers_of_mimo_have_twice_the_kv_heads_and_sinks() -> None:
    layers = layers_of("XiaomiMiMo/MiMo-V2-Flash")

    found = {(one.sliding_window, one.num_kv_heads, one.sinks) for one in layers}
    assert found == {(None, 4, False), (129, 8, True)}  # 128 tokens before each token, and itself
    assert {(one.head_size, one.head_size_v) for one in layers} == {(192, 128)}
    assert [index for index, one in enumerate(layers) if one.sliding_window is None] == [
        0,
        5,
        11,
        17,
        23,
        29,
        35,
        41,
        47,
    ]


def test_sinks_soft_caps_and_alibi() -> None:
    sinks = {name for name in BY_NAME if any(one.sinks for one in layers_of(name))}
    capped = {name for name in BY_NAME if any(one.logits_soft_cap for one in layers_of(name))}
    alibi = {name for name in BY_NAME if any(one.alibi for one in layers_of(name))}

    assert sinks == {"openai/gpt-oss-20b", "openai/gpt-oss-120b", "XiaomiMiMo/MiMo-V2-Flash"}
    assert capped == {"google/gemma-2-27b", "google/gemma-2-9b"}
    assert alibi == {"Falcon with ALiBi", "MPT 7B", "BLOOM", "baichuan-inc/Baichuan2-13B-Chat"}


def test_scales_that_are_not_one_over_the_root_of_a_head() -> None:
    odd: dict[str, float] = {}
    for name, config in BY_NAME.items():
        for layer in describe_model(config).layers:
            is_odd = layer.scale is not None and abs(layer.scale - layer.requirements.head_size**-0.5) > 1e-9
            if is_odd and not layer.requirements.latent:
                odd[name] = layer.scale

    assert odd == pytest.approx(
        {
            "google/gemma-2-27b": 144**-0.5,
            "Gemma 3n": 1.0,
            "google/gemma-4-26B-A4B": 1.0,
            "microsoft/Phi-3-small-8k-instruct": 1 / 128,
            "T5 small": 1.0,
            "google/gemma-3-27b-it": 168**-0.5,
            "Granite 3": 0.0078125,
            "ibm-granite/granite-3.1-8b-instruct": 0.0078125,
            "Zamba2 2.7B": 80**-0.5,
        }
    )


def test_windowed_layers_of_step_3_5_have_query_heads_of_their_own_number() -> None:
    found = {(one.sliding_window, one.num_q_heads, one.num_kv_heads) for one in layers_of("stepfun-ai/Step-3.5-Flash")}

    assert found == {(None, 64, 8), (512, 96, 8)}


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Qwen/Qwen2.5-7B-Instruct-1M", "dual chunk attention"),
        ("openbmb/MiniCPM4.1-8B", "blocks of keys that a score chooses"),
    ],
)
def test_sparse_attention_that_a_field_switches_on_is_refused(name: str, why: str) -> None:
    found = describe_model(BY_NAME[name])

    assert found.layers == ()
    assert why in found.unserved[0].why


@pytest.mark.parametrize("name", ["amd/Llama-3.1-8B-Instruct-FP8-KV", "neuralmagic/Meta-Llama-3-8B-Instruct-FP8-KV"])
def test_an_fp8_kv_cache_has_a_scale_per_tensor(name: str) -> None:
    assert {(one.kv_cache_dtype, one.per_head_scales) for one in layers_of(name)} == {("fp8_e4m3", False)}


@pytest.mark.parametrize("name", BY_NAME)
def test_every_field_of_a_published_file_is_known(name: str) -> None:
    assert not any(text.startswith("not read") for text in describe_model(BY_NAME[name]).notes)


def test_encoders_see_both_sides_and_have_no_cache() -> None:
    for name in ("BERT base", "ModernBERT base"):
        assert {(one.attn_type, one.causal, one.paged) for one in layers_of(name)} == {("encoder_only", False, False)}
    for name in ("T5 small", "BART large", "Whisper tiny"):
        found = {one.attn_type: (one.causal, one.paged) for one in layers_of(name)}
        assert found["encoder"] == (False, False)
        assert found["decoder"] == (True, name != "T5 small")  # its bias is an additive mask: contiguous K/V
        assert found["encoder_decoder"] == (False, True)


@pytest.mark.parametrize("fixture", FIXTURES, ids=[fixture["name"] for fixture in FIXTURES])
def test_every_configuration_is_answered_and_names_its_source(fixture: dict[str, Any]) -> None:
    found = describe_model(fixture["config"])

    assert fixture["source"].startswith(("config.json of ", "transformers "))
    assert found.layers or found.others
    numbers = [layer.index for layer in found.layers] + [index for other in found.others for index in other.indices]
    if all(layer.requirements.attn_type != "encoder_decoder" for layer in found.layers):
        assert sorted(numbers) == list(range(len(numbers)))  # no layer is lost, and none is described twice


@pytest.mark.parametrize("name", BY_NAME)
def test_layers_are_those_of_the_description_or_refused_with_its_reason(name: str) -> None:
    described = describe_model(BY_NAME[name], paged=True)
    if described.layers and not any(layer.requirements.attn_bias for layer in described.layers):
        assert model_layers(BY_NAME[name], paged=True, partial=True) == described.layers
        return
    reasons = [other.why for other in described.others] or ["a learned bias of relative position"]
    with pytest.raises(RequirementsError) as caught:
        model_layers(BY_NAME[name], paged=True, partial=True)
    assert any(reason in str(caught.value) for reason in reasons)
