"""Latents: one plan per step, heads and steps whose tiles the library supports, and both forms of its API."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from attrs import evolve

import attnplug
from attnplug import Requirements
from attnplug.contract import Layer, Limits
from attnplug.errors import BatchError, SettingsError
from attnplug_kit.oracle import Case, check, check_replays, materialize, padded_for
from tests.backends.harness import Harness

LATENT = "BatchMLAPagedAttentionWrapper"
SMALL: dict[str, Any] = {"latent": True, "head_size": 192, "head_size_v": 128, "num_kv_heads": 1, "num_q_heads": 8}
LARGE: dict[str, Any] = {"head_size": 576, "head_size_v": 512}
MIXED = Case(query_lens=(1, 1, 40, 3), context_lens=(77, 16, 0, 33), dtype="bfloat16", scale=0.07, **SMALL)
DECODES = evolve(MIXED, query_lens=(1, 1), context_lens=(20, 7))
WIDE = evolve(MIXED, num_q_heads=128)
VARIANTS = ["fa2", "fa3"]


def harness(load: Any, variant: str = "fa2", **required: Any) -> Harness:
    sizes = LARGE if variant == "fa3" else {}  # which has no smaller latents in 0.6.12
    return Harness(load, [Layer(name="layers.0", scale=0.07)], variant, **{**SMALL, **sizes, **required})


class Long(Harness):
    limits = Limits(max_num_reqs=8, max_num_tokens=1 << 15, max_seq_len=1 << 15)


@pytest.mark.parametrize("variant", VARIANTS)
def test_decodes_and_prefills_are_one_plan(load_fake, journal, variant) -> None:
    made = harness(load_fake, variant)
    made.builder.build(made.batch([1, 1, 5], [9, 40, 5]))

    (plan,) = journal.plans
    assert plan.owner == LATENT
    assert plan.arguments["causal"] is True
    assert [call.arguments["backend"] for call in journal.of("__init__")] == [variant]


def test_single_rows_have_no_mask(load_fake, journal) -> None:
    made = harness(load_fake)
    made.builder.build(made.batch([1, 1], [9, 40]))

    assert [plan.arguments["causal"] for plan in journal.plans] == [False]


@pytest.mark.parametrize(("heads", "planned_heads"), [(1, 1), (5, 8), (20, 32), (64, 64), (96, 128)])
def test_heads_are_padded_to_a_power_of_two(load_fake, journal, heads, planned_heads) -> None:
    case = evolve(MIXED, num_q_heads=heads)
    check(load_fake(case.requirements(return_lse=True)), materialize(case))

    assert {plan.arguments["num_heads"] for plan in journal.plans} == {planned_heads}


@pytest.mark.parametrize("query_lens", [(0, 0, 0, 3), (3, 0, 0, 0), (0, 2, 0, 0, 0), (0, 0, 0, 1)])
def test_requests_without_rows_are_not_planned_for_wide_layers(load_fake, query_lens) -> None:
    """The fake refuses a plan whose tiles end between the heads of a row, as those of few rows of 128 heads do."""
    context_lens = tuple(40 * (length > 0) for length in query_lens)

    check(
        load_fake(WIDE.requirements(return_lse=True)),
        materialize(evolve(WIDE, query_lens=query_lens, context_lens=context_lens)),
    )


def test_a_step_with_more_tiles_than_a_plan_is_refused(load_fake, journal) -> None:
    made = Long(load_fake, [Layer(name="layers.0", scale=0.07)], **{**SMALL, "num_q_heads": 128})
    made.builder.build(made.batch([16_000]))
    with pytest.raises(BatchError, match=r"(?s)at most 16128 tiles of 128 .* at most 16128 tokens"):
        made.builder.build(made.batch([10_000, 6_200]))

    assert len(journal.plans) == 1


def test_few_heads_have_longer_steps(load_fake, journal) -> None:
    made = Long(load_fake, [Layer(name="layers.0", scale=0.07)], **SMALL)
    made.builder.build(made.batch([20_000]))

    assert len(journal.plans) == 1


def test_calls_without_lse_run_plans_that_have_it(load_fake, journal) -> None:
    backend = load_fake(MIXED.requirements(return_lse=True))
    scene = materialize(MIXED)
    check(backend, scene)
    journal.clear()
    made = harness(load_fake, return_lse=True)
    run(made, made.batch([3], [20]))

    assert [call.arguments["return_lse"] for call in journal.runs] == [True]


def run(made: Harness, batch: Any) -> torch.Tensor:
    """Build and run a step without an LSE, and return its output."""
    metadata, impl = made.builder.build(batch), made.impls[0]
    query = torch.randn(batch.num_actual_tokens, 8, 192).bfloat16()
    output = query.new_empty(batch.num_actual_tokens, impl.output_width)
    impl.forward(query, query[:, :1].contiguous(), None, made.backend.make_cache(16), metadata, output)
    return output


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize(
    "case",
    [MIXED, WIDE, evolve(MIXED, head_size=128, head_size_v=None), evolve(MIXED, causal=False)],
    ids=["mixed", "wide", "no_rotary", "not_causal"],
)
def test_the_api_of_0_7(load_fake, library_at, variant, return_lse, case) -> None:
    with library_at("0.7.2"):
        check(load_fake(case.requirements(return_lse=return_lse), variant), materialize(case))


@pytest.mark.parametrize("case", [MIXED, evolve(MIXED, num_q_heads=5), DECODES], ids=["mixed", "5_heads", "decodes"])
def test_latents_in_fp8(load_fake, library_at, journal, case) -> None:
    case = evolve(case, kv_cache_dtype="fp8_e4m3", k_scale=0.1, **LARGE)
    with library_at("0.7.2"):
        check(load_fake(case.requirements(return_lse=True), "fa3"), materialize(case))

    for run in journal.runs:
        assert [run.arguments[name] for name in ("ckv_scale", "kpe_scale")] == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize("query_len", [1, 3])
def test_graphs_with_the_api_of_0_7(load_fake, library_at, query_len) -> None:
    case = evolve(DECODES, query_lens=(query_len,) * 2, decode_query_len=query_len)
    with library_at("0.7.2"):
        backend = load_fake(case.requirements(cudagraph="uniform_batch", return_lse=True))
        scenes = [materialize(padded_for(evolve(case, seed=seed), spare=1)) for seed in (1, 2)]
        check_replays(backend, scenes, num_reqs=3, max_seq_len=64)


@pytest.mark.parametrize(
    ("version", "changed", "reason"),
    [
        ("0.6.10", {}, "older kernels leave rows without keys unwritten"),
        ("0.6.12", {"head_size": 128}, "without rotary elements, the scores of older kernels"),
        ("0.6.17", {"head_size": 128}, "without rotary elements, the scores of older kernels"),
    ],
)
def test_older_releases_are_refused(library_at, version, changed, reason) -> None:
    refused = verdicts(library_at, version, **changed)

    assert [verdict.status for verdict in refused] == ["refused", "refused"]
    assert all(reason in str(verdict.reasons[0]) for verdict in refused)


@pytest.mark.parametrize(
    ("version", "changed", "reason"),
    [
        ("0.7.1", {}, "older Hopper kernels for latents of fewer than 512 elements read illegal addresses"),
        ("0.6.18", {"kv_cache_dtype": "fp8_e4m3", **LARGE}, "FP8 latents need plans of 0.7, which declare scales"),
        ("0.7.2", {"kv_cache_dtype": "fp8_e4m3"}, "the kernels for FP8 latents have 512 elements"),
        ("0.7.2", {"kv_cache_dtype": "fp8_e5m2", **LARGE}, "fp8_e5m2"),
    ],
)
def test_hopper_kernels_for_latents_are_refused(library_at, version, changed, reason) -> None:
    fa3 = verdicts(library_at, version, **changed)[-1]

    assert (fa3.id, fa3.status) == ("flashinfer_fake/fa3", "refused")
    assert reason in str(fa3.reasons[0])


def verdicts(library_at: Any, version: str, **changed: Any) -> list[Any]:
    """Return the verdicts about a request for latents of both variants, fa3 last."""
    with library_at(version):
        requirements = MIXED.requirements().evolve(**changed)
        explanation = attnplug.explain(requirements, "cpu", backend="flashinfer_fake")
    found = [verdict for verdict in explanation.verdicts if verdict.id.startswith("flashinfer_fake/")]
    return sorted(found, key=lambda verdict: verdict.id)


def test_latents_run_on_tensor_cores_only(load_fake) -> None:
    with pytest.raises(SettingsError, match="the kernels for latents run on tensor cores"):
        load_fake(
            Requirements(dtype="bfloat16", **SMALL), options={"flashinfer_fake": {"decode_kernel": "cuda_cores"}}
        ).make_impl(Layer(name="l", scale=0.1))


def test_profiling_makes_the_wrapper_only(load_fake, journal) -> None:
    impl = harness(load_fake).impls[0]
    journal.clear()
    query = torch.randn(9, 8, 192).bfloat16()
    impl.forward(query, query[:, :1].contiguous(), None, None, None, torch.zeros(9, 1024, dtype=torch.bfloat16))

    assert [call.owner for call in journal.calls] == [LATENT]


def planned(backend: str = "fa2", **changed: Any) -> Any:
    """Plan two requests of 3 rows and 1, with 6 keys on 2 pages and 3 on 1, and return the fake's wrapper."""
    wrapper = import_module("flashinfer").BatchMLAPagedAttentionWrapper(
        torch.zeros(1 << 12, dtype=torch.uint8), backend=backend
    )
    arguments = {
        "qo_indptr": int32(0, 3, 4), "kv_indptr": int32(0, 2, 3), "kv_indices": int32(5, 2, 7),
        "kv_len_arr": int32(6, 3), "num_heads": 8, "head_dim_ckv": 512, "head_dim_kpe": 64, "page_size": 4,
        "causal": True, "sm_scale": 0.1, "q_data_type": torch.bfloat16, "kv_data_type": torch.bfloat16,
    }  # fmt: skip
    wrapper.plan(**{**arguments, **changed})
    return wrapper


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


