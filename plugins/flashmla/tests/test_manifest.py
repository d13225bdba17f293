"""What the manifest supports and refuses, by request and device, and why. Nothing is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import attnplug
from attnplug import Device, Requirements
from attnplug.discovery.plugin import read_known
from attnplug.manifest.reader import read_manifest
from attnplug_kit.check.examine import examine
from plugins.flashmla.tests.real import FLASHMLA
from tests.backends.fakes import manifest_of

if TYPE_CHECKING:
    from attnplug import Verdict

PROJECT = Path(__file__).parents[1]
HOPPER = Device.cuda("9.0")
DEEPSEEK = Requirements(
    latent=True, head_size=576, head_size_v=512, num_q_heads=128, num_kv_heads=1, dtype="bfloat16", cudagraph="never"
)


_registered = FLASHMLA.registered_fixture()


def verdict(requirements: Requirements, device: Device = HOPPER) -> Verdict:
    explanation = attnplug.explain(requirements, device, backend="flashmla", assume_installed=True)
    (found,) = [one for one in explanation.verdicts if one.id == "flashmla/sgl"]
    return found


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="DeepSeek-V3"),
        pytest.param({"num_q_heads": 20}, id="GLM-4.7-Flash"),
        pytest.param({"head_size": 512, "num_q_heads": 64}, id="GLM-5.3-Flash, without a rotary part"),
        pytest.param({"dtype": "float16"}, id="float16"),
        pytest.param({"cudagraph": "uniform_batch", "decode_query_len": 4}, id="graphs of decodes of four tokens"),
        pytest.param({"kv_cache_dtype": "fp8", "cudagraph": "uniform_batch"}, id="an FP8 KV cache"),
        pytest.param({"topk": 2048, "cudagraph": "uniform_batch"}, id="DeepSeek-V3.2"),
        pytest.param({"topk": 2048, "kv_cache_dtype": "fp8_ds_mla", "cudagraph": "uniform_batch"}, id="its records"),
        pytest.param({"topk": 5, "head_size": 512, "num_q_heads": 64}, id="selected tokens without a rotary part"),
        pytest.param({"return_lse": True, "kv_in_cache": True, "causal": False}, id="a part of a sequence, its LSE"),
    ],
)
def test_latents_of_512_elements_are_supported(fields: dict[str, Any]) -> None:
    found = verdict(DEEPSEEK.evolve(**fields))

    assert (found.status, found.reasons) == ("chosen", ())
    assert found.agreement is not None
    assert (found.agreement.block_size, found.agreement.kv_cache_form) == (64, "latent")


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "MiniCPM3": (
        {"head_size": 288, "head_size_v": 256, "num_q_heads": 40},
        ["head_size=288; supported: 576, 512", "head_size_v=256; supported: 512"],
    ),
    "Mistral-4": ({"head_size": 320, "head_size_v": 256}, ["supported: 576, 512", "supported: 512"]),
    "values as wide as keys": ({"head_size_v": None}, ["the value is the first 512 elements of a latent"]),
    "keys and values per head": ({"latent": False, "num_kv_heads": 8}, ["the kernels read latents: one key per token"]),
    "queries as they are, beside FP8": (
        {"kv_cache_dtype": "fp8", "unquantized_queries": True},
        ["the FP8 kernels quantize queries"],
    ),
    "pages of 16 tokens": ({"block_size": 16}, ["block_size=16; supported: 64"]),
    "FP8 without a rotary part": (
        {"kv_cache_dtype": "fp8", "head_size": 512, "dtype": "float16"},
        ["dtype=float16", "head_size=512"],
    ),
    "FP8 with more tiles than multiprocessors": (
        {"kv_cache_dtype": "fp8", "num_q_heads": 256, "decode_query_len": 64},
        ["num_q_heads=256", "decode_query_len=64"],
    ),
    "all tokens of records": ({"kv_cache_dtype": "fp8_ds_mla"}, ["the dense kernels read no records"]),
    "selected tokens of an FP8 cache": (
        {"topk": 2048, "kv_cache_dtype": "fp8"},
        ["the sparse kernels read bfloat16 latents, or the records of fp8_ds_mla"],
    ),
    "selected tokens for more heads": (
        {"topk": 2048, "num_q_heads": 256, "dtype": "float16"},
        ["dtype=float16", "num_q_heads=256"],
    ),
    "fp8_e5m2": ({"kv_cache_dtype": "fp8_e5m2"}, ["kv_cache_dtype=fp8_e5m2; supported: auto, fp8_e4m3, fp8_ds_mla"]),
    "graphs of any batch": ({"cudagraph": "always"}, ["cudagraph=always; supported: <= uniform_batch"]),
    "a window": ({"sliding_window": 4096}, ["does not support sliding_window=4096"]),
}


@pytest.mark.parametrize(("fields", "reasons"), REFUSED.values(), ids=REFUSED)
def test_refusals_have_their_reasons(fields: dict[str, Any], reasons: list[str]) -> None:
    found = verdict(DEEPSEEK.evolve(**fields))

    assert found.status == "refused"
    assert len(found.reasons) == len(reasons)
    for reason, part in zip(found.reasons, reasons, strict=True):
        assert part in str(reason)


@pytest.mark.parametrize("device", ["cuda:8.0", "cuda:10.0", "cuda:12.0", "cpu"])
def test_other_devices_are_refused(device: str) -> None:
    assert verdict(DEEPSEEK, Device.parse(device)).status == "refused"


def test_the_library_is_installed_without_its_dependencies() -> None:
    """Its metadata asks for a torch that its kernels do not need."""
    explanation = attnplug.explain(DEEPSEEK, HOPPER, backend="flashmla")
    (found,) = [one for one in explanation.verdicts if one.id == "flashmla/sgl"]

    if found.status == "missing_dependency":
        assert "pip install --no-deps 'sgl-flash-mla >=1.0.0,<1.1'" in str(found.fix)
    else:
        assert found.status == "chosen"  # it is installed here


def test_the_name_of_engines_is_an_alias() -> None:
    known = next(one for one in read_known().plugins if one.name == "flashmla")

    assert read_manifest(manifest_of("attnplug_flashmla")).aliases == ("FLASHMLA",) == tuple(known.aliases)


def test_attnplug_check_finds_nothing() -> None:
    report = examine(str(PROJECT))

    assert report.backends == ("flashmla",)
    assert report.findings == ()
