"""Descriptions of whole models: what was assumed, what is named beside the attention layers, what is not served."""

from __future__ import annotations

import json
import re

import pytest

from attnplug.errors import RequirementsError
from attnplug.models import describe_model, requirements
from attnplug.models.architectures import BIASED

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "dtype": "bfloat16",
}
MLA = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "dtype": "bfloat16",
}


def without(config, *names):
    return {name: value for name, value in config.items() if name not in names}


def dtypes(description):
    return {layer.requirements.dtype for layer in description.layers}


def note(description, word):
    """Return the only note that has a word."""
    (found,) = [text for text in description.notes if word in text]
    return found


# What a configuration leaves out


def test_fields_left_out_have_the_librarys_default_and_are_named() -> None:
    found = describe_model({"model_type": "gemma3_text", "num_hidden_layers": 6, "dtype": "bfloat16"})

    wanted = [layer.requirements for layer in found.layers]
    assert {(one.head_size, one.num_q_heads, one.num_kv_heads) for one in wanted} == {(256, 8, 4)}
    assert [one.sliding_window for one in wanted] == [4096] * 5 + [None]
    assert "head_dim=256, num_attention_heads=8, num_key_value_heads=4" in note(found, "leaves out")


def test_a_null_is_not_left_out() -> None:
    windowed = describe_model(without(LLAMA, "dtype") | {"model_type": "mistral"}, dtype="float16")
    full = describe_model(LLAMA | {"model_type": "mistral", "sliding_window": None})

    assert [layer.requirements.sliding_window for layer in windowed.layers] == [4096, 4096]
    assert [layer.requirements.sliding_window for layer in full.layers] == [None, None]
    assert "sliding_window=4096" in note(windowed, "leaves out")
    assert full.notes == ()


def test_another_spelling_of_a_field_comes_before_a_default() -> None:
    found = describe_model(
        {"model_type": "gpt2", "num_attention_heads": 4, "n_embd": 64, "n_layer": 1}, dtype="float32"
    )

    assert found.layers[0].requirements.num_q_heads == 4
    assert not any("n_head" in text for text in found.notes)


def test_a_complete_configuration_has_no_notes() -> None:
    found = describe_model(LLAMA)

    assert (found.notes, found.others, found.unserved) == ((), (), ())
    assert found.requirements == requirements(LLAMA, paged=True)


# Layers of other kinds


@pytest.mark.parametrize(
    ("config", "attention", "others"),
    [
        ({"model_type": "jamba", "num_hidden_layers": 8}, [4], {"linear_attention": [0, 1, 2, 3, 5, 6, 7]}),
        (
            {"model_type": "nemotron_h", "num_hidden_layers": 5, "hybrid_override_pattern": "M-*ME"},
            [2],
            {"linear_attention": [0, 3], "mlp": [1], "moe": [4]},
        ),
        ({"model_type": "nemotron_h", "layers_block_type": ["mamba", "attention"]}, [1], {"linear_attention": [0]}),
        ({"model_type": "qwen3_next", "num_hidden_layers": 4}, [3], {"linear_attention": [0, 1, 2]}),
        (
            {"model_type": "qwen3_next", "num_hidden_layers": 2, "full_attention_interval": 2},
            [1],
            {"linear_attention": [0]},
        ),
        ({"model_type": "bamba", "num_hidden_layers": 3, "attn_layer_indices": [1]}, [1], {"linear_attention": [0, 2]}),
        ({"model_type": "lfm2", "num_hidden_layers": 2, "full_attn_idxs": [0]}, [0], {"conv": [1]}),
        ({"model_type": "recurrent_gemma", "num_hidden_layers": 3}, [2], {"linear_attention": [0, 1]}),
        ({"model_type": "minimax", "num_hidden_layers": 4}, [0, 2], {"linear_attention": [1, 3]}),
        (
            {"model_type": "granitemoehybrid", "num_hidden_layers": 2, "layer_types": ["mamba", "attention"]},
            [1],
            {"linear_attention": [0]},
        ),
        ({"model_type": "falcon_h1", "num_hidden_layers": 2}, [0, 1], {}),
    ],
)
def test_a_hybrid_is_described_by_its_attention_layers(config, attention, others) -> None:
    if "nemotron_h" in config.values() and "hybrid_override_pattern" not in config:
        config = config | {"num_hidden_layers": None}
    found = describe_model(config, dtype="bfloat16")

    assert [layer.index for layer in found.layers] == attention
    assert {other.kind: list(other.indices) for other in found.others} == others
    assert found.unserved == ()


