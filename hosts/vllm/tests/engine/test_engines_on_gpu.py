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

from hosts.vllm.tests import phi3_small_reference as phi3_small
from hosts.vllm.tests.engine import harness, models

pytestmark = pytest.mark.gpu

MODES = {
    "eager": {"enforce_eager": True},
    "graphs": {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "compiled": {"enforce_eager": False, "compilation_config": {"mode": 3, "cudagraph_mode": "FULL_AND_PIECEWISE"}},
}
MEMORY = {"kv_cache_memory_bytes": 1 << 29, "gpu_memory_utilization": 0.1}
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
    ("flash_attn/fa3_vllm", "deepseek", "eager", {}),
    ("flash_attn/fa3_vllm", "deepseek", "graphs", {}),
    ("flash_attn/fa3_vllm", "deepseek", "compiled", {}),
    ("torch/sdpa", "deepseek", "graphs", {}),
    ("triton/unified", "llama", "graphs", {}),
    ("triton/unified", "gemma2", "compiled", {}),
    ("triton/unified", "deepseek", "compiled", {}),
)
OWN = {"deepseek": "TRITON_MLA", "deepseek_long": "TRITON_MLA"}
"""vLLM's backend whose error is the measure; FLASH_ATTN of other models."""

SHOWN = {
    "eager": ("prefill", "prefix caching"),
    "graphs": ("CUDA graphs, FULL_DECODE_ONLY",),
    "compiled": ("CUDA graphs, FULL_AND_PIECEWISE", "torch.compile, mode 3"),
    "gemma2": ("sliding windows beside full layers in one KV-cache group", "soft cap"),
    "deepseek": ("MLA",),
}
INT8 = {"attnplug": {"kv_cache_dtype": "int8_k"}}
PROMPTS = harness.prompts(5, 40, 1, 77, 17, 110, 1, 64)
TOKENS = 24
# Queries of up to 512 tokens are absorbed. Longer ones are expanded, here the first of each prompt over no context.
LONG = {
    "prompts": harness.prompts(1900, 1, 1300, 40, seed=4),
    "max_model_len": 2048,
    "max_num_batched_tokens": 600,
}


@pytest.fixture(scope="module")
def own_error(server, folder):
    """Return a function that returns the mean error of vLLM's own attention for a model and a dtype of the KV cache."""
    found = {}

    def get(name, cache_dtype="auto"):
        if (name, cache_dtype) not in found:
            options = {"kv_cache_dtype": cache_dtype} | (LONG if name.endswith("_long") else {})
            backend = OWN.get(name, "FLASH_ATTN")
            outputs = run(server, folder(name), backend, "eager", {"VLLM_PLUGINS": ""}, **options)
            found[name, cache_dtype] = float(errors(folder(name), outputs, options.get("prompts", PROMPTS)).mean())
        return found[name, cache_dtype]

    return get


def run(server, folder, backend, mode, environment, prompts=PROMPTS, prefills=None, **further):
    """Run the prompts twice: the second time their prefixes are cached."""
    engine = (
        MODES[mode] | {"dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 29, "gpu_memory_utilization": 0.1} | further
    )
    if "compilation_config" in engine:
        engine["compilation_config"] = engine["compilation_config"] | CAPTURES
    rounds = [{"prompts": prompts, "max_tokens": TOKENS}] * 2
    result = server.run(folder, rounds, environment=environment, attention_backend=backend, max_num_seqs=8, **engine)
    assert "error" not in result, result["error"]
    if engine.get("tensor_parallel_size", 1) == 1:  # layers of other processes are not seen
        chosen = {environment.get("ATTNPLUG_BACKEND", "None")}
        assert {candidate for _, candidate in result["layers"].values()} == chosen
        assert prefills in (None, result["prefills"])
    return [output for outputs in result["rounds"] for output in outputs]


def errors(folder, outputs, prompts=PROMPTS):
    """Return the differences of the chosen tokens' logprobs from those of transformers in float32."""
    model, found = models.load(folder), []
    for prompt, output in zip(prompts * 2, outputs, strict=True):
        tokens = torch.tensor(output["tokens"])
        with torch.no_grad():
            logits = model(torch.tensor([prompt + output["tokens"]])).logits[0]
        expected = logits[len(prompt) - 1 : -1].float().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
        found.append((expected - torch.tensor(output["logprobs"])).abs())
    return torch.cat(found)


def with_features(backend, name, mode, environment):
    """Return the parameters of a case, with the features of vLLM that it shows."""
    runner = f"model runner V{1 + int(environment.get('VLLM_USE_V2_MODEL_RUNNER', 0))}"
    features = (*SHOWN["eager"], *SHOWN[mode], *SHOWN.get(name, ()), runner)
    return pytest.param(backend, name, mode, environment, marks=pytest.mark.feature(*dict.fromkeys(features)))


@pytest.mark.parametrize(("backend", "name", "mode", "environment"), [with_features(*case) for case in CASES])
def test_logprobs_are_as_near_as_its_own(backend, name, mode, environment, server, folder, own_error, record_property):
    given = {"VLLM_PLUGINS": "attnplug", "ATTNPLUG_BACKEND": backend} | environment
    outputs = run(server, folder(name), "CUSTOM", mode, given)

    error, own = errors(folder(name), outputs), own_error(name)

    record_property(
        "mean error", f"{float(error.mean()):.5f}, the largest {float(error.max()):.4f}; vLLM's own mean {own:.5f}"
    )
    assert float(error.mean()) <= 1.2 * own + 1e-3


@pytest.mark.feature("MLA", "chunked prefill")
@pytest.mark.parametrize(
    ("backend", "name", "own_prefills", "mode"),
    [
        ("flash_attn/fa3_vllm", "deepseek_long", False, "eager"),
        ("flash_attn/fa3_vllm", "deepseek_long", False, "compiled"),
        ("flash_attn/fa3_vllm", "deepseek_long", True, "eager"),
        ("flash_attn/fa3_vllm", "latent_96", False, "graphs"),
        ("flashinfer/fa3", "deepseek_long", False, "eager"),
        ("triton/unified", "deepseek_long", False, "graphs"),
    ],
)
def test_prefills_of_latents_are_as_near_as_its_own(
    backend, name, own_prefills, mode, server, folder, own_error, record_property
):
    """Prefills run on attnplug, unless vLLM's are named; of some heads vLLM has none."""
    given = {"VLLM_PLUGINS": "attnplug", "ATTNPLUG_BACKEND": backend}
    named = {"attention_config": {"mla_prefill_backend": "FLASH_ATTN"}} if own_prefills else {}
    prefills = [] if own_prefills else [backend]
    outputs = run(server, folder(name), "CUSTOM", mode, given, prefills=prefills, **LONG, **named)

    error, own = errors(folder(name), outputs, LONG["prompts"]), own_error("deepseek_long")

    record_property("mean error", f"{float(error.mean()):.5f}; vLLM's own, of heads of 192 and 128, {own:.5f}")
    assert float(error.mean()) <= (1.2 if name == "deepseek_long" else 2) * own + 1e-3


@pytest.mark.feature("MLA", "DCP")
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="requires two GPUs")
@pytest.mark.parametrize(
    ("ranks", "mode"),
    [
        ({}, "graphs"),
        ({"decode_context_parallel_size": 2}, "eager"),
        ({"decode_context_parallel_size": 2}, "graphs"),
        ({"decode_context_parallel_size": 2, "cp_kv_cache_interleave_size": 16}, "graphs"),
    ],
    ids=["TP 2", "DCP 2, eager", "DCP 2", "DCP 2, interleave 16"],
)
def test_two_gpus_share_latents(ranks, mode, server, folder, own_error, record_property):
    given = {"VLLM_PLUGINS": "attnplug", "ATTNPLUG_BACKEND": "flash_attn/fa3_vllm"}
    outputs = run(server, folder("deepseek_long"), "CUSTOM", mode, given, tensor_parallel_size=2, **LONG, **ranks)

    error, own = errors(folder("deepseek_long"), outputs, LONG["prompts"]), own_error("deepseek_long")

    record_property("mean error", f"{float(error.mean()):.5f}; vLLM's own on one GPU {own:.5f}")
    assert float(error.mean()) <= 1.2 * own + 1e-3


