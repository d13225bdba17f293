"""Phi-3-small in vLLM: its activation, its patterns, its weights, and what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from attnplug.errors import RequirementsError
from hosts.vllm.tests.phi3_small_reference import TINY


@pytest.fixture
def model():
    """Return the module of the model."""
    pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-hosts` runs these")
    from attnplug_vllm import phi3_small  # noqa: PLC0415 - it imports vLLM

    return phi3_small


@pytest.mark.parametrize("limit", [None, 2.0])
def test_the_activation(model, limit):
    gate = torch.tensor([-5.0, 0.5, 3.0, torch.inf])
    linear = torch.tensor([-9.0, 0.25, 9.0, torch.inf])
    limited = gate if limit is None else torch.tensor([-5.0, 0.5, 2.0, torch.inf])
    straight = linear if limit is None else torch.tensor([-2.0, 0.25, 2.0, torch.inf])
    expected = limited / (1 + (-1.702 * limited).exp()) * (1 + straight)
    torch.testing.assert_close(model.gegelu(gate, linear, limit), expected)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {"rope_type": "default"}),
        ({"rope_position_scale": 2.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope_scaling": {"type": "su", "short_factor": [1.0]}}, {"rope_type": "longrope", "short_factor": [1.0]}),
        (
            {"rope_parameters": {"rope_type": "longrope", "long_factor": [2.0], "rope_theta": 1.0}},
            {"rope_type": "longrope", "long_factor": [2.0]},
        ),
    ],
    ids=["plain", "scaled", "a 128K checkpoint", "as transformers 5 has it"],
)
def test_rotary_parameters(model, fields, expected):
    config = SimpleNamespace(rope_embedding_base=1e6, **fields)
    assert model.rope_parameters(config) == {**expected, "rope_theta": 1e6}


def test_patterns_of_layers(model):
    from attnplug_vllm.phi3_small_config import Phi3SmallConfig  # noqa: PLC0415 - it imports transformers

    found = model.patterns(Phi3SmallConfig(num_hidden_layers=4))
    pattern = {"max_seqlen": 8192, "block_size": 64, "local_blocks": 16, "vert_stride": 8, "homo_head": False}
    assert found == [pattern, None, pattern, None]
    assert model.patterns(Phi3SmallConfig(num_hidden_layers=2, dense_attention_every_n_layers=None)) == [pattern] * 2


@pytest.mark.parametrize(
    "name", ["model.layers.0.mlp.up_proj.qweight", "model.layers.0.self_attn.query_key_value.g_idx"]
)
def test_a_packed_checkpoint_is_refused(model, name):
    with pytest.raises(RequirementsError, match="load an unquantized checkpoint"):
        list(model.split_fused(name, torch.zeros(4), SimpleNamespace()))


def test_a_tensor_without_a_parameter_is_refused(model):
    with pytest.raises(RequirementsError, match="no such parameter"):
        model.Phi3SmallForCausalLM.load_weights(
            SimpleNamespace(
                named_parameters=dict, config=SimpleNamespace(tie_word_embeddings=False), named_modules=list
            ),
            [("model.layers.0.adapter.weight", torch.zeros(1))],
        )


def test_another_activation_is_refused(model):
    with pytest.raises(RequirementsError, match="hidden_act='silu'"):
        model.Phi3SmallMLP(SimpleNamespace(hidden_act="silu"), None, "mlp")


@pytest.fixture
def configs():
    """Return the module of the configuration, and leave transformers' table as it was."""
    transformers = pytest.importorskip("transformers")
    from attnplug_vllm import phi3_small_config  # noqa: PLC0415 - it imports transformers

    yield phi3_small_config
    transformers.CONFIG_MAPPING._extra_content.pop("phi3small", None)


@pytest.mark.needs_vllm
def test_a_checkpoint_needs_no_code_of_its_own(configs, tmp_path):
    from vllm.model_executor.models.registry import ModelRegistry  # noqa: PLC0415 - not everywhere
    from vllm.transformers_utils.config import get_config  # noqa: PLC0415 - likewise

    configs.register_model()
    configs.register_model()  # as a second engine of the process does
    scaling = {"type": "su", "short_factor": [1.0] * 32, "long_factor": [2.0] * 32, "short_mscale": 1.0}
    more = {"rope_scaling": scaling, "original_max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(TINY | more))

    found = get_config(tmp_path, trust_remote_code=False)

    assert type(found) is configs.Phi3SmallConfig
    assert "Phi3SmallForCausalLM" in ModelRegistry.get_supported_archs()
    assert found.dummy_token_indices == [0, 7]
    assert found.intermediate_size == 192
    assert found.rope_parameters["rope_type"] == "longrope"
    assert found.rope_parameters["original_max_position_embeddings"] == 128


def test_embeddings_are_tied_where_the_configuration_does_not_say(configs):
    assert configs.Phi3SmallConfig().tie_word_embeddings is True
    assert configs.Phi3SmallConfig(tie_word_embeddings=False).tie_word_embeddings is False


def test_the_width_of_a_configuration_without_one(configs):
    assert configs.Phi3SmallConfig().intermediate_size == 14336
    assert configs.Phi3SmallConfig(ff_intermediate_size=None, ff_dim_multiplier=4).intermediate_size == 11008
    plain = configs.Phi3SmallConfig(ff_intermediate_size=None, ff_dim_multiplier=4, gegelu_pad_to_256=False)
    assert plain.intermediate_size == 10920
