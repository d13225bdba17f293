"""The requirements that the manifest supports and refuses, with the messages that a user reads. Nothing is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

import attnplug
from attnplug import Device, Requirements
from attnplug.discovery.plugin import read_known
from attnplug.errors import NoBackendError
from attnplug.manifest.reader import read_manifest
from attnplug_kit.check.examine import examine

PROJECT = Path(__file__).parents[1]
MANIFEST = PROJECT / "src" / "attnplug_blocksparse" / "attnplug.toml"
HOPPER, AMPERE, TURING = (Device.cuda(capability) for capability in ("9.0", "8.0", "7.5"))
PATTERN = {"max_seqlen": 8192, "block_size": 64, "local_blocks": 16, "vert_stride": 8}
PHI = Requirements(head_size=128, num_q_heads=32, num_kv_heads=8, dtype="bfloat16", block_sparse=PATTERN)


pytestmark = pytest.mark.usefixtures("registered")


def verdict(requirements: Requirements, device: Device = HOPPER):
    explained = attnplug.explain(requirements, device, assume_installed=True)
    return next(one for one in explained.verdicts if one.id == "blocksparse/triton")


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"head_size": 64},
        {"head_size": 96},
        {"head_size": 256},
        {"dtype": "float16"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"kv_cache_dtype": "fp8_e5m2"},
        {"block_size": 16},
        {"block_size": 48, "kv_layout": "HND"},
        {"cudagraph": "single_token_decode"},
        {"return_lse": True},
        {"kv_in_cache": True},
        {"seq_lens_cpu_kind": "absent"},
        {"paged": False},
        {"num_q_heads": 28, "num_kv_heads": 4},
        {"num_q_heads": 128, "num_kv_heads": 1},
        {"num_q_heads": 64, "num_kv_heads": 1, "head_size": 256},
    ],
)
def test_it_supports(changed) -> None:
    assert verdict(PHI.evolve(**changed)).status in ("chosen", "eligible")


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"block_sparse": None}, "without a pattern attention is dense"),
        ({"alibi": "linear"}, "alibi"),
        ({"sliding_window": 128}, "sliding_window"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap"),
        ({"attn_type": "encoder", "paged": False, "causal": False}, "attn_type"),
        ({"attn_type": "encoder_only", "paged": False, "causal": False}, "attn_type"),
        ({"attn_type": "encoder_decoder", "causal": False}, "attn_type"),
        ({"head_size": 80}, "head_size"),
        ({"head_size_v": 64}, "head_size_v"),
        ({"kv_sharing": True}, "kv_sharing"),
        ({"output_quant": "fp8_e4m3"}, "output_quant"),
        ({"sinks": True}, "sinks"),
        ({"custom_mask": True}, "custom_mask"),
        ({"dtype": "float32"}, "dtype"),
        ({"num_q_heads": 130, "num_kv_heads": 1}, "up to 128 fit its shared memory"),
        ({"block_size": 8}, "block_size"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype"),
        ({"kv_cache_dtype": "fp8_e4m3", "per_head_scales": True}, "per_head_scales"),
        ({"causal": False}, "causal"),
        ({"attention_chunk": 512}, "attention_chunk"),
        ({"decode_query_len": 2}, "decode_query_len"),
        ({"dcp_size": 2}, "dcp_size"),
        ({"cascade": True}, "cascade"),
        ({"batch_invariant": True}, "batch_invariant"),
        ({"cudagraph": "uniform_batch"}, "cudagraph"),
        ({"paged": False, "cudagraph": "single_token_decode"}, "contiguous K/V differ in size"),
    ],
)
def test_it_refuses_by_name(changed, problem) -> None:
    requested = PHI.evolve(**changed)
    found = verdict(requested)
    (reason,) = found.reasons

    assert found.status == "refused"
    assert problem == reason.field or problem in str(reason)
    with pytest.raises(NoBackendError) as refused:
        attnplug.select(requested, HOPPER, backend="blocksparse")
    assert problem in " ".join(str(refused.value).split())


def test_no_other_backend_supports_a_pattern() -> None:
    explained = attnplug.explain(PHI, HOPPER, assume_installed=True)

    assert [one.id for one in explained.verdicts if one.status in ("chosen", "eligible")] == ["blocksparse/triton"]


def test_older_devices() -> None:
    assert verdict(PHI, AMPERE).status in ("chosen", "eligible")
    assert verdict(PHI.evolve(kv_cache_dtype="fp8_e5m2"), AMPERE).status in ("chosen", "eligible")
    assert "from compute capability 8.9 on" in str(verdict(PHI.evolve(kv_cache_dtype="fp8_e4m3"), AMPERE).reasons[0])
    groups = PHI.evolve(head_size=256, num_q_heads=34, num_kv_heads=1)
    assert verdict(groups, AMPERE).status in ("chosen", "eligible")
    assert verdict(groups.evolve(num_q_heads=32), Device.cuda("8.9")).status in ("chosen", "eligible")
    assert "do not fit 99 KiB of shared memory" in str(verdict(groups, Device.cuda("8.9")).reasons[0])
    assert verdict(PHI, TURING).status == "refused"
    assert verdict(PHI, Device.cpu()).status == "refused"


def test_the_published_name_is_an_alias() -> None:
    manifest, known = read_manifest(MANIFEST), next(one for one in read_known().plugins if one.name == "blocksparse")

    assert manifest.aliases == ("BLOCK_SPARSE_FLASH_ATTN",) == tuple(known.aliases)
    assert known.install == "attnplug-blocksparse"


def test_attnplug_check_finds_nothing() -> None:
    report = examine(str(PROJECT))

    assert report.backends == ("blocksparse",)
    assert report.findings == ()
