"""The requirements that the manifest supports and refuses, with the messages that a user reads. Nothing is loaded."""

from __future__ import annotations

from pathlib import Path

import pytest

import attnplug
from attnplug import Device, Requirements
from attnplug.discovery.known import read_known
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
        {"paged": False},
        {"num_q_heads": 28, "num_kv_heads": 4},
        {"num_q_heads": 128, "num_kv_heads": 1},
        {"num_q_heads": 64, "num_kv_heads": 1, "head_size": 256},
    ],
)
def test_it_serves(changed) -> None:
    assert verdict(PHI.evolve(**changed)).status in ("chosen", "eligible")


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"block_sparse": None}, "block_sparse not asked for, and needed: a model that names no pattern is dense"),
        ({"alibi": "linear"}, "alibi=linear asked, supported: only none"),
        ({"sliding_window": 128}, "sliding_window=128 asked, supported: only none"),
        ({"logits_soft_cap": 30.0}, "logits_soft_cap=30.0 asked, supported: only none"),
        ({"attn_type": "encoder", "paged": False, "causal": False}, "attn_type=encoder asked, supported: only decoder"),
        (
            {"attn_type": "encoder_only", "paged": False, "causal": False},
            "attn_type=encoder_only asked, supported: only decoder",
        ),
        ({"attn_type": "encoder_decoder", "causal": False}, "attn_type=encoder_decoder asked, supported: only decoder"),
        ({"head_size": 80}, "head_size=80 asked, supported: 64, 96, 128, 256"),
        ({"head_size_v": 64}, "head_size_v=64 asked, supported: only head_size_v = head_size"),
        ({"kv_sharing": True}, "kv_sharing=True asked, supported: only False"),
        ({"output_quant": "fp8_e4m3"}, "output_quant=fp8_e4m3 asked, supported: only none"),
        ({"sinks": True}, "sinks=True asked, supported: only False"),
        ({"custom_mask": True}, "custom_mask=True asked, supported: only False"),
        ({"dtype": "float32"}, "dtype=float32 asked, supported: bfloat16, float16"),
        ({"num_q_heads": 130, "num_kv_heads": 1}, "they fit the shared memory up to 128"),
        ({"block_size": 8}, "block_size=8 asked, supported: 64, multiples of 16"),
        ({"kv_cache_dtype": "int8"}, "kv_cache_dtype=int8 asked, supported: auto, fp8_e4m3, fp8_e5m2"),
        ({"kv_cache_dtype": "fp8_e4m3", "per_head_scales": True}, "per_head_scales=True asked, supported: only False"),
        ({"causal": False}, "causal=False asked, supported: only the attention type's own mask"),
        ({"attention_chunk": 512}, "attention_chunk=512 asked, supported: only none"),
        ({"decode_query_len": 2}, "decode_query_len=2 asked, supported: only 1"),
        ({"dcp_size": 2}, "dcp_size=2 asked, supported: only 1"),
        ({"cascade": True}, "cascade=True asked, supported: only False"),
        ({"seq_lens_cpu_kind": "upper_bound"}, "seq_lens_cpu_kind=upper_bound asked, supported: only exact"),
        ({"batch_invariant": True}, "batch_invariant=True asked, supported: only False"),
        ({"cudagraph": "uniform_batch"}, "cudagraph=uniform_batch asked, supported: <= single_token_decode"),
        ({"paged": False, "cudagraph": "single_token_decode"}, "keys that come with the call differ in size"),
    ],
)
def test_it_refuses_by_name(changed, told) -> None:
    asked = PHI.evolve(**changed)
    found = verdict(asked)
    (reason,) = found.reasons

    assert found.status == "refused"
    assert told in str(reason)
    with pytest.raises(NoBackendError) as refused:
        attnplug.select(asked, HOPPER, backend="blocksparse")
    assert told in " ".join(str(refused.value).split())


def test_nobody_else_is_chosen_for_a_pattern() -> None:
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


def test_the_project_is_sound() -> None:
    report = examine(str(PROJECT))

    assert report.backends == ("blocksparse",)
    assert report.findings == ()
