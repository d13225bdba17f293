"""What the manifest serves and refuses: by request and device, in the words that a user reads. Nothing is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import attnplug
from attnplug import Device, Requirements
from attnplug.errors import SettingsError
from attnplug.manifest.installed import requirement_name
from attnplug.manifest.reader import read_manifest
from attnplug.request.toml import parse_toml
from attnplug_kit.check.examine import examine
from plugins.flashinfer.tests.real import FLASHINFER

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnplug import Verdict

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
BOTH, FA2, NOTHING = ["fa3", "fa2"], ["fa2"], []


@pytest.fixture(scope="module", autouse=True)
def _registered() -> Iterator[None]:
    """Register the plugin for these tests, unless it is installed."""
    with pytest.MonkeyPatch.context() as patch:
        FLASHINFER.register(patch)
        yield


def ask(requirements: Requirements, device: Device) -> dict[str, Verdict]:
    """Return the verdict of each variant, the preferred one first."""
    explanation = attnplug.explain(requirements, device, backend="flashinfer", assume_installed=True)
    return {v.id.partition("/")[2]: v for v in explanation.verdicts if v.id.startswith("flashinfer/")}


def refusals(requirements: Requirements, variant: str = "fa2", device: Device = AMPERE) -> list[str]:
    """Return the reasons of a variant that refuses."""
    verdict = ask(requirements, device)[variant]
    assert verdict.status == "refused"
    return [str(reason) for reason in verdict.reasons]


@pytest.mark.parametrize(
    ("requirements", "device", "serving"),
    [
        pytest.param(LLAMA, HOPPER, BOTH, id="Llama on Hopper"),
        pytest.param(LLAMA, AMPERE, FA2, id="Llama on Ampere"),
        pytest.param(LLAMA, BLACKWELL, FA2, id="Llama on Blackwell"),
        pytest.param(LLAMA, TURING, NOTHING, id="Llama on Turing"),
        pytest.param(LLAMA, AMD, NOTHING, id="Llama on an AMD GPU"),
        pytest.param(LLAMA, CPU, NOTHING, id="Llama on the CPU"),
        pytest.param(LLAMA.evolve(dtype="float16"), HOPPER, BOTH, id="float16"),
        pytest.param(LLAMA.evolve(dtype="float32"), HOPPER, NOTHING, id="float32"),
        pytest.param(LLAMA.evolve(head_size=96), HOPPER, NOTHING, id="heads of 96"),
        pytest.param(LLAMA.evolve(num_q_heads=40), HOPPER, BOTH, id="five query heads per KV head"),
        pytest.param(MISTRAL, HOPPER, BOTH, id="Mistral on Hopper"),
        pytest.param(GEMMA_2, HOPPER, BOTH, id="Gemma 2 on Hopper"),
        pytest.param(GEMMA_2.evolve(sliding_window=None), AMPERE, FA2, id="Gemma 2's full layers on Ampere"),
        pytest.param(GPT_OSS, HOPPER, BOTH, id="gpt-oss on Hopper"),
        pytest.param(GPT_OSS.evolve(sliding_window=None), AMPERE, FA2, id="gpt-oss's full layers on Ampere"),
        pytest.param(FP8, HOPPER, FA2, id="an 8-bit cache on Hopper"),
        pytest.param(LLAMA.evolve(kv_cache_dtype="fp8_e5m2"), BLACKWELL, FA2, id="the other 8-bit cache"),
        pytest.param(LLAMA.evolve(kv_cache_dtype="int8"), HOPPER, NOTHING, id="an int8 cache"),
        pytest.param(LLAMA.evolve(cascade=True, return_lse=True), HOPPER, BOTH, id="cascade with LSE"),
        pytest.param(LLAMA.evolve(decode_query_len=4), HOPPER, BOTH, id="decodes of four tokens"),
        pytest.param(LLAMA.evolve(cudagraph="always"), HOPPER, NOTHING, id="graphs of any batch"),
        pytest.param(LLAMA.evolve(causal=False), HOPPER, BOTH, id="bidirectional over a cache"),
        pytest.param(DENSE, HOPPER, BOTH, id="dense"),
        pytest.param(ENCODER, AMPERE, FA2, id="an encoder"),
        pytest.param(LLAMA.evolve(attn_type="encoder_decoder"), HOPPER, NOTHING, id="cross attention"),
    ],
)
def test_who_serves_what_and_where(requirements: Requirements, device: Device, serving: list[str]) -> None:
    verdicts = ask(requirements, device)

    assert [name for name, verdict in verdicts.items() if verdict.status in ("chosen", "eligible")] == serving
    assert [name for name, verdict in verdicts.items() if verdict.status == "chosen"] == serving[:1]
    assert set(verdicts) == set(BOTH)


@pytest.mark.parametrize(
    ("requirements", "told", "because"),
    [
        pytest.param(
            GPT_OSS.evolve(logits_soft_cap=30.0),
            "requires no logits_soft_cap (requested: logits_soft_cap=30.0)",
            "the kernels with sinks cap no scores",
            id="sinks and a soft cap",
        ),
        pytest.param(
            GPT_OSS.evolve(kv_cache_dtype="fp8"),
            "does not support sinks=True with kv_cache_dtype=fp8_e4m3",
            "the kernels with sinks take no scales",
            id="sinks and an 8-bit cache",
        ),
        pytest.param(
            DENSE.evolve(sinks=True),
            "requires paged = True (requested: paged=False)",
            "the kernels with sinks read a paged cache only",
            id="sinks without a cache",
        ),
        pytest.param(
            GPT_OSS.evolve(sliding_window=None, causal=False),
            "requires causal = True (requested: causal=False)",
            "the kernels with sinks are used, and checked, for causal attention only",
            id="sinks, bidirectional",
        ),
        pytest.param(
            GPT_OSS.evolve(sliding_window=None, cascade=True),
            "requires cascade = False (requested: cascade=True)",
            "the shared prefix and the rest are two passes, and a sink joins one softmax",
            id="sinks and cascade",
        ),
        pytest.param(
            MISTRAL.evolve(cascade=True),
            "requires no sliding_window (requested: sliding_window=4096)",
            "the shared prefix is one pass of all queries over every cached key, whatever lies between them",
            id="a window and cascade",
        ),
        pytest.param(
            ENCODER.evolve(sliding_window=4096),
            "requires causal = True (requested: causal=False)",
            "the kernels have a left edge of the window only, and without a causal mask nothing ends it on the right",
            id="an encoder's window",
        ),
        pytest.param(
            DENSE.evolve(cudagraph="uniform_batch"),
            "requires paged = True (requested: paged=False)",
            "keys that come with the call differ in size from step to step, and a graph does not",
            id="graphs without a cache",
        ),
    ],
)
def test_a_combination_that_no_kernel_has_is_refused_with_its_reason(
    requirements: Requirements, told: str, because: str
) -> None:
    assert refusals(requirements) == [f"{told}: {because}"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alibi", "linear"),
        ("attention_chunk", 8192),
        ("custom_mask", True),
        ("head_size_v", 64),
        ("block_sparse", {"local_blocks": 16}),
        ("dcp_size", 2),
        ("batch_invariant", True),
        ("seq_lens_cpu_kind", "upper_bound"),
        ("seq_lens_cpu_kind", "absent"),
        ("output_quant", "fp8_e4m3"),
        ("features", ("acme.rope_fused",)),
    ],
)
def test_what_is_not_declared_is_refused_by_its_name(field: str, value: object) -> None:
    for variant in BOTH:
        (reason,) = ask(LLAMA.evolve(**{field: value}), HOPPER)[variant].reasons

        assert (reason.code, reason.field) == ("undeclared", field)


def test_scales_per_head_are_refused_with_an_8_bit_cache_too() -> None:
    assert refusals(FP8.evolve(per_head_scales=True)) == ["does not support per_head_scales=True"]


def test_everything_that_stands_against_a_request_is_told_at_once() -> None:
    verdict = ask(GPT_OSS.evolve(logits_soft_cap=30.0, kv_cache_dtype="fp8", cascade=True), TURING)["fa2"]

    assert [reason.field.partition(" and ")[0] for reason in verdict.reasons] == [
        "compute_capability",
        "logits_soft_cap",
        "cascade",
        "sliding_window",
        "sinks",
    ]


@pytest.mark.parametrize(
    ("device", "told"),
    [
        (TURING, "requires compute capability >= 8.0; the device has 7.5"),
        (AMD, "requires vendor nvidia; the device is from amd"),
        (CPU, "requires device type cuda; the device is cpu"),
    ],
    ids=str,
)
def test_a_device_is_refused_by_its_field(device: Device, told: str) -> None:
    assert told in refusals(LLAMA, device=device)


def test_an_8_bit_cache_has_another_way_out_on_hopper() -> None:
    verdict = ask(FP8, HOPPER)["fa3"]

    assert str(verdict.fix) == "request kv_cache_dtype='bfloat16'"


def test_what_is_left_open_is_agreed_on() -> None:
    agreed = ask(LLAMA.evolve(cudagraph="never"), HOPPER)["fa3"].agreement

    assert agreed is not None
    assert (agreed.block_size, agreed.kv_layout, agreed.cudagraph) == (16, "NHD", "uniform_batch")
    assert agreed.options == {"decode_kernel": "auto", "workspace_mib": 256}


@pytest.mark.parametrize(("size", "layout"), [(1, "NHD"), (24, "HND"), (1024, "NHD")])
def test_the_cache_that_a_host_asks_for_is_agreed_on(size: int, layout: str) -> None:
    agreed = ask(LLAMA.evolve(block_size=size, kv_layout=layout), AMPERE)["fa2"].agreement

    assert agreed is not None
    assert (agreed.block_size, agreed.kv_layout) == (size, layout)


def test_a_dense_request_agrees_on_no_graphs() -> None:
    agreed = ask(DENSE, HOPPER)["fa3"].agreement

    assert agreed is not None
    assert (agreed.cudagraph, agreed.block_size) == ("never", None)


@pytest.mark.parametrize(("name", "value"), [("decode_kernel", "fast"), ("workspace_mib", 64), ("tensor_cores", True)])
def test_an_option_that_is_none_is_refused(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=name):
        attnplug.select(LLAMA, HOPPER, options={"flashinfer": {name: value}})


def test_the_extra_installs_what_the_manifest_requires() -> None:
    project = parse_toml((PROJECT / "pyproject.toml").read_text("utf-8"))["project"]
    required = {text for variant in read_manifest(MANIFEST).variants for text in variant.requires}

    assert {text.replace(" ", "") for text in required} == set(project["optional-dependencies"]["library"])
    assert [requirement_name(text) for text in required] == ["flashinfer-python"]


def test_check_finds_nothing_in_the_project() -> None:
    report = examine(str(PROJECT))

    assert report.backends == ("flashinfer",)
    assert report.findings == ()