@pytest.mark.feature("FP8 KV cache, scales per tensor")
@pytest.mark.parametrize(
    ("backend", "mode"),
    [
        ("flash_attn/fa3_vllm", "eager"),
        ("flash_attn/fa3_vllm", "compiled"),
        ("flashinfer/fa2", "graphs"),
        ("triton/unified", "graphs"),
    ],
)
def test_fp8_keys_and_values_are_as_near_as_its_own(backend, mode, server, folder, own_error, record_property):
    given = {"VLLM_PLUGINS": "attnplug", "ATTNPLUG_BACKEND": backend}
    outputs = run(server, folder("llama"), "CUSTOM", mode, given, kv_cache_dtype="fp8")

    error, own, exact = errors(folder("llama"), outputs), own_error("llama", "fp8"), own_error("llama")

    record_property("mean error", f"{float(error.mean()):.5f}; vLLM's own {own:.5f}, in bfloat16 {exact:.5f}")
    assert float(error.mean()) <= 1.2 * own + 1e-3
    assert float(error.mean()) > 1.05 * exact, "an FP8 cache rounds more than bfloat16 does"


@pytest.mark.feature("int8 KV cache, level 2")
def test_int8_keys_are_near_float32(server, folder, own_error, record_property):
    """Int8 keys round by up to 1/254 of a row's largest, which bfloat16 does by 1/512 of each value."""
    given = {"VLLM_PLUGINS": "attnplug", "ATTNPLUG_BACKEND": "int8_ixformer/triton"}
    outputs = run(server, folder("llama"), "CUSTOM", "eager", given, additional_config=INT8)

    error, own = errors(folder("llama"), outputs), own_error("llama")

    record_property("mean error", f"{float(error.mean()):.5f}; vLLM's own in bfloat16 {own:.5f}")
    assert float(error.mean()) <= 4 * own + 1e-3


@pytest.mark.feature("Phi-3-small, block-sparse")
@pytest.mark.parametrize("eager", [True, False], ids=["eager", "compiled"])
def test_phi_3_small_runs_on_block_sparse_kernels(server, tmp_path, eager, record_property):
    config = phi3_small.write_checkpoint(
        tmp_path / "model",
        torch_dtype="bfloat16",
        num_attention_heads=4,
        blocksparse_block_size=64,
        max_position_embeddings=512,
    )
    prompts = phi3_small.prompts_of(5, 300, 1, 170, 17)

    found = server.run(
        tmp_path / "model",
        [{"prompts": prompts, "max_tokens": 12}],
        environment={"VLLM_PLUGINS": "attnplug"},
        attention_backend="CUSTOM",
        dtype="bfloat16",
        enforce_eager=eager,
        max_model_len=384,
        **MEMORY,
    )

    assert "error" not in found, found["error"]
    assert "blocksparse/triton" in {candidate for _, candidate in found["layers"].values()}
    (outputs,) = found["rounds"]
    differing, worst = phi3_small.compare(config, tmp_path / "model", prompts, outputs)
    record_property("tokens that differ", f"{differing} of {sum(len(each['tokens']) for each in outputs)}")
    record_property("largest error of a logprob", f"{worst:.4f}")
    assert worst < 0.25
