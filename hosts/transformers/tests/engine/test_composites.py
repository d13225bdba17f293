"""Multimodal models run as language models, whose configuration is a part of the model's."""

from __future__ import annotations

import pytest
import torch
import transformers

import attnplug_transformers as host_module
from attnplug_transformers.engine import Engine
from hosts.transformers.tests.models import SIZES, generate, sharpen
from hosts.transformers.tests.test_architectures import tiny

TEXT = {name: value for name, value in SIZES.items() if name != "head_dim"}
ROTARY = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}
SEEING = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16}
CONFIGS = {
    "mistral3": lambda: transformers.Mistral3Config(
        text_config={**SIZES, "model_type": "mistral", "sliding_window": None},
        vision_config={
            "model_type": "pixtral",
            **{name: SEEING[name] for name in ("hidden_size", "intermediate_size")},
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "image_size": 16,
            "patch_size": 8,
        },
    ),
    "mistral4": lambda: transformers.Mistral3Config(
        text_config=tiny("mistral4").to_dict() | {"eos_token_id": None},
        vision_config=CONFIGS["mistral3"]().vision_config.to_dict(),
    ),
    "qwen2_vl": lambda: transformers.Qwen2VLConfig(
        text_config=TEXT | ROTARY, vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}
    ),
    "qwen2_5_vl": lambda: transformers.Qwen2_5_VLConfig(
        text_config=TEXT | ROTARY, vision_config=SEEING | {"out_hidden_size": 32}
    ),
    "qwen3_vl": lambda: transformers.Qwen3VLConfig(
        text_config=SIZES | ROTARY,
        vision_config=SEEING | {"out_hidden_size": 32, "deepstack_visual_indexes": [0]},
    ),
}
PROMPTS = [list(range(3, 14)), [5, 9, 20]]


@pytest.mark.parametrize("name", CONFIGS)
def test_their_text_continues_as_in_transformers(host, name):
    torch.manual_seed(0)
    made = sharpen(
        transformers.AutoModelForImageTextToText.from_config(
            CONFIGS[name](), attn_implementation="eager", dtype=torch.float32
        )
    )
    ids = [torch.tensor([prompt]) for prompt in PROMPTS]
    expected = [generate(made, one, torch.ones_like(one), 8)[0][0].tolist() for one in ids]

    with Engine(made) as engine:
        assert engine.generate(PROMPTS, max_new_tokens=8) == expected
        assert set(engine.selections) == {f"model.language_model.layers.{index}.self_attn" for index in range(4)}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_window_of_null_is_none(name):
    found = host_module.requirements(CONFIGS[name](), dtype="float32")

    assert {each.sliding_window for each in found.values()} == {None}


def test_each_part_gets_its_own_attention_back(host):
    """Not that of the whole model, and after the last of several engines."""
    made = transformers.AutoModelForImageTextToText.from_config(CONFIGS["qwen2_5_vl"](), dtype=torch.float32).eval()
    made.set_attn_implementation({"": "sdpa", "vision_config": "sdpa", "text_config": "eager"})
    configs = (made.config, made.config.vision_config, made.config.text_config)
    before = [config._attn_implementation for config in configs]
    assert before == ["sdpa", "sdpa", "eager"]

    first = Engine(made)
    second = Engine(made)
    second.close()
    assert {config._attn_implementation for config in configs} == {"attnplug_engine"}
    first.close()

    assert [config._attn_implementation for config in configs] == before