def test_a_window_is_that_of_each_attention_layer_of_minimax() -> None:
    found = describe_model({"model_type": "minimax", "num_hidden_layers": 4, "sliding_window": 9}, dtype="bfloat16")

    assert [layer.requirements.sliding_window for layer in found.layers] == [9, 9]


def test_what_runs_beside_attention_is_noted() -> None:
    assert "a Mamba-2 mixer beside its attention" in note(describe_model({"model_type": "falcon_h1"}), "beside")


def test_a_pattern_of_other_letters_is_refused() -> None:
    config = {"model_type": "nemotron_h", "num_hidden_layers": 3, "hybrid_override_pattern": "M*x"}

    with pytest.raises(RequirementsError, match="one of the letters 'M', '\\*', '-', 'E' for each layer"):
        describe_model(config)


def test_a_model_without_attention_is_described_as_such() -> None:
    found = describe_model({"model_type": "mamba2", "num_hidden_layers": 2})

    assert found.layers == found.unserved == ()
    assert [str(other) for other in found.others] == [
        "2 layers: mamba2: it is a recurrence over a state, not attention over keys"
    ]


def test_a_searched_architecture_leaves_attention_out() -> None:
    blocks = [{"n_heads_in_group": 4}, {"n_heads_in_group": None, "no_op": True}, {"replace_with_linear": True}]
    config = LLAMA | {"model_type": "nemotron-nas", "num_hidden_layers": 3, "num_key_value_heads": None}

    found = describe_model(config | {"block_configs": [{"attention": block} for block in blocks]})

    assert [(layer.index, layer.requirements.num_kv_heads) for layer in found.layers] == [(0, 2)]
    assert {other.kind: other.indices for other in found.others} == {"no_attention": (1,), "linear_layer": (2,)}


# Attention that no requirements express


INDEXED = MLA | {"index_topk": 2048, "index_n_heads": 64, "index_head_dim": 128}


@pytest.mark.parametrize("model_type", ["axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"])
def test_an_indexer_selects_paged_latents(model_type: str) -> None:
    found = describe_model(INDEXED | {"model_type": model_type})

    assert (len(found.layers), found.others) == (3, ())
    for layer in found.layers:
        wanted = layer.requirements
        assert (wanted.latent, wanted.topk, wanted.num_kv_heads, layer.uncompressed) == (True, 2048, 1, None)
        assert wanted.sinks == (model_type == "hy_v4")
    with pytest.raises(RequirementsError, match="names no 'index_topk'"):
        describe_model(MLA | {"model_type": model_type, "index_topk": None})


def test_the_engine_keeps_the_keys_of_indexers() -> None:
    (note,) = (one for one in describe_model(INDEXED | {"model_type": "hy_v4"}).notes if "indexer" in one)

    for fact in ("2 layers have an indexer; 1 reuse", "64 heads of 128", "128 per token and layer, 256 bytes"):
        assert fact in note


INDEXERS: list[tuple[str, dict[str, object], list[int]]] = [
    ("axk2", {}, [0, 1, 2, 3, 4, 5, 6]),
    ("hy_v4", {}, [0, 1, 1, 1, 1, 5, 5]),
    ("hy_v4", {"indexer_types": ["full", "shared", "shared", "full", "shared", "full", "full"]}, [0, 0, 0, 3, 3, 5, 6]),
    ("glm_moe_dsa", {}, [0, 1, 2, 3, 4, 5, 6]),
    ("glm_moe_dsa", {"index_topk_freq": 3}, [0, 1, 1, 1, 4, 4, 4]),
    ("glm_moe_dsa", {"index_topk_freq": 2, "index_skip_topk_offset": 4}, [0, 1, 2, 3, 3, 5, 5]),
    ("glm_moe_dsa", {"index_topk_pattern": "FSSFSFS"}, [0, 0, 0, 3, 3, 5, 5]),
    ("glm_moe_dsa", {"indexer_types": ["full", *["shared"] * 6], "index_topk_freq": 2}, [0] * 7),
]


