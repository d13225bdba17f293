"""Requirements from configurations, compared with what the library's modules request when they run."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from attnplug.errors import RequirementsError
from attnplug.models import requirements, requirements_from_json
from attnplug.models.architectures import ARCHITECTURES, REFUSED

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "dtype": "bfloat16",
}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": 4096}
QWEN2 = LLAMA | {"model_type": "qwen2", "sliding_window": 128, "use_sliding_window": True, "max_window_layers": 1}
GEMMA2 = LLAMA | {
    "model_type": "gemma2",
    "num_hidden_layers": 4,
    "head_dim": 256,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
}
LLAMA4 = LLAMA | {
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "head_dim": 16,
    "attention_chunk_size": 8192,
    "no_rope_layers": [1, 1, 1, 0],
}
BART = {
    "model_type": "bart",
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 8,
    "dtype": "float32",
}


def only(config, **rest):
    """Return the requirements that all layers share."""
    found = set(requirements(config, **rest).values())
    assert len(found) == 1
    return found.pop()


def windows(config, **rest):
    return [layer.sliding_window for layer in requirements(config, **rest).values()]


def test_a_plain_decoder():
    found = requirements(LLAMA)

    assert list(found) == ["layers.0.self_attn", "layers.1.self_attn"]
    wanted = only(LLAMA)
    assert (wanted.head_size, wanted.num_q_heads, wanted.num_kv_heads, wanted.dtype) == (8, 8, 2, "bfloat16")
    assert (wanted.attn_type, wanted.causal, wanted.paged, wanted.sinks) == ("decoder", True, False, False)


def test_what_the_engine_decides_is_passed_on():
    wanted = only(LLAMA, dtype="float16", paged=True, block_size=16, kv_cache_dtype="fp8", cudagraph="uniform_batch")

    assert (wanted.dtype, wanted.paged, wanted.block_size) == ("float16", True, 16)
    assert (wanted.kv_cache_dtype, wanted.cudagraph) == ("fp8_e4m3", "uniform_batch")


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MISTRAL, [4096, 4096]),
        (MISTRAL | {"sliding_window": None}, [None, None]),
        (QWEN2, [None, 128]),
        (QWEN2 | {"use_sliding_window": False}, [None, None]),
        (QWEN2 | {"layer_types": ["sliding_attention", "full_attention"]}, [128, None]),
        (GEMMA2, [4096, None, 4096, None]),
        (LLAMA4, [None] * 4),
        (LLAMA | {"model_type": "phi3", "sliding_window": 2047}, [2047, 2047]),
        (MISTRAL | {"model_type": "qwen3_moe", "use_sliding_window": False}, [None, None]),
    ],
)
def test_windows_per_layer(config, expected):
    assert windows(config) == expected


def test_soft_cap_chunk_and_sinks():
    assert {layer.logits_soft_cap for layer in requirements(GEMMA2).values()} == {50.0}
    assert [layer.attention_chunk for layer in requirements(LLAMA4).values()] == [8192, 8192, 8192, None]
    assert only(MISTRAL | {"model_type": "gpt_oss", "head_dim": 64, "num_hidden_layers": 1}).sinks


def test_chunked_layers_of_old_files_follow_from_the_interval():
    old = {name: value for name, value in LLAMA4.items() if name != "no_rope_layers"}

    assert requirements(old) == requirements(LLAMA4)


def test_layers_without_rotary_positions_are_windowed():
    config = MISTRAL | {"model_type": "smollm3", "num_hidden_layers": 4, "sliding_window": 64}

    assert windows(config) == [None] * 4
    assert windows(config | {"use_sliding_window": True}) == [None, None, None, 64]


def test_encoders_have_no_cache_and_see_both_sides():
    bert = LLAMA | {"model_type": "bert"}
    modern = LLAMA | {"model_type": "modernbert", "local_attention": 128, "num_hidden_layers": 3}

    assert (only(bert, paged=True, block_size=16).attn_type, only(bert, paged=True).paged) == ("encoder_only", False)
    assert windows(modern) == [None, 65, 65]  # 64 to each side, and itself


def test_an_encoder_that_decodes_is_a_decoder():
    assert only(LLAMA | {"model_type": "bert", "is_decoder": True}).attn_type == "decoder"
    assert only(LLAMA | {"is_causal": False}).attn_type == "encoder_only"


def test_an_encoder_decoder_has_three_kinds_of_layers():
    found = requirements(BART, paged=True, block_size=16)

    assert {name: layer.attn_type for name, layer in found.items()} == {
        "encoder.layers.0.self_attn": "encoder",
        "decoder.layers.0.self_attn": "decoder",
        "decoder.layers.1.self_attn": "decoder",
        "decoder.layers.0.encoder_attn": "encoder_decoder",
        "decoder.layers.1.encoder_attn": "encoder_decoder",
    }
    assert found["encoder.layers.0.self_attn"].head_size == 16
    assert found["decoder.layers.1.encoder_attn"].head_size == 8
    assert [layer.block_size for layer in found.values()] == [None, 16, 16, 16, 16]
    late = requirements(BART, paged=True, late=("block_size",))
    assert [layer.late for layer in late.values()] == [(), *[("block_size",)] * 4]


def test_the_text_part_of_a_composite_model():
    config = {"model_type": "gemma3", "text_config": MISTRAL | {"dtype": None}, "torch_dtype": "float16"}

    assert only(config) == only(MISTRAL, dtype="float16")


def test_a_part_that_spells_null_is_not_one_that_leaves_out():
    part = MISTRAL | {"sliding_window": None}
    whole = {"model_type": "mistral3", "text_config": part}

    assert windows(whole) == [None, None]
    del part["sliding_window"]
    assert windows(whole) == [4096, 4096]  # the default of transformers


def test_layers_that_share_a_cache():
    config = GEMMA2 | {"model_type": "gemma3n_text", "num_kv_shared_layers": 1, "attn_logit_softcapping": None}

    assert [layer.kv_sharing for layer in requirements(config, paged=True).values()] == [False, False, False, True]
    assert not any(layer.kv_sharing for layer in requirements(config).values())


def test_heads_and_sizes_of_single_layers():
    config = MISTRAL | {
        "model_type": "gemma4_text",
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "per_layer_config": {"1": {"head_dim": 32, "num_key_value_heads": 1}},
    }

    assert [(r.head_size, r.num_kv_heads) for r in requirements(config).values()] == [(8, 2), (32, 1)]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"model_type": "made_up"}, "known model types are in"),
        (LLAMA | {"model_type": "deepseek_v32", "kv_lora_rank": 512}, "served in paged KV caches only"),
        (LLAMA | {"kv_lora_rank": 512}, "multi-head latent attention (MLA) is not known of this model type"),
        (LLAMA | {"model_type": "t5"}, "learned bias of relative position"),
        (LLAMA | {"model_type": "mamba"}, "recurrence over a state"),
        (LLAMA | {"model_type": "paligemma", "text_config": LLAMA}, "prefix attend to each other"),
        (LLAMA | {"model_type": "gemma2", "use_bidirectional_attention": True}, "attend to later ones"),
        (LLAMA | {"model_type": "bert", "position_embedding_type": "relative_key"}, "relative positions"),
        (LLAMA | {"model_type": "gpt2", "add_cross_attention": True}, "the encoder of its cross attention"),
        (LLAMA | {"index_topk": 2048}, "indexer chooses"),
        (LLAMA | {"sliding_window": 4096}, "without windowed layers"),
        (GEMMA2 | {"model_type": "gemma3_text"}, "ignores its attn_logit_softcapping"),
        (MISTRAL | {"is_causal": False}, "two meanings of its window"),
        (LLAMA | {"model_type": None}, "names no 'model_type'"),
        (LLAMA | {"num_attention_heads": None}, "names no 'num_attention_heads'"),
        (MISTRAL | {"model_type": "lfm2_moe", "head_dim": 8, "sliding_window": None}, "names no 'layer_types'"),
        (QWEN2 | {"layer_types": ["full_attention"]}, "lists 1 layer_types for 2 layers"),
        (LLAMA | {"num_key_value_heads": 3}, "multiple of num_kv_heads"),
        (3, "a 'int' was given"),
        ("/nonexistent/config.json", "does not open"),
    ],
)
def test_what_cannot_be_described_is_refused(config, message):
    with pytest.raises(RequirementsError, match=re.escape(message)):
        requirements(config)


@pytest.mark.parametrize(
    "name", ["num_key_value_heads", "num_attention_heads", "hidden_size", "num_hidden_layers", "head_dim"]
)
@pytest.mark.parametrize("value", [0, -1, "32", True, False, 2.5, [8]])
def test_a_field_that_is_no_whole_number_is_refused_by_name(name, value):
    with pytest.raises(RequirementsError, match=re.escape(f"{name}={value!r}")):
        requirements(LLAMA | {name: value})


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (MISTRAL, "sliding_window"),
        (LLAMA4, "attention_chunk_size"),
        (BART, "encoder_layers"),
        (BART, "decoder_attention_heads"),
        (LLAMA | {"model_type": "modernbert", "num_hidden_layers": 3}, "local_attention"),
        (LLAMA4 | {"no_rope_layers": None}, "no_rope_layer_interval"),
        (
            MISTRAL | {"model_type": "gemma3_text", "head_dim": 8, "attn_logit_softcapping": None},
            "sliding_window_pattern",
        ),
    ],
)
@pytest.mark.parametrize("value", [0, "6"])
def test_numbers_of_single_architectures_are_checked_too(config, name, value):
    with pytest.raises(RequirementsError, match=re.escape(f"{name}={value!r}")):
        requirements(config | {name: value})


def test_whole_numbers_may_be_written_as_floats_and_none_is_absent():
    assert requirements(LLAMA | {"num_key_value_heads": 2.0, "head_dim": None}) == requirements(LLAMA)
    assert only(LLAMA | {"num_key_value_heads": None}).num_kv_heads == 8
    assert windows(QWEN2 | {"max_window_layers": 0}) == [128, 128]


def test_heads_that_do_not_divide_the_hidden_size_are_refused():
    uneven = {"hidden_size": 66}
    with pytest.raises(RequirementsError, match="66 is no multiple of 8"):
        requirements(LLAMA | uneven)
    with pytest.raises(RequirementsError, match="4 is no multiple of 8"):
        requirements(MISTRAL | {"hidden_size": 4})
    with pytest.raises(RequirementsError, match="66 is no multiple of 4"):
        requirements(BART | {"d_model": 66})
    assert only(LLAMA | uneven | {"head_dim": 16}).head_size == 16
    assert only(MISTRAL | uneven).head_size == 8


def test_the_field_that_is_missing_is_the_architectures_own():
    sinks = MISTRAL | {"model_type": "gpt_oss", "head_dim": 64, "sliding_window": None}
    modern = LLAMA | {"model_type": "modernbert", "num_hidden_layers": 3, "local_attention": None}

    with pytest.raises(RequirementsError, match="names no 'sliding_window'"):
        requirements(sinks)
    with pytest.raises(RequirementsError, match="names no 'local_attention'"):
        requirements(modern)


@pytest.mark.parametrize(
    ("changes", "fixes"),
    [
        ({"model_type": "made_up"}, ("assume='llama'", "--assume llama")),
    ],
)
def test_fixes_are_for_python_and_for_the_command_line(changes, fixes):
    with pytest.raises(RequirementsError) as caught:
        requirements(LLAMA | changes)

    assert all(fix in caught.value.fix for fix in fixes)


def test_a_model_of_which_some_layers_are_attention():
    hybrid = LLAMA | {"model_type": "lfm2", "layer_types": ["conv", "full_attention"]}

    with pytest.raises(RequirementsError, match=r"1 of 2 layers are conv(?s:.)*partial=True"):
        requirements(hybrid)
    assert list(requirements(hybrid, partial=True)) == ["layers.1.self_attn"]
    with pytest.raises(RequirementsError, match="none of its layers"):
        requirements(hybrid | {"layer_types": ["conv", "conv"]}, partial=True)


def test_an_unknown_type_may_be_read_as_a_known_one():
    assert requirements(LLAMA | {"model_type": "made_up"}, assume="llama") == requirements(LLAMA)
    for config in (LLAMA, LLAMA | {"model_type": "made_up"}):
        with pytest.raises(RequirementsError, match=r"assume='neither' was given(?s:.)*leave assume out"):
            requirements(config, assume="neither")
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128}
    with pytest.raises(RequirementsError, match="latent"):
        requirements(LLAMA | latent, assume="llama")


def test_a_known_type_is_not_read_as_another():
    assert requirements(LLAMA, assume="llama") == requirements(LLAMA)
    with pytest.raises(
        RequirementsError, match=r"assume='mistral' was given(?s:.)*'llama' is known(?s:.)*leave assume"
    ):
        requirements(LLAMA, assume="mistral")


def test_json_files_and_folders(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MISTRAL))
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "broken.json").write_text("{")

    assert requirements_from_json(tmp_path) == requirements(MISTRAL)
    assert requirements_from_json(str(tmp_path / "config.json"), dtype="float16") == requirements(
        MISTRAL, dtype="float16"
    )
    with pytest.raises(RequirementsError, match="holds one object"):
        requirements_from_json(tmp_path / "list.json")
    with pytest.raises(RequirementsError, match="not JSON"):
        requirements_from_json(tmp_path / "broken.json")


def test_neither_transformers_nor_torch_is_imported(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GEMMA2))
    code = (
        "import sys; from attnplug.models import requirements_from_json;"
        f"print(len(requirements_from_json({str(tmp_path)!r})));"
        "print({'torch', 'transformers', 'numpy', 'cattrs'} & set(sys.modules))"
    )

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["4", "set()"]


def test_refused_types_are_not_described():
    assert not set(ARCHITECTURES) & set(REFUSED)


PHI_3_SMALL = {
    "model_type": "phi3small",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
    "max_position_embeddings": 8192,
    "blocksparse_block_size": 64,
    "blocksparse_num_local_blocks": 16,
    "blocksparse_vert_stride": 8,
    "blocksparse_homo_head_pattern": False,
    "dense_attention_every_n_layers": 2,
}
PATTERN = {"max_seqlen": 8192, "block_size": 64, "local_blocks": 16, "vert_stride": 8, "homo_head": False}


def test_every_second_layer_of_phi_3_small_is_block_sparse():
    found = requirements(PHI_3_SMALL, paged=True)

    assert [dict(one.block_sparse or {}) for one in found.values()] == [PATTERN, {}, PATTERN, {}]
    assert {(one.head_size, one.num_q_heads, one.num_kv_heads) for one in found.values()} == {(128, 32, 8)}


@pytest.mark.parametrize("period", [0, None])
def test_without_dense_layers_all_are_block_sparse(period):
    found = requirements(
        {**PHI_3_SMALL, "dense_attention_every_n_layers": period, "blocksparse_homo_head_pattern": True}
    )

    assert {one.block_sparse for one in found.values()} == {tuple(sorted({**PATTERN, "homo_head": True}.items()))}


@pytest.mark.parametrize("name", ["blocksparse_block_size", "blocksparse_num_local_blocks", "blocksparse_vert_stride"])
def test_a_pattern_is_never_guessed(name):
    with pytest.raises(RequirementsError, match=name):
        requirements({key: value for key, value in PHI_3_SMALL.items() if key != name})


@pytest.mark.parametrize("fields", [{"num_hidden_layers": 10**8}, {"model_type": "bart", "encoder_layers": 10**8}])
def test_more_layers_than_any_model_has_are_refused(fields):
    with pytest.raises(RequirementsError, match=r"has 100,000,000 layers(?s:.)*at most 10,000"):
        requirements({**BART, **LLAMA, **fields})
