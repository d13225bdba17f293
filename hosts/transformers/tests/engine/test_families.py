"""Every causal family of the table through the engine: its tokens are those of transformers' own `generate`."""

from __future__ import annotations

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from attnplug.errors import RequirementsError
from attnplug.models.architectures import ARCHITECTURES
from attnplug_transformers.engine import Engine
from hosts.transformers.tests.models import generate, sharpen
from hosts.transformers.tests.test_architectures import tiny

NEW = 10
PROMPTS = [[5, 9, 20, 33, 7, 101, 64, 3, 250, 18, 77], [12, 4, 199]]
RECURRENT = {
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "lfm2", "lfm2_moe", "granitemoehybrid", "olmo_hybrid"),
}
CAUSAL = sorted(
    name
    for name in set(ARCHITECTURES) & set(CONFIG_MAPPING)
    if ARCHITECTURES[name].family == "decoder"
    and CONFIG_MAPPING[name] in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    and name not in RECURRENT
)


def made_of(config, seed=0):
    """Return a small model that never ends a text, and whose tokens depend on their context."""
    config.eos_token_id = None
    torch.manual_seed(seed)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    made.generation_config.eos_token_id = None
    return sharpen(made, seed)


def expected_of(made):
    """Return the tokens that follow each prompt alone, and the smallest logit margin."""
    ids = [torch.tensor([prompt]) for prompt in PROMPTS]
    found = [generate(made, one, torch.ones_like(one), NEW) for one in ids]
    return [tokens[0].tolist() for tokens, _ in found], min(margin for _, margin in found)


def check_tokens(config, **how):
    """Compare the tokens of both prompts, in steps of several tokens of one and one of the other."""
    for seed in range(16):
        made = made_of(config, seed)
        expected, margin = expected_of(made)
        variety = len({token for tokens in expected for token in tokens})  # a model that repeats itself proves little
        if margin > 1e-3 and variety > 4:
            break
    assert margin > 1e-3
    assert variety > 4

    with Engine(made, max_num_tokens=7, max_num_reqs=4, block_size=4, **how) as engine:
        assert engine.generate(PROMPTS, max_new_tokens=NEW) == expected
    assert made.config._attn_implementation == "eager"
    assert expected_of(made)[0] == expected  # its own attention is back


@pytest.mark.parametrize("model_type", CAUSAL)
def test_tokens_are_those_of_generate(host, model_type):
    check_tokens(tiny(model_type), max_seq_len=32)


@pytest.mark.parametrize("model_type", sorted(RECURRENT))
def test_recurrent_layers_are_refused(host, model_type):
    with pytest.raises(RequirementsError, match="not attention over keys"):
        Engine(made_of(tiny(model_type)), max_seq_len=32)
