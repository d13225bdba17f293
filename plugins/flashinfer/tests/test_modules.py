"""The probe names exactly the modules that get loaded."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from attnplug import Agreement, Device
from attnplug.contract import Batch, GraphShape, Layer
from attnplug_flashinfer.prebuilt import needed_modules
from plugins.flashinfer.tests.agreements import agreed
from tests.backends.harness import BLOCK, Harness
from tests.examples import examples

if TYPE_CHECKING:
    from collections.abc import Iterator

FORM = (
    "dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_qk_128_head_dim_vo_128_posenc_0_"
    "use_swa_False_use_logits_cap_False"
)
NAMES = {
    "prefill": f"batch_prefill_with_kv_cache_{FORM}_f16qk_False",
    "prefill_sm90": f"batch_prefill_with_kv_cache_{FORM}_f16qk_False_sm90",
    "decode": f"batch_decode_with_kv_cache_{FORM}",
    "cascade": "cascade",
    "sink": "batch_prefill_attention_sink_bf16_swa_False_fa2_head_128_128",
    "sink_sm90": "batch_prefill_attention_sink_bf16_swa_False_fa3_head_128_128",
}
LATENT = "batch_mla_attention_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_head_dim_ckv_512_head_dim_kpe_64"
NAMES |= {"latent": f"{LATENT}_profiler_False", "latent_sm90": f"{LATENT}_profiler_False_sm90"}
NAMES["latent_fp8_0_7"] = f"{LATENT}_profiler_False_planabi2_sm90".replace("dtype_kv_bf16", "dtype_kv_e4m3")
LATENTS = {"latent": True, "head_size": 576, "head_size_v": 512, "num_q_heads": 16, "num_kv_heads": 1}
DECODING = {"phases": ("decode",)}
H200 = Device.cuda("9.0")
PAIRS = {"num_q_heads": 16}  # groups of 2 decode on CUDA cores on every device
THREES = {"num_q_heads": 24}


@pytest.mark.parametrize(
    ("agreement", "named"),
    [
        (agreed(**PAIRS), ["decode", "prefill"]),
        (agreed(kernel="tensor_cores", **PAIRS), ["prefill"]),
        (agreed(**DECODING, **PAIRS), ["decode", "prefill"]),  # a decode after a padded request runs as a prefill
        (agreed(cascade=True, **PAIRS), ["decode", "prefill", "cascade"]),
        (agreed(paged=False, **PAIRS), ["prefill"]),
        (agreed(sinks=True, **PAIRS), ["sink"]),
        (agreed("fa3", **PAIRS), ["decode", "prefill_sm90"]),
        (agreed("fa3", kernel="tensor_cores", **PAIRS), ["prefill", "prefill_sm90"]),
        (agreed("fa3", **THREES), ["prefill", "prefill_sm90"]),  # on Hopper, groups of 3 decode on tensor cores
        (agreed("fa3", cascade=True, **PAIRS), ["decode", "prefill", "prefill_sm90", "cascade"]),
        (agreed("fa3", decode_query_len=3, **PAIRS), ["decode", "prefill", "prefill_sm90"]),
        (agreed("fa3", paged=False, **PAIRS), ["prefill_sm90"]),
        (agreed("fa3", sinks=True, **PAIRS), ["sink", "sink_sm90"]),
        (agreed("fa3", sinks=True, **DECODING, **PAIRS), ["sink"]),
        (agreed(**LATENTS), ["latent"]),
        (agreed("fa3", **LATENTS), ["latent_sm90"]),
        (
            agreed("fa3", **DECODING, **PAIRS),
            ["decode", "prefill", "prefill_sm90"],
        ),  # the last is for profiling
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else value.variant,
)
def test_the_modules_of_an_agreement(agreement: Agreement, named: list[str]) -> None:
    assert needed_modules(agreement, H200) == tuple(NAMES[name] for name in named)


@pytest.mark.parametrize("version", ["0.7.0", "0.10.2"])
def test_modules_have_other_names_since_0_7(monkeypatch, version) -> None:
    """As on an H200 with 0.7.2, which is what it compiled."""
    monkeypatch.setattr("attnplug_flashinfer.prebuilt.version", lambda name: version)

    assert needed_modules(agreed("fa3", "fp8_e4m3", **LATENTS), H200) == (NAMES["latent_fp8_0_7"],)
    names = (NAMES["decode"], NAMES["prefill"] + "_kv_stride_equal", NAMES["prefill_sm90"])
    assert needed_modules(agreed("fa3", decode_query_len=3, **PAIRS), H200) == names


def test_window_soft_cap_and_cache_dtype_are_in_the_names() -> None:
    agreement = agreed("fa2", "fp8_e5m2", "cuda_cores", sliding_window=512, logits_soft_cap=50.0, **PAIRS)
    decode, prefill, profiling = needed_modules(agreement, H200)

    assert all("use_swa_True_use_logits_cap_True" in name for name in (decode, prefill, profiling))
    assert ["dtype_kv_e5m2" in name for name in (decode, prefill, profiling)] == [True, True, False]
    assert "dtype_kv_bf16" in profiling  # a profiling run has no KV cache


@st.composite
def layers(draw: st.DrawFn) -> tuple[str, str, dict[str, Any]]:
    """Draw a variant, a decode kernel and requirements that the manifest supports."""
    variant, sinks = draw(st.sampled_from(("fa2", "fa3"))), draw(st.booleans())
    paged = sinks or draw(st.integers(0, 3)) > 0
    required = {"dtype": draw(st.sampled_from(("bfloat16", "float16"))), "head_size": draw(st.sampled_from((64, 128)))}
    required |= {"num_q_heads": 2 * draw(st.sampled_from((1, 4, 5))), "sinks": sinks, "paged": paged}
    required["sliding_window"] = draw(st.sampled_from((None, 1, 9)))
    if not sinks:
        required["logits_soft_cap"] = draw(st.sampled_from((None, 5.0)))
    if not paged:
        return variant, "auto", {**required, "block_size": None}
    required["phases"] = draw(st.sampled_from((("prefill", "decode"), ("decode",), ("prefill",))))
    required["return_lse"] = draw(st.booleans())
    if "decode" in required["phases"]:
        required["decode_query_len"], required["cudagraph"] = draw(st.sampled_from((1, 3))), "uniform_batch"
    if not sinks and required["sliding_window"] is None:
        required["cascade"] = draw(st.booleans())
    if not sinks and variant == "fa2":
        required["kv_cache_dtype"] = draw(st.sampled_from(("auto", "fp8_e4m3", "fp8_e5m2")))
    kernels = ["auto", "tensor_cores"] + ["cuda_cores"] * (not sinks and required["num_q_heads"] != 10)
    return variant, draw(st.sampled_from(kernels)), required


def make_harness(load: Any, variant: str, kernel: str, required: dict[str, Any]) -> Harness:
    """Return a layer with these requirements, and its builder."""
    load = partial(load, options={"flashinfer_fake": {"decode_kernel": kernel}})
    sinks = torch.zeros(required["num_q_heads"]) if required["sinks"] else None
    return Harness(load, [Layer(name="layers.0", sinks=sinks)], variant, **required)


def run(harness: Harness, batch: Batch) -> None:
    """Build and run a step."""
    impl, required = harness.impls[0], harness.backend.agreement.requirements
    dtype, tokens = getattr(torch, required.dtype), batch.num_actual_tokens
    query, rows = (
        torch.zeros(tokens, n, required.head_size, dtype=dtype) for n in (required.num_q_heads, required.num_kv_heads)
    )
    lse = torch.zeros(tokens, required.num_q_heads) if required.return_lse else None
    cache = harness.backend.make_cache(16) if required.paged else None
    output = query.new_empty(tokens, impl.output_width)
    impl.forward(query, rows, rows, cache, harness.builder.build(batch), output, lse=lse)


def steps(harness: Harness) -> Iterator[Batch]:
    """Yield steps of every kind that the agreement allows, with padded requests and shared prefixes."""
    required = harness.backend.agreement.requirements
    if not required.paged:
        yield Batch.from_lengths([3, 1])
        return
    longest = required.decode_query_len
    lens = [[1], [1, 1], [0, 1], [1, 0, 1], [longest, 1], [1, longest, 0, longest]]
    if "prefill" in required.phases:
        lens += [[1, longest + 4], [longest + 1], [0, 5], [1, 0, longest, 7]]
    for query_lens in lens:
        seq_lens = [length and length + 2 * BLOCK for length in query_lens]
        yield harness.batch(query_lens, seq_lens)
        if required.cascade and all(query_lens):
            batch = harness.batch(query_lens, seq_lens)
            batch.block_table[:, :2] = torch.tensor([1, 2], dtype=torch.int32)
            yield Batch(**{**batch.to_dict(), "common_prefix_len": 2 * BLOCK})


def loaded(journal: Any) -> set[str]:
    """Return the names of the modules that were loaded since the last call."""
    names = set(journal.modules)
    journal.clear()
    return names


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layers())
def test_warm_up_and_profiling_load_the_modules_of_all_steps(
    load_fake: Any, journal: Any, layer: tuple[str, str, dict[str, Any]]
) -> None:
    harness = make_harness(load_fake, *layer)
    required = harness.backend.agreement.requirements
    journal.clear()
    harness.backend.warmup([GraphShape(4, 4, 1)])
    warmed = loaded(journal)
    for batch in steps(harness):
        run(harness, batch)
    stepped = loaded(journal)
    for query_len in {1, required.decode_query_len} if required.cudagraph != "never" else ():
        harness.graph(2, query_len)
    captured = loaded(journal)
    query, rows = (
        torch.zeros(4, heads, required.head_size, dtype=getattr(torch, required.dtype))
        for heads in (required.num_q_heads, required.num_kv_heads)
    )
    harness.impls[0].forward(query, rows, rows, None, None, query.flatten(1).clone())
    profiled = loaded(journal)

    assert warmed == stepped
    assert captured <= warmed
    assert warmed | profiled == set(needed_modules(harness.backend.agreement, harness.backend.device_properties))
