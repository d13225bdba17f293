"""What the manifest supports and refuses, by request and device, and why. Nothing is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import attnplug
from attnplug import Device, Requirements
from attnplug.discovery.plugin import read_known
from attnplug.manifest.reader import read_manifest
from attnplug.negotiation.candidate import make_candidate
from attnplug.negotiation.matching import Request, negotiate
from attnplug_kit.check.examine import examine
from tests.backends.fakes import manifest_of

if TYPE_CHECKING:
    from attnplug import Verdict

PROJECT = Path(__file__).parents[1]
ADA = Device.cuda("8.9")
LLAMA = Requirements(head_size=128, num_q_heads=32, num_kv_heads=8, dtype="bfloat16")
LATENT = {"latent": True, "num_kv_heads": 1, "return_lse": True}

pytestmark = pytest.mark.usefixtures("registered")


def verdict(requirements: Requirements, device: Device = ADA) -> Verdict:
    explanation = attnplug.explain(requirements, device, assume_installed=True)
    return next(one for one in explanation.verdicts if one.id == "triton/unified")


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="Llama 3"),
        pytest.param({"sinks": True, "sliding_window": 128, "head_size": 64}, id="gpt-oss"),
        pytest.param({"logits_soft_cap": 50.0, "head_size": 256, "sliding_window": 4096}, id="Gemma 2"),
        pytest.param({"attention_chunk": 8192, "return_lse": True}, id="Llama 4"),
        pytest.param({"alibi": "sqrt", "dtype": "float16"}, id="square root of ALiBi"),
        pytest.param({"block_size": 1, "kv_layout": "NHD"}, id="pages of one token"),
        pytest.param({"kv_cache_dtype": "fp8", "per_head_scales": True}, id="an FP8 KV cache"),
        pytest.param({"kv_cache_dtype": "int8_per_token_head", "cudagraph": "always"}, id="an int8 KV cache"),
        pytest.param(
            {"kv_cache_dtype": "fp8_per_token_head", "dcp_size": 2, "kv_in_cache": True}, id="FP8 with scales by token"
        ),
        pytest.param({"head_size": 192, "head_size_v": 128}, id="unequal sizes"),
        pytest.param({"head_size": 512, "num_kv_heads": 4}, id="Gemma 4"),
        pytest.param({"cudagraph": "always", "seq_lens_cpu_kind": "absent"}, id="graphs without lengths on the CPU"),
        pytest.param({**LATENT, "head_size": 576, "head_size_v": 512}, id="DeepSeek V3"),
        pytest.param({**LATENT, "head_size": 288, "head_size_v": 256, "kv_cache_dtype": "fp8"}, id="MiniCPM3"),
        pytest.param({**LATENT, "head_size": 512, "head_size_v": 512}, id="latents without a rotary part"),
        pytest.param({**LATENT, "head_size": 576, "head_size_v": 512, "topk": 2048}, id="DeepSeek V3.2"),
        pytest.param(
            {**LATENT, "head_size": 576, "head_size_v": 512, "topk": 2048, "kv_cache_dtype": "fp8_ds_mla"}, id="records"
        ),
        pytest.param({"batch_invariant": True, "sinks": True}, id="batch invariance"),
        pytest.param({"paged": False, "sinks": True, "sliding_window": 64}, id="contiguous"),
        pytest.param({"mm_prefix": True, "sliding_window": 1024, "cudagraph": "always"}, id="Gemma 3 with images"),
        pytest.param({"cascade": True, "sinks": True, "logits_soft_cap": 30.0}, id="a shared prefix"),
        pytest.param({"dcp_size": 2, "sinks": True, "sliding_window": 64, "cudagraph": "always"}, id="DCP"),
        pytest.param({"custom_mask": True, "cudagraph": "uniform_batch", "decode_query_len": 8}, id="trees of drafts"),
        pytest.param({"attn_type": "encoder_only", "sliding_window": 128}, id="ModernBERT"),
        pytest.param({"attn_type": "encoder_decoder", "cudagraph": "always"}, id="Whisper's decoder"),
        pytest.param({"causal": False, "kv_in_cache": True, "kv_sharing": True}, id="a drafter"),
    ],
)
@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0", "12.0"])
def test_supported(fields: dict[str, Any], capability: str) -> None:
    assert verdict(LLAMA.evolve(**fields), Device.cuda(capability)).status in ("chosen", "eligible")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"paged": False, "cudagraph": "uniform_batch"}, "change from step to step"),
        ({"custom_mask": True, "cudagraph": "always"}, "custom masks of one query length"),
        ({"custom_mask": True, "attn_type": "encoder_decoder"}, "as wide as seq_lens"),
        ({"attn_type": "encoder_decoder", "alibi": "linear"}, "ALiBi has no meaning"),
        ({"attn_type": "encoder_decoder", "sliding_window": 8}, "a window has no meaning"),
        ({"head_size": 36}, "head_size"),
        ({"head_size": 520}, "up to head size 512"),
        ({"head_size": 576, "head_size_v": 512}, "up to head size 512"),
        ({**LATENT, "head_size": 576, "head_size_v": 128}, "small GPUs"),
        ({"causal": False, "attention_chunk": 64}, "no right bound"),
        ({"per_head_scales": True}, "only an FP8 KV cache has scales"),
        ({"per_head_scales": True, "kv_cache_dtype": "int8_per_token_head"}, "only an FP8 KV cache has scales"),
        ({"kv_cache_dtype": "int8"}, "wanted='int8'"),
        ({**LATENT, "head_size": 576, "head_size_v": 512, "kv_cache_dtype": "int8_per_token_head"}, "one scale for"),
        ({"cascade": True, "sliding_window": 8}, "without a mask"),
        ({"cascade": True, "mm_prefix": True}, "parts of it"),
        ({"cascade": True, "batch_invariant": True}, "other requests of the batch"),
        ({"cascade": True, "dcp_size": 2}, "distributed over ranks"),
        ({"dcp_size": 2, "alibi": "linear"}, "windows and chunks alone"),
        ({"dcp_size": 2, "attn_type": "encoder_decoder"}, "a decoder's tokens"),
        ({**LATENT, "head_size": 576, "head_size_v": 512, "dcp_size": 2}, "without dcp_size"),
    ],
)
def test_refused(fields: dict[str, Any], words: str) -> None:
    found = verdict(LLAMA.evolve(**fields))

    assert found.status == "refused"
    assert words in str(found.reasons)


def test_other_devices_are_refused() -> None:
    for text in ("cpu", "t4", "mi100", "cuda:iluvatar", "xpu"):
        assert verdict(LLAMA, Device.parse(text)).status == "refused"


@pytest.mark.parametrize("product", ["mi210", "mi300x", "mi355x", "rx7900xtx", "rx9070xt"])
def test_amd_gpus(product: str) -> None:
    device, fp8 = Device.parse(product), LLAMA.evolve(kv_cache_dtype="fp8")
    deepseek = LLAMA.evolve(**LATENT, head_size=576, head_size_v=512)

    assert verdict(LLAMA, device).status == "chosen"
    assert verdict(deepseek, device).status == "chosen"
    assert (verdict(fp8, device).status == "refused") == (product == "mi300x")


@pytest.mark.parametrize(
    ("fields", "is_refused"),
    [
        ({}, False),
        ({"head_size": 512}, True),
        ({"head_size_v": 512}, True),
        ({**LATENT, "head_size": 96, "head_size_v": 64}, True),
    ],
)
def test_large_tiles_require_triton_3_5(fields: dict[str, Any], is_refused: bool) -> None:
    manifest, request = read_manifest(manifest_of("attnplug_triton")), Request(LLAMA.evolve(**fields), ADA)
    old, new = (
        make_candidate(manifest, manifest.variants[0], {"triton": version}.get) for version in ("3.4.0", "3.5.1")
    )

    assert any("Triton 3.4" in str(reason) for reason in negotiate(old, request).objections) == is_refused
    assert negotiate(new, request).objections == ()


def test_turing_is_refused_with_the_reason() -> None:
    for dtype in ("bfloat16", "float16"):
        assert "no matrix instructions" in str(verdict(LLAMA.evolve(dtype=dtype), Device.parse("t4")).reasons)


def test_fnuz_encodings_are_refused() -> None:
    for dtype in ("fp8_e4m3", "fp8_e5m2", "fp8_per_token_head"):
        found = verdict(LLAMA.evolve(kv_cache_dtype=dtype), Device.parse("mi300x"))
        assert "e4m3fnuz" in str(found.reasons)


def test_int8_has_one_encoding() -> None:
    assert verdict(LLAMA.evolve(kv_cache_dtype="int8_per_token_head"), Device.parse("mi300x")).status == "chosen"


def test_it_ranks_between_kernel_libraries_and_gathered_pages() -> None:
    explanation = attnplug.explain(LLAMA, ADA, assume_installed=True)
    ids = [one.id for one in explanation.verdicts if one.status in ("chosen", "eligible")]

    at = ids.index("triton/unified")
    assert {"torch/sdpa", "torch/flex"} <= set(ids[at + 1 :])
    assert not {one for one in ids[:at] if one.startswith("torch/") or one == "flash_attn/torch"}


def test_the_name_of_vllm_is_an_alias() -> None:
    manifest = read_manifest(manifest_of("attnplug_triton"))
    known = next(one for one in read_known().plugins if one.name == "triton")

    assert manifest.aliases == ("TRITON_ATTN",) == tuple(known.aliases)
    assert known.install == "attnplug-triton"


def test_attnplug_check_finds_nothing() -> None:
    report = examine(str(PROJECT))

    assert report.backends == ("triton",)
    assert report.findings == ()
