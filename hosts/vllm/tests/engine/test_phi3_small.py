"""Phi-3-small in whole engines of vLLM, compared with plain torch."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here; `make test-hosts` runs these", allow_module_level=True)

from hosts.vllm.tests.engine import harness
from hosts.vllm.tests.phi3_small_reference import compare, prompts_of, write_checkpoint

pytestmark = [pytest.mark.needs_engine, pytest.mark.slow]

PACKAGE = Path(__file__).parents[1] / "plugins" / "masked_sparse"


@pytest.fixture
def plugin(tmp_path):
    """Return a folder for PYTHONPATH that has the masked plugin installed."""
    site = tmp_path / "site"
    metadata = site / "masked_sparse-0.1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "masked_sparse").symlink_to(PACKAGE / "masked_sparse")
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: masked-sparse\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[attnplug.backends]\nmasked_sparse = masked_sparse.plugin\n")
    return site


def run(server, folder, prompts, *path, max_tokens=12, **engine):
    """Run prompts through an engine; return what it has for them, or its log as "error"."""
    given = {"max_model_len": 128, "max_num_batched_tokens": 64} | engine
    found = server.run(folder, [{"prompts": prompts, "max_tokens": max_tokens}], path=path, **given)
    return {"error": found["log"]} if "error" in found else found


def candidates(found):
    """Return the name and the candidate of each layer."""
    return {name: candidate for name, (_, candidate) in found["layers"].items()}


@pytest.mark.feature("Phi-3-small, block-sparse")
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
def test_greedy_tokens_are_those_of_plain_torch(server, tmp_path, plugin, pattern, eager):
    config = write_checkpoint(tmp_path / "model", **pattern)
    prompts = prompts_of(5, 100, 1, 70, 17)  # some are prefilled in chunks

    found = run(server, tmp_path / "model", prompts, plugin, enforce_eager=eager)

    assert "error" not in found, found["error"]
    assert compare(config, tmp_path / "model", prompts, found["rounds"][0]) == (0, pytest.approx(0, abs=1e-4))
    assert found["mode"] == (0 if eager else 2)
    dense = {name for name, candidate in candidates(found).items() if candidate == "torch/sdpa"}
    assert dense == {"model.layers.1.self_attn.attn"}
    assert set(candidates(found).values()) == {"torch/sdpa", "masked_sparse/plain"}


@pytest.mark.feature("Phi-3-small, block-sparse")
@pytest.mark.parametrize("kv_heads", [2, 1], ids=["one group per rank", "a replicated KV head"])
def test_ranks_have_their_heads_of_the_pattern(server, tmp_path, plugin, kv_heads):
    config = write_checkpoint(tmp_path / "model", num_key_value_heads=kv_heads)
    prompts = prompts_of(100, 3)

    found = run(server, tmp_path / "model", prompts, plugin, tensor_parallel_size=2)

    assert "error" not in found, found["error"]
    assert compare(config, tmp_path / "model", prompts, found["rounds"][0]) == (0, pytest.approx(0, abs=1e-4))


def test_a_backend_of_vllm_is_refused_by_name(server, tmp_path, plugin):
    write_checkpoint(tmp_path / "model")

    found = run(server, tmp_path / "model", prompts_of(3), plugin, attention_backend="CPU_ATTN")

    assert "the attention backend CPU_ATTN was chosen for Phi-3-small" in found["error"]
    assert "leave --attention-backend out, or choose one of attnplug" in found["error"]


def test_without_a_block_sparse_backend_the_reasons_are_shown(server, tmp_path):
    write_checkpoint(tmp_path / "model")

    found = run(server, tmp_path / "model", prompts_of(3))

    assert "block_sparse" in found["error"]
    assert "blocksparse/triton" in found["error"]


def test_dense_layers_alone_run_on_any_backend(server, tmp_path):
    changes = {"dense_attention_every_n_layers": 1, "tie_word_embeddings": True, "rope_position_scale": 2.0}
    config = write_checkpoint(tmp_path / "model", **changes, mup_use_scaling=False, dummy_token_indices=[])
    prompts = prompts_of(5, 90, 1)

    found = run(server, tmp_path / "model", prompts, attention_backend="CPU_ATTN")

    assert "error" not in found, found["error"]
    assert compare(config, tmp_path / "model", prompts, found["rounds"][0]) == (0, pytest.approx(0, abs=1e-4))


@pytest.fixture
def interpreting(monkeypatch):
    """The process of engines, in which Triton interprets its kernels: it reads that at its import."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    server = harness.EngineServer()
    yield server
    server.close()


@pytest.mark.feature("Phi-3-small, block-sparse")
@pytest.mark.long
def test_the_plugin_blocksparse_in_the_interpreter(interpreting, tmp_path):
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "torch_dtype": "float16"}
    config = write_checkpoint(tmp_path / "model", **shape)
    prompts = prompts_of(40, 3)

    found = run(
        interpreting,
        tmp_path / "model",
        prompts,
        max_tokens=4,
        dtype="float16",
        plugin="blocksparse",
    )

    assert "error" not in found, found["error"]
    assert set(candidates(found).values()) == {"torch/sdpa", "blocksparse/triton"}
    assert compare(config, tmp_path / "model", prompts, found["rounds"][0]) == (0, pytest.approx(0, abs=0.05))
