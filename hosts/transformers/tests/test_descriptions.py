"""Descriptions of models compared with the library's own modules, built without weights: shapes, scales, windows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from attnplug.models import describe_model
from attnplug.models.architectures import ARCHITECTURES, BIASED, TEXT_TYPES
from attnplug.models.fields import LIBRARY, Fields, read_fields
from attnplug.models.known_fields import unknown
from attnplug.models.layers import read_text_part
from hosts.transformers.tests.models import made_from
from tools.model_defaults import READ, stale

HEAD_SIZES = ("qk_head_dim", "head_dim", "attention_head_size", "head_size", "attention_head_dim", "key_value_proj_dim")
SCALES = ("scaling", "scale", "inv_norm_factor", "softmax_scale")
OUTPUTS = ("o_proj", "out_proj", "o", "dense")
QUERIES = ("q_proj", "query", "q_lin", "q")
KEYS = ("k_proj", "key", "k_lin", "k")


ROOT = Path(__file__).parents[3]
MORE = {
    "bamba": {"attn_layer_indices": [1, 3], "num_hidden_layers": 4},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"kv_n_heads": 8, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    },
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_hidden_layers": 2},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128, "moe_topk": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "ministral": {"head_dim": 128},
    "nemotron_h": {"hybrid_override_pattern": "M*-E", "num_hidden_layers": 4},
    "nemotron": {"num_key_value_heads": 8},
}
"""Fields without which the library's classes build no model, or one without attention."""
LISTED = {"lfm2_moe", "ultrabert", "zamba2"}
"""Types whose files have always listed the kinds of their layers."""


def built(config):
    """Return the library's model of a configuration, on the meta device."""
    with torch.device("meta"):
        return made_from(config)


def first(module, names):
    return next((getattr(module, name) for name in names if getattr(module, name, None) is not None), None)


def shape_of(module, wanted):
    """Return the query and KV heads by the projections' sizes; a gate may be part of the projection of queries."""
    query, key, output = (first(module, names) for names in (QUERIES, KEYS, OUTPUTS))
    if not isinstance(query, nn.Linear) or not isinstance(key, nn.Linear):
        return None
    keys = key.out_features // wanted.head_size
    if isinstance(output, nn.Linear):
        return output.in_features // wanted.head_size_v, keys
    return query.out_features // wanted.head_size, keys


def module_of(by_name, layer):
    """Return the module that a layer's name ends with; of several, that with its number."""
    found = [module for name, module in by_name.items() if f".{name}".endswith(f".{layer.name}")]
    numbered = [module for module in found if getattr(module, "layer_idx", None) == layer.index]
    (module,) = numbered if len(found) > 1 else found
    return module


def compare_heads(same, module, wanted):
    size = first(module, HEAD_SIZES)
    same("head size", wanted.head_size, size if isinstance(size, int) else None)
    if not getattr(module, "is_kv_shared_layer", False):
        same("heads", (wanted.num_q_heads, wanted.num_kv_heads), shape_of(module, wanted))
    same("query heads", wanted.num_q_heads, getattr(module, "n_head", None))
    same("size of values", wanted.head_size_v, getattr(module, "v_head_dim", None))
    groups = getattr(module, "num_key_value_groups", None)
    same("group", wanted.gqa_ratio, groups if isinstance(groups, int) else None)


def compare(config, description):
    """Compare every described layer with its module; return the names of what was compared."""
    by_name = dict(built(config).named_modules())
    compared = set()

    def same(what, own, theirs):
        if theirs is not None:
            assert own == theirs, (layer.name, what)
            compared.add(what)

    for layer in description.layers:
        module, wanted = module_of(by_name, layer), layer.uncompressed or layer.requirements
        scale = first(module, SCALES)
        if wanted.topk is None:
            compare_heads(same, module, wanted)
        else:  # absorbed, and no request for the heads of the module
            same("indexer", layer.indexer == layer.name, module.indexer is not None)
            same("topk", wanted.topk, getattr(module.indexer, "index_topk", None))
        if layer.requirements.latent:  # as the module caches them, and the part of them that is normalized
            cached, latent = module.kv_a_proj_with_mqa.out_features, module.kv_b_proj.in_features
            same("latents", (layer.requirements.head_size, layer.requirements.head_size_v), (cached, latent))
        same("scale", layer.scale, pytest.approx(scale) if isinstance(scale, float) else None)
        window = getattr(module, "sliding_window", None) if getattr(module, "is_sliding", True) else None
        same("window", wanted.sliding_window, (window or None) if wanted.causal else None)
        same("soft cap", wanted.logits_soft_cap, getattr(module, "attn_logit_softcapping", None))
        assert wanted.sinks == (first(module, ("sinks", "sink")) is not None)
    return compared


