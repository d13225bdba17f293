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


@pytest.mark.needs_engine
@pytest.mark.slow
@pytest.mark.parametrize("pattern", [{}, {"blocksparse_homo_head_pattern": True, "blocksparse_num_local_blocks": 2}])
def test_greedy_tokens_are_those_of_plain_torch(tmp_path, plugin, pattern):
    config = write_checkpoint(tmp_path / "model", **pattern)
    prompts = prompts_of(5, 100, 1, 70, 17)  # some are prefilled in chunks

    found = run_engine(tmp_path / "model", prompts, plugin)

    assert "error" not in found, found["error"]
    assert compare(config, tmp_path / "model", prompts, found) == (0, pytest.approx(0, abs=1e-4))
    dense = {name for name, backend in found["backends"].items() if backend == "torch/sdpa"}
    assert dense == {"model.layers.1.self_attn.attn"}
    assert set(found["backends"].values()) == {"torch/sdpa", "masked_sparse/plain"}


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
