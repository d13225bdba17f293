"""
Whole engines of vLLM on a GPU, in bfloat16: logprobs are as near to float32 as those of vLLM's own backend.

Each model runs on vLLM's FlashAttention once, eagerly, and its error is the measure of the others.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed here", allow_module_level=True)

from hosts.vllm.tests.engine import harness, models

pytestmark = pytest.mark.gpu

MODES = {
    "eager": {"enforce_eager": True},
    "graphs": {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "compiled": {"enforce_eager": False, "compilation_config": {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"}},
}
CAPTURES = {"cudagraph_capture_sizes": [1, 2, 4, 8]}
CASES = (
    ("flash_attn/fa3_vllm", "llama", "eager", {}),
    ("flash_attn/fa3_vllm", "llama", "graphs", {}),
    ("flash_attn/fa3_vllm", "llama", "compiled", {}),
    ("flash_attn/fa3_vllm", "llama", "graphs", {"VLLM_USE_V2_MODEL_RUNNER": "1"}),
    ("flash_attn/fa3_vllm", "mistral", "compiled", {}),
    ("flash_attn/fa3_vllm", "gemma2", "graphs", {}),
    ("flash_attn/torch", "llama", "eager", {}),
    ("torch/sdpa", "llama", "graphs", {}),
    ("torch/sdpa", "gemma2", "eager", {}),
    ("flashinfer/fa2", "llama", "graphs", {}),
    ("flashinfer/fa3", "llama", "compiled", {}),
    ("flash_attn/fa4", "llama", "graphs", {}),
)
PROMPTS = harness.prompts(5, 40, 1, 77, 17, 110, 1, 64)
TOKENS = 24


@pytest.fixture(scope="module")
def server():
    """The process that runs the engines."""
    server = harness.EngineServer()
    yield server
    server.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a function that returns the folder of a model."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            models.save(name, made[name])
        return made[name]

    return get


@pytest.fixture(scope="module")
def own_error(server, folder):
    """Return a function that returns the mean error of vLLM's own attention for a model."""
    found = {}

    def get(name):
        if name not in found:
            outputs = run(server, folder(name), "FLASH_ATTN", "eager", {"VLLM_PLUGINS": ""})
            found[name] = float(errors(folder(name), outputs).mean())
        return found[name]

    return get


def run(server, folder, backend, mode, environment):
    """Run the prompts twice: the second time their prefixes are cached."""
    engine = MODES[mode] | {"dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 29, "gpu_memory_utilization": 0.1}
    if "compilation_config" in engine:
        engine["compilation_config"] = engine["compilation_config"] | CAPTURES
    rounds = [{"prompts": PROMPTS, "max_tokens": TOKENS}] * 2
    result = server.run(folder, rounds, environment=environment, attention_backend=backend, max_num_seqs=8, **engine)
    assert "error" not in result, result["error"]
    assert {candidate for _, candidate in result["layers"].values()} == {environment.get("ATTNPLUG_BACKEND", "None")}
    return [output for outputs in result["rounds"] for output in outputs]


def errors(folder, outputs):
    """Return the differences of the chosen tokens' logprobs from those of transformers in float32."""
    model, found = models.load(folder), []
    for prompt, output in zip(PROMPTS * 2, outputs, strict=True):
        tokens = torch.tensor(output["tokens"])
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output["tokens"]])).logits[0]
        expected = logits[len(prompt) - 1 : -1].float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        found.append((expected - torch.tensor(output["logprobs"])).abs())
    return torch.cat(found)


@pytest.mark.parametrize(("backend", "name", "mode", "environment"), CASES)
def test_logprobs_are_as_near_as_its_own(backend, name, mode, environment, server, folder, own_error, record_property):
    given = {"VLLM_PLUGINS": "attnplug", "ATTNPLUG_BACKEND": backend} | environment
    outputs = run(server, folder(name), "CUSTOM", mode, given)

    error, own = errors(folder(name), outputs), own_error(name)

    record_property(
        "mean error", f"{float(error.mean()):.5f}, the largest {float(error.max()):.4f}; vLLM's own mean {own:.5f}"
    )
    assert float(error.mean()) <= 1.2 * own + 1e-3