@pytest.mark.parametrize(("model_type", "more", "sources"), INDEXERS)
def test_layers_reuse_the_selection_of_an_earlier_one(
    model_type: str, more: dict[str, object], sources: list[int]
) -> None:
    found = describe_model(INDEXED | {"model_type": model_type, "num_hidden_layers": 7, **more})

    assert [layer.indexer for layer in found.layers] == [f"layers.{index}.self_attn" for index in sources]
    assert not any("not known to leave attention" in note for note in found.notes)


@pytest.mark.parametrize("types", [["shared", "full", "full"], ["full"], [], ["full", "none", "full"]])
def test_indexers_that_leave_a_layer_without_selection_are_refused(types: list[str]) -> None:
    with pytest.raises(RequirementsError, match=r"indexer types of \d layers for 3"):
        describe_model(INDEXED | {"model_type": "glm_moe_dsa", "indexer_types": types})


@pytest.mark.parametrize("more", [{"kv_lora_rank": None}, {"kv_lora_rank": 0}])
def test_a_selection_without_latents_is_not_dropped(more: dict[str, object]) -> None:
    with pytest.raises(RequirementsError, match=r"an indexer selects(?s:.*)with latents"):
        describe_model(INDEXED | {"model_type": "deepseek_v32", **more})


def test_sparse_selection_without_pages_is_named_with_what_it_needs() -> None:
    found = describe_model(INDEXED | {"model_type": "deepseek_v32"}, paged=False)

    (other,) = found.unserved
    assert (found.layers, other.kind, other.indices) == ((), "indexed_attention", (0, 1, 2))
    for fact in ("served in paged KV caches only", "a learned indexer of 64 heads of 128", "2048 keys", "top-k"):
        assert fact in other.why
    with pytest.raises(RequirementsError, match="sparse selection"):
        requirements(INDEXED | {"model_type": "deepseek_v32"}, paged=False)


def test_an_indexer_of_another_type_is_refused_too() -> None:
    (other,) = describe_model(MLA | {"index_topk": 2048}).unserved

    assert "a learned indexer chooses the keys (index_topk=2048)" in other.why


def test_an_unknown_type_with_latents_may_be_read_as_deepseek() -> None:
    config = MLA | {"model_type": "published_yesterday"}

    with pytest.raises(RequirementsError, match="assume='deepseek_v3'"):
        describe_model(config)
    assert describe_model(config, assume="deepseek_v3").layers == describe_model(MLA).layers


@pytest.mark.parametrize("value", [-1, "512", 2.5, True])
@pytest.mark.parametrize("name", ["kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"])
def test_a_size_of_latents_that_is_no_whole_number_is_refused(name: str, value: object) -> None:
    with pytest.raises(RequirementsError, match=re.escape(f"{name}={value!r}")):
        describe_model(MLA | {name: value})


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ("yarn", "is an object of the parameters of rotary positions"),
        ({"type": "yarn", "mscale_all_dim": 1.0}, "names no 'factor'"),
        ({"type": "yarn", "mscale_all_dim": -1.0, "factor": 40}, "mscale_all_dim=-1.0"),
        ({"type": "yarn", "mscale_all_dim": 1.0, "factor": "40"}, "factor='40'"),
    ],
)
def test_parameters_of_yarn_that_are_wrong_are_refused(rope: object, message: str) -> None:
    with pytest.raises(RequirementsError, match=re.escape(message)):
        describe_model(MLA | {"rope_scaling": rope})


def test_latent_attention_may_be_switched_off() -> None:
    config = without(MLA, "kv_lora_rank") | {"model_type": "deepseek_v2", "kv_lora_rank": None, "hidden_size": 1024}

    assert describe_model(config | {"num_key_value_heads": 128}).layers[0].requirements.head_size == 8


def test_recurrent_layers_beside_latent_attention_are_named() -> None:
    found = describe_model(MLA | {"model_type": "bailing_hybrid", "num_hidden_layers": 24, "layer_group_size": 4})

    assert [layer.index for layer in found.layers] == [3, 7, 11, 15, 19, 23]
    assert {(other.kind, len(other.indices), other.is_attention) for other in found.others} == {
        ("linear_attention", 18, False)
    }


