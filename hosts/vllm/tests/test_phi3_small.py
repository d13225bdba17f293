"""Phi-3-small in vLLM: whole engines against plain torch, its weights, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from attnplug.errors import RequirementsError
from hosts.vllm.tests.phi3_small_reference import TINY, logits_of, write_checkpoint

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ENGINE = {"dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64, "block_size": 32}
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@pytest.fixture
def plugin(tmp_path):
    """Return a folder for PYTHONPATH that has the masked plugin installed."""
    package, site = HERE / "plugins" / "masked_sparse", tmp_path / "site"
    metadata = site / "masked_sparse-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "masked_sparse").symlink_to(package / "masked_sparse")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: masked-sparse\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[attnplug.backends]\nmasked_sparse = masked_sparse.plugin\n")
    return site


def run_engine(folder, prompts, *sites, max_tokens=12, interpreted=False, environment=None, **engine):
    """Run prompts through an engine in a process, and return what it printed."""
    given = {"engine": {"model": str(folder)} | ENGINE | engine, "prompts": prompts, "max_tokens": max_tokens}
    path = [*map(str, sites), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(HERE / "phi3_small_engine.py"), json.dumps(given | {"interpreted": interpreted})],
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(path)} | (environment or {}),
        capture_output=True,
        text=True,
        check=False,
    )
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"error": done.stdout + done.stderr}


def prompts_of(*lengths, seed=5):
    source = torch.Generator().manual_seed(seed)
    return [torch.randint(8, TINY["vocab_size"], (length,), generator=source).tolist() for length in lengths]


def compare(config, folder, prompts, found):
    """Return how many greedy tokens differ from the reference, and the largest difference of a logprob."""
    from safetensors.torch import load_file  # noqa: PLC0415 - beside vLLM

    weights, differing, worst = load_file(folder / "model.safetensors"), 0, 0.0
    for prompt, tokens, logprobs in zip(prompts, found["tokens"], found["logprobs"], strict=True):
        expected = logits_of(config, weights, prompt + tokens)[len(prompt) - 1 : -1].log_softmax(-1)
        differing += int((expected.argmax(-1) != torch.tensor(tokens)).sum())
        chosen = expected[range(len(tokens)), tokens]
        worst = max(worst, float((chosen - torch.tensor(logprobs)).abs().max()))
    return differing, worst


@pytest.mark.feature("Phi-3-small, block-sparse")
@pytest.mark.needs_engine
@pytest.mark.slow
@pytest.mark.parametrize(
    "eager",
    # The CPU platform makes mode 2 of mode 3.
    [
        pytest.param(True, id="eager"),
        pytest.param(False, id="compiled", marks=pytest.mark.feature("torch.compile, mode 2")),
    ],
)
@pytest.mark.parametrize(
    "pattern",
    [{}, {"blocksparse_homo_head_pattern": True, "blocksparse_num_local_blocks": 2}],
    ids=["a pattern per head", "one pattern"],
)
def test_greedy_tokens_are_those_of_plain_torch(tmp_path, plugin, pattern, eager):
    config = write_checkpoint(tmp_path / "model", **pattern)
    prompts = prompts_of(5, 100, 1, 70, 17)  # some are prefilled in chunks

    found = run_engine(tmp_path / "model", prompts, plugin, enforce_eager=eager)

    assert "error" not in found, found["error"]
    assert compare(config, tmp_path / "model", prompts, found) == (0, pytest.approx(0, abs=1e-4))
    assert found["mode"] == (0 if eager else 2)
    dense = {name for name, backend in found["backends"].items() if backend == "torch/sdpa"}
    assert dense == {"model.layers.1.self_attn.attn"}
    assert set(found["backends"].values()) == {"torch/sdpa", "masked_sparse/plain"}


@pytest.mark.feature("Phi-3-small, block-sparse")
@pytest.mark.needs_engine
@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [2, 1], ids=["one group per rank", "a replicated KV head"])
def test_ranks_have_their_heads_of_the_pattern(tmp_path, plugin, kv_heads):
    config = write_checkpoint(tmp_path / "model", num_key_value_heads=kv_heads)
    prompts = prompts_of(100, 3)

    found = run_engine(tmp_path / "model", prompts, plugin, tensor_parallel_size=2)

    assert "error" not in found, found["error"]
    assert compare(config, tmp_path / "model", prompts, found) == (0, pytest.approx(0, abs=1e-4))


@pytest.mark.needs_engine
@pytest.mark.slow
def test_a_backend_of_vllm_is_refused_by_name(tmp_path, plugin):
    write_checkpoint(tmp_path / "model")

    found = run_engine(tmp_path / "model", prompts_of(3), plugin, attention_backend="CPU_ATTN")

    assert "the attention backend CPU_ATTN was chosen for Phi-3-small" in found["error"]
    assert "leave --attention-backend out, or choose one of attnplug" in found["error"]


@pytest.mark.needs_engine
@pytest.mark.slow
def test_without_a_block_sparse_backend_the_reasons_are_shown(tmp_path):
    write_checkpoint(tmp_path / "model")

    found = run_engine(tmp_path / "model", prompts_of(3))

    assert "block_sparse" in found["error"]
    assert "blocksparse/triton" in found["error"]


@pytest.mark.needs_engine
@pytest.mark.slow
def test_dense_layers_alone_run_on_any_backend(tmp_path):
    changes = {"dense_attention_every_n_layers": 1, "tie_word_embeddings": True, "rope_position_scale": 2.0}
    config = write_checkpoint(tmp_path / "model", **changes, mup_use_scaling=False, dummy_token_indices=[])
    prompts = prompts_of(5, 90, 1)

    found = run_engine(tmp_path / "model", prompts, attention_backend="CPU_ATTN")

    assert "error" not in found, found["error"]
    assert compare(config, tmp_path / "model", prompts, found) == (0, pytest.approx(0, abs=1e-4))


@pytest.mark.feature("Phi-3-small, block-sparse")
@pytest.mark.needs_engine
@pytest.mark.slow
@pytest.mark.long
def test_the_plugin_blocksparse_in_the_interpreter(tmp_path):
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "torch_dtype": "float16"}
    config = write_checkpoint(tmp_path / "model", **shape)
    prompts = prompts_of(40, 3)

    environment = {"TRITON_INTERPRET": "1"}
    found = run_engine(
        tmp_path / "model", prompts, max_tokens=4, interpreted=True, environment=environment, dtype="float16"
    )

    assert "error" not in found, found["error"]
    assert set(found["backends"].values()) == {"torch/sdpa", "blocksparse/triton"}
    assert compare(config, tmp_path / "model", prompts, found) == (0, pytest.approx(0, abs=0.05))


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


def test_the_width_of_a_configuration_without_one(configs):
    assert configs.Phi3SmallConfig().intermediate_size == 14336
    assert configs.Phi3SmallConfig(ff_intermediate_size=None, ff_dim_multiplier=4).intermediate_size == 11008
    plain = configs.Phi3SmallConfig(ff_intermediate_size=None, ff_dim_multiplier=4, gegelu_pad_to_256=False)
    assert plain.intermediate_size == 10920
