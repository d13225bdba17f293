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
        ({"block_sparse": None}, "requires block_sparse: a model that names no pattern is dense"),
        ({"alibi": "linear"}, "does not support alibi=linear"),
        ({"sliding_window": 128}, "does not support sliding_window=128"),
        ({"logits_soft_cap": 30.0}, "does not support logits_soft_cap=30.0"),
        (
            {"attn_type": "encoder", "paged": False, "causal": False},
            "does not support attn_type=encoder; supported: decoder",
        ),
        (
            {"attn_type": "encoder_only", "paged": False, "causal": False},
            "does not support attn_type=encoder_only; supported: decoder",
        ),
        (
            {"attn_type": "encoder_decoder", "causal": False},
            "does not support attn_type=encoder_decoder; supported: decoder",
        ),
        ({"head_size": 80}, "does not support head_size=80; supported: 64, 96, 128, 256"),
        ({"head_size_v": 64}, "does not support head_size_v=64; supported: head_size_v = head_size"),
        ({"kv_sharing": True}, "does not support kv_sharing=True"),
        ({"output_quant": "fp8_e4m3"}, "does not support output_quant=fp8_e4m3"),
        ({"sinks": True}, "does not support sinks=True"),
        ({"custom_mask": True}, "does not support custom_mask=True"),
        ({"dtype": "float32"}, "does not support dtype=float32; supported: bfloat16, float16"),
        ({"num_q_heads": 130, "num_kv_heads": 1}, "they fit the shared memory up to 128"),
        ({"block_size": 8}, "does not support block_size=8; supported: 64, multiples of 16"),
        ({"kv_cache_dtype": "int8"}, "does not support kv_cache_dtype=int8; supported: auto, fp8_e4m3, fp8_e5m2"),
        ({"kv_cache_dtype": "fp8_e4m3", "per_head_scales": True}, "does not support per_head_scales=True"),
        ({"causal": False}, "does not support causal=False; supported: the attention type's own mask"),
        ({"attention_chunk": 512}, "does not support attention_chunk=512"),
        ({"decode_query_len": 2}, "does not support decode_query_len=2; supported: 1"),
        ({"dcp_size": 2}, "does not support dcp_size=2; supported: 1"),
        ({"cascade": True}, "does not support cascade=True"),
        ({"seq_lens_cpu_kind": "upper_bound"}, "does not support seq_lens_cpu_kind=upper_bound; supported: exact"),
        ({"batch_invariant": True}, "does not support batch_invariant=True"),
        ({"cudagraph": "uniform_batch"}, "does not support cudagraph=uniform_batch; supported: <= single_token_decode"),
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