def test_layers_with_an_indexer_are_named_as_such() -> None:
    found = describe_model({"model_type": "qwen4_exp_text", "num_hidden_layers": 4, "dtype": "bfloat16"})

    (indexed,) = found.unserved
    assert (indexed.kind, indexed.indices) == ("indexed_attention", (3,))
    assert "a learned indexer chooses the keys" in indexed.why


def test_an_unknown_type_is_refused_by_name() -> None:
    with pytest.raises(RequirementsError, match="is of model type 'lama'; did you mean 'llama'"):
        describe_model(LLAMA | {"model_type": "lama"})


@pytest.mark.parametrize(
    ("config", "word", "fix"),
    [
        ({"model_type": "llama_next"}, "; did you mean 'llama'", "assume='llama'"),
        ({"model_type": "published_yesterday"}, "", "assume='llama'"),
        ({"model_type": "minimax_m9", "attn_type_list": [0, 1]}, "; did you mean 'minimax_m1'", "assume='minimax_m1'"),
        ({"model_type": "olmo9", "attn_type_list": [0, 1]}, "", None),
        ({"model_type": "mistral_next", "num_attention_heads_per_layer": [8, 4]}, "", None),
        (
            {"model_type": "lagune", "num_attention_heads_per_layer": [8, 4]},
            "; did you mean 'laguna'",
            "assume='laguna'",
        ),
        ({"model_type": "mistral_next", "sliding_window": 8}, "; did you mean 'mistral'", "assume='mistral'"),
        ({"model_type": "published_yesterday", "sliding_window": 8}, "", None),
        ({"model_type": "llama_next", "attn_windows": [1]}, "", None),
        ({"model_type": "mimo"}, "", "assume='llama'"),
        ({"model_type": "llama_next", "gizmo": 1}, "; did you mean 'llama'", "assume='llama'"),
    ],
)
def test_a_type_is_suggested_where_its_fields_fit(config, word: str, fix: str | None) -> None:
    with pytest.raises(RequirementsError) as caught:
        describe_model(LLAMA | config)

    assert ("did you mean" in caught.value.problem) == bool(word)
    assert word in caught.value.problem
    assert (fix or "keep transformers' own attention") in caught.value.fix
    assert ("assume=" in caught.value.fix) == (fix is not None)
    if fix is not None:
        assert describe_model(LLAMA | config, assume=fix.split("'")[1]).layers


# Fields that are not read


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dual_chunk_attention_config", {"chunk_size": 262144, "local_size": 8192}),
        ("sparse_config", {"topk": 64, "block_size": 64}),
        ("indexer_budget", 2048),
        ("prefix_lm", True),
    ],
)
@pytest.mark.parametrize("assume", [None, "llama"])
def test_a_field_that_changes_attention_is_refused_by_name(name: str, value: object, assume: str | None) -> None:
    found = describe_model(LLAMA | {name: value} | ({"model_type": "new"} if assume else {}), assume=assume)

    assert (found.layers, len(found.unserved)) == ((), 1)
    assert f"({name}" in found.unserved[0].why


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_attention_heads_per_layer", [8, 4]),
        ("layer_types", ["full_attention", "sliding_attention"]),
        ("num_query_groups", 2),
        ("use_alibi", True),
        ("swa_head_dim", 16),
    ],
)
def test_a_field_that_an_assumed_type_does_not_read_is_refused_by_name(name: str, value: object) -> None:
    found = describe_model(LLAMA | {"model_type": "new", name: value}, assume="llama")

    assert (found.layers, len(found.unserved)) == ((), 1)
    assert found.unserved[0].why == f"its {name} decides about attention, and is not read for 'llama'"


def test_a_field_that_is_not_known_is_noted() -> None:
    found = describe_model(LLAMA | {"attn_noise": 0.5, "swa_rotation": 0, "router_noise": 0.5, "vocab_size": 7, "b": 1})

    assert len(found.layers) == 2
    assert note(found, "not read") == "not read, and not known to leave attention as it is: attn_noise, b"


