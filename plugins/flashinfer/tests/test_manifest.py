"""What the manifest supports and refuses, by request and device, and why. Nothing is loaded."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from attrs import evolve

import attnplug
from attnplug import Device, Requirements
from attnplug.errors import SettingsError
from attnplug.evidence.coverage import find_unverified
from attnplug.evidence.store import FOLDER, read_folder
from attnplug.manifest.installed import requirement_name
from attnplug.manifest.reader import read_manifest
from attnplug.negotiation.candidate import make_candidate
from attnplug.request.settings import parse_toml
from attnplug_kit.check.examine import examine
from plugins.flashinfer.tests.real import FLASHINFER

if TYPE_CHECKING:
    from attnplug.evidence.coverage import Evidence

PROJECT = Path(__file__).parents[1]
MANIFEST = PROJECT / "src" / "attnplug_flashinfer" / "attnplug.toml"
HOPPER, AMPERE, BLACKWELL, TURING = (Device.cuda(capability) for capability in ("9.0", "8.0", "10.0", "7.5"))
AMD, CPU = Device("cuda", vendor="amd"), Device.cpu()

LLAMA = Requirements(head_size=128, num_q_heads=32, num_kv_heads=8, dtype="bfloat16", cudagraph="uniform_batch")
MISTRAL = LLAMA.evolve(sliding_window=4096)
GEMMA_2 = LLAMA.evolve(head_size=256, num_q_heads=16, logits_soft_cap=50.0, sliding_window=4096)
GPT_OSS = LLAMA.evolve(head_size=64, num_q_heads=64, sinks=True, sliding_window=128)
FP8 = LLAMA.evolve(kv_cache_dtype="fp8")
DENSE = LLAMA.evolve(paged=False, cudagraph="never")
ENCODER = DENSE.evolve(attn_type="encoder_only")
DEEPSEEK = LLAMA.evolve(latent=True, head_size=576, head_size_v=512, num_q_heads=16, num_kv_heads=1)
MHA = DENSE.evolve(head_size=192, head_size_v=128, num_q_heads=16, num_kv_heads=16, return_lse=True)
BOTH, FA3, FA2, NONE = ["fa3", "fa2"], ["fa3"], ["fa2"], []


_registered = FLASHINFER.registered_fixture()
verdicts_of = FLASHINFER.verdicts_of


def refusals(requirements: Requirements, variant: str = "fa2", device: Device = AMPERE) -> list[str]:
    return FLASHINFER.refusals(requirements, variant, device)


@pytest.mark.parametrize(
    ("requirements", "device", "serving"),
    [
        pytest.param(LLAMA, HOPPER, BOTH, id="Llama on Hopper"),
        pytest.param(LLAMA, AMPERE, FA2, id="Llama on Ampere"),
        pytest.param(LLAMA, BLACKWELL, FA2, id="Llama on Blackwell"),
        pytest.param(LLAMA, TURING, NONE, id="Llama on Turing"),
        pytest.param(LLAMA, AMD, NONE, id="Llama on an AMD GPU"),
        pytest.param(LLAMA, CPU, NONE, id="Llama on the CPU"),
        pytest.param(LLAMA.evolve(dtype="float16"), HOPPER, BOTH, id="float16"),
        pytest.param(LLAMA.evolve(dtype="float32"), HOPPER, NONE, id="float32"),
        pytest.param(LLAMA.evolve(head_size=96), HOPPER, NONE, id="heads of 96"),
        pytest.param(LLAMA.evolve(num_q_heads=40), HOPPER, BOTH, id="five query heads per KV head"),
        pytest.param(MISTRAL, HOPPER, BOTH, id="Mistral on Hopper"),
        pytest.param(GEMMA_2, HOPPER, BOTH, id="Gemma 2 on Hopper"),
        pytest.param(GEMMA_2.evolve(sliding_window=None), AMPERE, FA2, id="Gemma 2's full layers on Ampere"),
        pytest.param(GPT_OSS, HOPPER, BOTH, id="gpt-oss on Hopper"),
        pytest.param(GPT_OSS.evolve(sliding_window=None), AMPERE, FA2, id="gpt-oss's full layers on Ampere"),
        pytest.param(FP8, HOPPER, FA2, id="an FP8 KV cache on Hopper"),
        pytest.param(LLAMA.evolve(kv_cache_dtype="fp8_e5m2"), BLACKWELL, FA2, id="fp8_e5m2"),
        pytest.param(LLAMA.evolve(kv_cache_dtype="int8"), HOPPER, NONE, id="an int8 KV cache"),
        pytest.param(LLAMA.evolve(cascade=True, return_lse=True), HOPPER, BOTH, id="cascade with LSE"),
        pytest.param(LLAMA.evolve(decode_query_len=4), HOPPER, BOTH, id="decodes of four tokens"),
        pytest.param(LLAMA.evolve(cudagraph="always"), HOPPER, NONE, id="graphs of any batch"),
        pytest.param(LLAMA.evolve(causal=False), HOPPER, BOTH, id="bidirectional over a KV cache"),
        pytest.param(DENSE, HOPPER, BOTH, id="dense"),
        pytest.param(ENCODER, AMPERE, FA2, id="an encoder"),
        pytest.param(DEEPSEEK, HOPPER, BOTH, id="DeepSeek on Hopper"),
        pytest.param(DEEPSEEK, AMPERE, FA2, id="DeepSeek on Ampere"),
        pytest.param(DEEPSEEK.evolve(num_q_heads=128, block_size=1), HOPPER, BOTH, id="128 heads, pages of one token"),
        pytest.param(DEEPSEEK.evolve(num_q_heads=20), HOPPER, BOTH, id="GLM 4.7 Flash"),
        pytest.param(DEEPSEEK.evolve(head_size=320, head_size_v=256), HOPPER, BOTH, id="Mistral 4"),
        pytest.param(DEEPSEEK.evolve(head_size=512), HOPPER, BOTH, id="latents without rotary elements"),
        pytest.param(DEEPSEEK.evolve(head_size=288, head_size_v=256), HOPPER, NONE, id="MiniCPM3"),
        pytest.param(DEEPSEEK.evolve(kv_cache_dtype="fp8"), HOPPER, FA3, id="latents in FP8"),
        pytest.param(MHA, HOPPER, BOTH, id="DeepSeek's prefill, not absorbed"),
        pytest.param(LLAMA.evolve(attn_type="encoder_decoder"), HOPPER, NONE, id="cross attention"),
    ],
)
def test_variants_that_support_a_request(requirements: Requirements, device: Device, serving: list[str]) -> None:
    verdicts = verdicts_of(requirements, device)

    assert [name for name, verdict in verdicts.items() if verdict.status in ("chosen", "eligible")] == serving
    assert [name for name, verdict in verdicts.items() if verdict.status == "chosen"] == serving[:1]
    assert set(verdicts) == set(BOTH)


REFUSED: dict[str, tuple[Requirements, str]] = {
    "sinks and soft-capping": (
        GPT_OSS.evolve(logits_soft_cap=30.0),
        "logits_soft_cap: attention sinks and logit soft-capping cannot be combined",
    ),
    "sinks and an FP8 KV cache": (
        GPT_OSS.evolve(kv_cache_dtype="fp8"),
        "sinks and kv_cache_dtype: the kernels with attention sinks take no K/V scales",
    ),
    "sinks without a KV cache": (
        DENSE.evolve(sinks=True),
        "paged: the kernels with attention sinks read a paged KV cache only",
    ),
    "sinks, bidirectional": (
        GPT_OSS.evolve(sliding_window=None, causal=False),
        "causal: the kernels with attention sinks are tested with a causal mask only",
    ),
    "sinks and a shared prefix": (
        GPT_OSS.evolve(sliding_window=None, cascade=True),
        "cascade: the prefix pass and the suffix pass would both count the sink",
    ),
    "a window and a shared prefix": (
        MISTRAL.evolve(cascade=True),
        "sliding_window: the prefix pass attends to every key of the prefix, and cannot apply a window",
    ),
    "the window of an encoder": (
        ENCODER.evolve(sliding_window=4096),
        "causal: the kernels bound a window on the left only; without a causal mask it has no right bound",
    ),
    "256 heads over latents": (
        DEEPSEEK.evolve(num_q_heads=256),
        "gqa_ratio: tiles of 128 end between the heads of a token that has more, and hide its last key",
    ),
    "latents with a window": (
        DEEPSEEK.evolve(sliding_window=64),
        "sliding_window: the kernels for latents have no window, soft cap, sinks or shared prefix",
    ),
    "latents of 256 with 320 rotary elements": (
        DEEPSEEK.evolve(head_size_v=256),
        "head_size: rotary elements are 64 or none",
    ),
    "heads of 192": (
        DENSE.evolve(head_size=192),
        "head_size_v: the kernels for keys of 192 elements have values of 128, and read contiguous (non-paged) K/V",
    ),
    "values of half a key": (
        LLAMA.evolve(head_size=256, head_size_v=128),
        "head_size: values have the size of keys, except 128 for keys of 192 elements",
    ),
    "graphs without a KV cache": (
        DENSE.evolve(cudagraph="uniform_batch"),
        "paged: contiguous (non-paged) K/V differ in size from step to step, and a CUDA graph has fixed sizes",
    ),
}


@pytest.mark.parametrize(("requirements", "reason"), REFUSED.values(), ids=REFUSED)
def test_refusals_have_their_reasons(requirements: Requirements, reason: str) -> None:
    assert refusals(requirements) == [reason]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alibi", "linear"),
        ("attention_chunk", 8192),
        ("custom_mask", True),
        ("block_sparse", {"local_blocks": 16}),
        ("dcp_size", 2),
        ("batch_invariant", True),
        ("output_quant", "fp8_e4m3"),
        ("features", ("acme.rope_fused",)),
    ],
)
def test_undeclared_fields_are_refused(field: str, value: object) -> None:
    for variant in BOTH:
        (reason,) = verdicts_of(LLAMA.evolve(**{field: value}), HOPPER)[variant].reasons

        assert (reason.code, reason.field) == ("undeclared", field)


@pytest.mark.parametrize("kind", ["upper_bound", "absent"])
def test_lengths_that_the_host_lacks_are_read(kind: str) -> None:
    verdicts = verdicts_of(LLAMA.evolve(seq_lens_cpu_kind=kind), HOPPER)
    for variant in BOTH:
        assert verdicts[variant].reasons == ()
        assert "one synchronization per build" in verdicts[variant].emulated["seq_lens_cpu_kind"]


def test_scales_per_head_are_refused_for_an_fp8_cache_too() -> None:
    assert refusals(FP8.evolve(per_head_scales=True)) == ["per_head_scales undeclared"]


def test_a_refusal_has_every_reason() -> None:
    reasons = refusals(GPT_OSS.evolve(logits_soft_cap=30.0, kv_cache_dtype="fp8", cascade=True), device=TURING)

    assert [re.match(r"\w+", reason)[0] for reason in reasons] == [
        "compute_capability",
        "logits_soft_cap",
        "cascade",
        "sliding_window",
        "sinks",
    ]


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (TURING, "compute_capability supported: >= 8.0"),
        (AMD, "vendor undeclared"),
        (CPU, "device_type supported: cuda"),
    ],
    ids=str,
)
def test_unsupported_devices_are_refused(device: Device, reason: str) -> None:
    assert reason in refusals(LLAMA, device=device)


def test_the_fix_for_an_fp8_cache_of_fa3_is_another_dtype() -> None:
    assert verdicts_of(FP8, HOPPER)["fa3"].fix.engine == {"kv_cache_dtype": "bfloat16"}


def test_free_fields_are_agreed_on() -> None:
    agreed = verdicts_of(LLAMA.evolve(cudagraph="never"), HOPPER)["fa3"].agreement

    assert agreed is not None
    assert (agreed.block_size, agreed.kv_layout, agreed.cudagraph) == (16, "NHD", "uniform_batch")
    assert agreed.options == {"decode_kernel": "auto", "workspace_mib": 256}


@pytest.mark.parametrize(("size", "layout"), [(1, "NHD"), (24, "HND"), (1024, "NHD")])
def test_requested_block_sizes_and_layouts_are_agreed_on(size: int, layout: str) -> None:
    agreed = verdicts_of(LLAMA.evolve(block_size=size, kv_layout=layout), AMPERE)["fa2"].agreement

    assert agreed is not None
    assert (agreed.block_size, agreed.kv_layout) == (size, layout)


def test_dense_agreements_have_no_graphs() -> None:
    agreed = verdicts_of(DENSE, HOPPER)["fa3"].agreement

    assert agreed is not None
    assert (agreed.cudagraph, agreed.block_size) == ("never", None)


@pytest.mark.parametrize(("name", "value"), [("decode_kernel", "fast"), ("workspace_mib", 64), ("tensor_cores", True)])
def test_invalid_options_are_refused(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=name):
        attnplug.select(LLAMA, HOPPER, options={"flashinfer": {name: value}})


def test_the_extra_installs_what_the_manifest_requires() -> None:
    project = parse_toml((PROJECT / "pyproject.toml").read_text("utf-8"))["project"]
    required = {text for variant in read_manifest(MANIFEST).variants for text in variant.requires}

    assert {text.replace(" ", "") for text in required} == set(project["optional-dependencies"]["library"])
    assert [requirement_name(text) for text in required] == ["flashinfer-python"]


EVIDENCE = [one for one in read_folder(MANIFEST.with_name(FOLDER)).evidence if one.id == "flashinfer/fa2"]
SINKS = GPT_OSS.evolve(sliding_window=None)


def unverified(requirements: Requirements, device: Device, *more: Evidence) -> list[str]:
    """Return what of a request no evidence covers for `fa2`, as for the released distribution."""
    (released,) = {one.distribution for one in EVIDENCE}
    manifest = read_manifest(MANIFEST)
    (variant,) = (one for one in manifest.variants if one.name == "fa2")
    candidate = make_candidate(manifest, variant, lambda _: None, distribution=released, assume_installed=True)
    agreement = verdicts_of(requirements, device)["fa2"].agreement
    assert agreement is not None
    return list(map(str, find_unverified(candidate, agreement, device, [*EVIDENCE, *more])))


def test_sinks_are_verified_on_hopper_only() -> None:
    assert unverified(SINKS, HOPPER) == []
    for capability in ("8.0", "8.6", "8.9", "10.0"):
        found = unverified(SINKS, Device.cuda(capability))
        assert found == [f"no run of the conformance kit on cuda:{capability} is known"]


def test_a_run_without_sinks_leaves_them_unverified() -> None:
    """A run on an A100 that covers the rest verifies no sinks there."""
    (hopper,) = EVIDENCE
    served = frozenset(item for item in hopper.served if item[0] != "sinks")
    ampere = evolve(hopper, device=AMPERE, served=served)

    assert unverified(LLAMA, AMPERE, ampere) == []
    assert unverified(SINKS, AMPERE, ampere) == ["sinks=True (no test has requested it)"]


def test_the_project_passes_check() -> None:
    report = examine(str(PROJECT))

    assert report.backends == ("flashinfer",)
    assert report.findings == ()
