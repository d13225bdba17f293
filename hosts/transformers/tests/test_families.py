"""Every family of the table through the dense host: nothing that a caller requests is lost on the way."""

from __future__ import annotations

import inspect

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from attnplug.errors import NotNegotiatedError
from attnplug.models.architectures import ARCHITECTURES
from hosts.transformers.tests.models import made_from
from hosts.transformers.tests.test_architectures import tiny

# Models of these three cannot be made of a tiny configuration: it lacks experts, or sizes of an indexer.
FAMILIES = sorted(set(ARCHITECTURES) & set(CONFIG_MAPPING) - {"bailing_hybrid", "kimi_linear", "qwen4_exp_text"})
INDEXED = {"axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"}
"""Families whose indexers select tokens, which the dense function refuses."""

COMPOSITES = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
"""Whole configurations whose text part is a family too."""


def made_of(model_type):
    """Return a small model of a family, for tokens, pixels or sound."""
    config = tiny(COMPOSITES.get(model_type, model_type))
    decodes = ARCHITECTURES[model_type].family == "decoder" and type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    auto = transformers.AutoModelForCausalLM if decodes else transformers.AutoModel
    return made_from(config, auto).eval()


def inputs_of(made):
    """Return what the forward of a model takes."""
    taken = inspect.signature(made.forward).parameters
    ids = torch.arange(3, 9)[None]
    if "input_features" in taken:
        bins = getattr(made.config, "num_mel_bins", None) or made.config.input_feat_per_channel
        frames = 2 * made.config.max_source_positions if made.config.model_type == "whisper" else 40
        shape = (1, bins, frames) if made.config.model_type == "whisper" else (1, frames, bins)
        return {"input_features": torch.randn(shape), "decoder_input_ids": ids}
    if "input_ids" not in taken:
        return {"pixel_values": torch.randn(1, 3, made.config.image_size, made.config.image_size)}
    return {"input_ids": ids} | ({"decoder_input_ids": ids} if "decoder_input_ids" in taken else {})


def run(made, **rest):
    with torch.no_grad():
        return made(**inputs_of(made), **rest)


@pytest.mark.parametrize(
    "model_type",
    [name if place % 4 == 0 else pytest.param(name, marks=pytest.mark.slow) for place, name in enumerate(FAMILIES)],
)
def test_attention_weights_are_refused(host, model_type):
    made = made_of(model_type)
    made.set_attn_implementation("attnplug")
    if made.config._attn_implementation != "attnplug":
        found = run(made, output_attentions=True)  # its classes keep their own attention
        layers = made.config.num_hidden_layers
        assert len(found.decoder_attentions if "decoder_attentions" in found else found.attentions) == layers
        return

    if model_type in INDEXED:
        with pytest.raises(NotNegotiatedError, match="a choice of keys per query was not negotiated"):
            run(made)
        return

    with pytest.raises(NotNegotiatedError, match=r"(?s)output_attentions=True was given.*no backend returns"):
        run(made, output_attentions=True)

    run(made, output_attentions=False)


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "bert", "bart", "nemotron", "siglip_vision_model"])
def test_attention_weights_by_configuration_are_refused(host, model_type):
    made = made_of(model_type)
    made.config.output_attentions = True
    made.set_attn_implementation("attnplug")

    with pytest.raises(NotNegotiatedError, match="output_attentions=True was given"):
        run(made)