def test_attention_groups_are_kv_heads() -> None:
    text = without(LLAMA, "num_key_value_heads") | {"model_type": "step3_text"}
    text |= {"num_attention_groups": 1, "head_dim": 256, "share_q_dim": 2048}

    found = describe_model({"model_type": "step3_vl", "text_config": text})

    assert "not read" not in " ".join(found.notes)
    (wanted,) = {layer.requirements for layer in found.layers}

    assert (wanted.num_q_heads, wanted.num_kv_heads, wanted.head_size) == (8, 1, 256)


def test_kimi_linear_has_both() -> None:
    config = MLA | {"model_type": "kimi_linear", "num_hidden_layers": 4}
    config |= {"linear_attn_config": {"full_attn_layers": [4], "kda_layers": [1, 2, 3]}}

    found = describe_model(config)

    assert {other.kind: (other.indices, other.is_attention) for other in found.others} == {
        "linear_attention": ((0, 1, 2), False)
    }
    assert {layer.name: layer.requirements.latent for layer in found.layers} == {"layers.3.self_attn": True}


# Encoders and decoders, and parts of composite models


@pytest.mark.parametrize("model_type", sorted(BIASED))
def test_a_relative_bias_is_an_additive_mask(model_type: str) -> None:
    config = {"model_type": model_type, "num_layers": 1, "num_heads": 8, "d_kv": 64, "d_model": 512}

    found = describe_model(config, dtype="float32", block_size=16)

    asked = {layer.requirements.attn_type: layer.requirements for layer in found.layers}
    assert {name: (one.attn_bias, one.paged) for name, one in asked.items()} == {
        "encoder": (True, False),
        "decoder": (True, False),
        "encoder_decoder": (False, True),
    }
    assert {layer.scale for layer in found.layers} == {1.0}
    assert "contiguous K/V only" in note(found, "bias")


def test_a_nested_text_part_is_described_and_the_others_are_named() -> None:
    config = {
        "model_type": "omni",
        "thinker_config": {"text_config": LLAMA},
        "vision_config": {},
        "torch_dtype": "float16",
    }

    found = describe_model(config)

    assert (found.model_type, dtypes(found)) == ("llama", {"bfloat16"})
    assert note(found, "described") == (
        "thinker_config.text_config of 'omni' is described, as it reads text; vision_config is not described"
    )


@pytest.mark.parametrize("part", ["text_config", "language_config", "llm_config"])
def test_the_dtype_of_the_whole_is_that_of_its_part(part: str) -> None:
    assert dtypes(describe_model({"model_type": "any", part: without(LLAMA, "dtype"), "torch_dtype": "float16"})) == {
        "float16"
    }


def test_image_tokens_are_a_note_and_not_a_refusal() -> None:
    text = {"model_type": "gemma4_text", "num_hidden_layers": 6, "use_bidirectional_attention": "vision"}

    found = describe_model({"model_type": "gemma4", "text_config": text, "dtype": "bfloat16"})

    assert len(found.layers) == 6
    assert note(found, "one image")


def test_a_decoder_that_attends_to_both_sides_is_an_encoder() -> None:
    config = LLAMA | {"model_type": "gemma3_text", "head_dim": 8, "num_hidden_layers": 6, "sliding_window": 512}
    config |= {"use_bidirectional_attention": True}

    found = describe_model(config)

    wanted = [layer.requirements for layer in found.layers]
    assert {(one.attn_type, one.causal, one.paged) for one in wanted} == {("encoder_only", False, False)}
    assert [one.sliding_window for one in wanted] == [257] * 5 + [None]  # 256 to each side, and itself
    for changes in ({"model_type": "gemma2"}, {"model_type": "gemma4_text", "use_bidirectional_attention": "all"}):
        assert "attend to later ones" in describe_model(config | changes).unserved[0].why