REFUSED = {
    "lengths_of_other_pages": ({"kv_len_arr": int32(9, 3)}, r"last_page_len\[0\]=5"),
    "latents_of_448": ({"head_dim_ckv": 448}, "latents of 448"),
    "rotary_32": ({"head_dim_kpe": 32}, "latents of 512 and 32"),
    "no_rotary": ({"head_dim_kpe": 0}, "latents without rotary elements in 0.6.12"),
    "too_wide": ({"head_dim_kpe": 128}, "latents of 512 and 128"),
    "fp8": ({"kv_data_type": torch.float8_e4m3fn}, "latents of torch.float8_e4m3fn"),
    "heads_of_20": ({"num_heads": 20, "qo_indptr": int32(0, 9, 10)}, "tiles of 128 end between the 20 heads of a row"),
    "too_many_tiles": (
        {"num_heads": 128, "qo_indptr": int32(0, 16_200, 16_201)},
        "16201 tiles are written into lists of 16384",
    ),
}


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("wrong", REFUSED)
def test_the_fake_refuses_plans(wrong) -> None:
    changed, message = REFUSED[wrong]
    with pytest.raises(AssertionError, match=message):
        planned(**changed)


@pytest.mark.usefixtures("fakes")
def test_the_fake_refuses_latents_of_384_on_fa3() -> None:
    planned(head_dim_ckv=384)
    with pytest.raises(AssertionError, match="fa3 with latents of 384"):
        planned("fa3", head_dim_ckv=384)