INDEXED = {"qwen4_exp_text"}
"""Types whose attention layers have an indexer and no latents, and are named instead of described."""
KNOWN = (set(ARCHITECTURES) | set(BIASED)) & set(CONFIG_MAPPING)
TYPES = sorted(KNOWN - INDEXED)
LATENT = sorted(name for name in TYPES if name in ARCHITECTURES and ARCHITECTURES[name].latent)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_default_configuration_is_that_of_its_modules(model_type):
    config = CONFIG_MAPPING[model_type](**MORE.get(model_type, {}))
    description = describe_model(config, dtype="float32")

    assert description.layers
    assert not description.unserved
    assert compare(config, description) & {"head size", "heads", "query heads", "group", "scale"}


YARN = {"factor": 40.0, "mscale": 0.7, "mscale_all_dim": 0.7, "original_max_position_embeddings": 64}


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")  # Kimi-Linear has no rotary positions
@pytest.mark.parametrize("named", [{"type": "yarn"}, {"rope_type": "yarn"}])
@pytest.mark.parametrize("changes", [{}, {"mscale_all_dim": 0}, {"factor": 1.0}, {"mscale": 1.0}])
@pytest.mark.parametrize("model_type", LATENT)
def test_yarn_scales_the_scores_as_in_the_modules(model_type, named, changes):
    rope = YARN | named | changes
    layers = "num_layers" if model_type == "longcat_flash" else "num_hidden_layers"
    file = {"model_type": model_type, "rope_scaling": rope, layers: 6, **MORE.get(model_type, {})}
    fields = {name: value for name, value in json.loads(json.dumps(file)).items() if name != "model_type"}
    config = CONFIG_MAPPING[model_type](**fields)

    found = describe_model(file, dtype="float32")

    assert found.layers == describe_model(config, dtype="float32").layers
    assert {"latents", "scale"} <= compare(config, found)


@pytest.mark.parametrize("model_type", sorted(set(TYPES) - LISTED))
def test_a_file_that_leaves_everything_out_has_the_librarys_defaults(model_type):
    cls = CONFIG_MAPPING[model_type]
    fields = MORE.get(model_type, {})

    left_out = describe_model({"model_type": model_type, **fields}, dtype="float32")
    config = cls(**fields)

    assert left_out.layers == describe_model(config, dtype="float32").layers


@pytest.mark.parametrize("model_type", sorted(set(TYPES) - LISTED))
def test_layer_types_are_derived_as_the_library_derives_them(model_type):
    fields = MORE.get(model_type, {})
    config = CONFIG_MAPPING[model_type](**fields)
    derived = ("layer_types", "layers_block_type", "per_layer_config", "no_rope_layers")
    old = {name: value for name, value in config.to_dict().items() if name not in derived} | fields

    assert describe_model(old, dtype="float32").layers == describe_model(config, dtype="float32").layers


SHARED = [
    {"index_topk_freq": 4},
    {"index_topk_freq": 3, "index_skip_topk_offset": 5},
    {"index_topk_pattern": "FSSFFSFS"},
]


@pytest.mark.parametrize("more", SHARED)
def test_layers_share_indexers_as_in_the_library(more):
    config = CONFIG_MAPPING["glm_moe_dsa"](num_hidden_layers=8, **more)

    described = describe_model({"model_type": "glm_moe_dsa", "num_hidden_layers": 8, **more}, dtype="float32")

    assert described.layers == describe_model(config, dtype="float32").layers
    assert compare(config, described) >= {"indexer", "topk"}