# Factors of the scores


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        (LLAMA, 8**-0.5),
        (LLAMA | {"model_type": "gemma2", "head_dim": 128, "query_pre_attn_scalar": 144}, 144**-0.5),
        (LLAMA | {"model_type": "granite", "attention_multiplier": 0.015625}, 0.015625),
        (LLAMA | {"model_type": "gemma3n_text", "num_hidden_layers": 1, "num_kv_shared_layers": 0}, 1.0),
        (LLAMA | {"model_type": "phi3small", "num_hidden_layers": 1, "dense_attention_every_n_layers": 1}, 1 / 8),
        (LLAMA | {"model_type": "phi3small", "dense_attention_every_n_layers": 1, "mup_use_scaling": False}, 8**-0.5),
        (LLAMA | {"model_type": "gpt2", "scale_attn_weights": False}, 1.0),
        (LLAMA | {"model_type": "mpt", "attn_config": {"softmax_scale": 0.25}}, 0.25),
        (LLAMA | {"model_type": "zamba2", "layer_types": ["hybrid", "mamba"]}, 8**-0.5),
    ],
)
def test_the_factor_of_the_scores(config, scale: float) -> None:
    assert describe_model(config).layers[0].scale == pytest.approx(scale)


def test_gpt2_may_divide_by_the_number_of_the_layer() -> None:
    found = describe_model(LLAMA | {"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True})

    assert [layer.scale for layer in found.layers] == pytest.approx([8**-0.5, 8**-0.5 / 2])


@pytest.mark.parametrize("value", [0, -1, "256", True])
def test_a_factor_that_is_no_positive_number_is_refused(value) -> None:
    with pytest.raises(RequirementsError, match=re.escape(f"query_pre_attn_scalar={value!r}")):
        describe_model(LLAMA | {"model_type": "gemma2", "query_pre_attn_scalar": value})


# Traps of published files


def test_layers_of_a_saved_file_are_numbered_with_leading_zeros() -> None:
    config = LLAMA | {"model_type": "gemma4_text", "num_hidden_layers": 12, "head_dim": 8}
    config |= {"per_layer_config": {"05": {"head_dim": 16}, "11": {"head_dim": 16}}}

    assert [layer.requirements.head_size for layer in describe_model(config).layers] == [8, 8, 8, 8, 8, 16] * 2


def test_full_layers_of_gemma_4_have_heads_of_their_own() -> None:
    config = LLAMA | {"model_type": "gemma4_text", "num_hidden_layers": 6, "head_dim": 8, "global_head_dim": 16}
    config |= {"num_global_key_value_heads": 1}

    def shapes(**more):
        return [
            (layer.requirements.head_size, layer.requirements.num_kv_heads)
            for layer in describe_model(config | more).layers
        ]

    assert shapes(attention_k_eq_v=True) == [(8, 2)] * 5 + [(16, 1)]
    assert shapes(attention_k_eq_v=False) == [(8, 2)] * 5 + [(16, 2)]


def test_chatglm_groups_its_queries_where_it_says_so() -> None:
    config = {
        "model_type": "chatglm",
        "num_layers": 1,
        "num_attention_heads": 32,
        "kv_channels": 128,
        "hidden_size": 64,
    }
    config |= {"multi_query_group_num": 2, "dtype": "float16"}

    def heads(**more):
        wanted = describe_model(config | more).layers[0].requirements
        return wanted.num_kv_heads, wanted.head_size

    assert heads(multi_query_attention=True) == (2, 128)
    assert heads(multi_query_attention=False) == (32, 128)


@pytest.mark.parametrize(("hidden", "heads", "alibi"), [(4096, 32, None), (5120, 40, "linear")])
def test_only_the_larger_baichuan_has_alibi(hidden: int, heads: int, alibi: str | None) -> None:
    config = {"model_type": "baichuan", "hidden_size": hidden, "num_attention_heads": heads, "num_hidden_layers": 1}

    wanted = describe_model(config, dtype="bfloat16").layers[0].requirements

    assert (wanted.alibi, wanted.head_size, wanted.num_kv_heads) == (alibi, 128, heads)


def test_vision_layers_of_mllama_attend_to_the_image() -> None:
    config = {"model_type": "mllama_text_model", "num_hidden_layers": 4, "dtype": "bfloat16"}

    found = describe_model(config)

    assert [layer.requirements.attn_type for layer in found.layers] == ["decoder"] * 3 + ["encoder_decoder"]
    assert found.layers[3].name == "layers.3.cross_attn"


def test_a_description_is_plain_data() -> None:
    data = json.loads(json.dumps(describe_model(INDEXED | {"model_type": "deepseek_v32"}, paged=False).to_dict()))

    assert data["model_type"] == "deepseek_v32"
    assert data["others"][0]["indices"] == [0, 1, 2]