@pytest.mark.parametrize("model_type", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))
def test_every_causal_type_of_the_library_is_described_or_refused_by_name(model_type):
    config = CONFIG_MAPPING[model_type](**MORE.get(model_type, {}))

    found = describe_model(config, dtype="bfloat16")

    assert found.layers or found.others
    if model_type not in LISTED:
        left_out = describe_model({"model_type": model_type, **MORE.get(model_type, {})}, dtype="bfloat16")
        assert left_out.layers or left_out.others


@pytest.mark.parametrize("model_type", sorted(KNOWN))
def test_every_field_of_a_class_is_known_to_decide_or_to_be_harmless(model_type):
    names = CONFIG_MAPPING[model_type](**MORE.get(model_type, {})).to_dict()

    assert not list(unknown(Fields(dict.fromkeys(names, True), model_type)))


def test_every_field_with_a_default_is_known():
    assert not list(unknown(Fields(dict.fromkeys(READ, True), "read")))


@pytest.mark.parametrize("model_type", sorted(set(TEXT_TYPES) & set(CONFIG_MAPPING)))
def test_text_without_a_part_of_its_own_is_of_the_librarys_type(model_type):
    assert read_text_part(read_fields(CONFIG_MAPPING[model_type]())).model_type == TEXT_TYPES[model_type]


def test_a_published_file_and_the_object_made_of_it_are_described_alike():
    text = {"model_type": "exaone4_5_text", "num_hidden_layers": 8, "hidden_size": 512, "num_attention_heads": 8}
    text |= {"num_key_value_heads": 2, "sliding_window": 4096, "sliding_window_pattern": 4, "head_dim": 64}
    file = {"model_type": "exaone4_5", "text_config": text, "dtype": "bfloat16"}

    found = describe_model(file)

    assert found.layers == describe_model(CONFIG_MAPPING["exaone4_5"](**json.loads(json.dumps(file)))).layers
    assert [layer.requirements.sliding_window for layer in found.layers] == [4096, 4096, 4096, None] * 2


def test_the_table_of_defaults_is_the_librarys():
    assert "transformers " + ".".join(transformers.__version__.split(".")[:2]) == LIBRARY
    assert not stale(), "run `python -m tools.model_defaults --write`"


def text_of(fixture):
    """Return the fields of a fixture's text part."""
    return fixture["config"].get("text_config") or fixture["config"]


FIXTURES = json.loads((ROOT / "core/tests/models/configurations.json").read_text("utf-8"))
MADE = [fixture for fixture in FIXTURES if "made" in fixture]
PUBLISHED = [
    fixture
    for fixture in FIXTURES
    if "made" not in fixture and text_of(fixture)["model_type"] in TYPES and describe_model(fixture["config"]).layers
]


@pytest.mark.parametrize("fixture", MADE, ids=[fixture["name"] for fixture in MADE])
def test_a_fixture_that_was_made_by_a_class_has_its_values(fixture):
    config = CONFIG_MAPPING[fixture["made"]["model_type"]](**fixture["made"]["fields"])
    written = json.loads(config.to_json_string())

    def check(stored, given):
        for name, value in stored.items():
            check(value, given[name]) if isinstance(value, dict) else same(name, value, given[name])

    def same(name, stored, given):
        assert stored == given, name

    check(fixture["config"], written)


@pytest.mark.parametrize("fixture", PUBLISHED, ids=[fixture["name"] for fixture in PUBLISHED])
def test_a_published_configuration_is_that_of_its_modules(fixture):
    text = text_of(fixture)
    model_type = text["model_type"]
    fields = {name: value for name, value in text.items() if name not in ("model_type", "quantization_config")}
    if model_type.endswith("_moe"):
        fields["num_experts"] = 4  # published ones have 128, which are no attention
    config = CONFIG_MAPPING[model_type](**fields)

    description = describe_model(fixture["config"])

    assert compare(config, description) & {"head size", "heads", "group", "scale"}
