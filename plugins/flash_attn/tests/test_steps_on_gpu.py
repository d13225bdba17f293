"""Steps one after another on a GPU: nothing waits, nothing is overwritten too early, graphs replay what was built."""

from __future__ import annotations

import pytest
from attrs import evolve

from attnplug_kit.oracle import Case, check_replays, materialize, padded_for
from plugins.flash_attn.tests.real import (
    FLASH_ATTN,
    FP8,
    GRAPHS,
    GRAPHS_OF_ALL_STEPS,
    SINKS,
    VARIANTS,
    block_of,
    fit,
    skip_unchecked_invariance,
)
from tests.backends import checks

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]

DECODES = Case(query_lens=(1, 1, 1), context_lens=(300, 0, 17), num_q_heads=8, head_size=128, dtype="bfloat16")
CONTEXTS = ((300, 0, 17), (41,), (17, 17), (900, 3))

load_real = FLASH_ATTN.load_fixture()


def decodes_of(case: Case, num_reqs: int) -> list[Case]:
    """Return batches of few requests and of many, in an order in which each leaves something behind for the next."""
    lens = (*CONTEXTS, (200,) * num_reqs, (41,))
    return [
        padded_for(evolve(case, query_lens=(1,) * len(c), context_lens=c, seed=i), num_reqs - len(c))
        for i, c in enumerate(lens)
    ]


@pytest.mark.parametrize("variant", GRAPHS)
@pytest.mark.parametrize("num_reqs", [3, 5, 64])
def test_replays_of_decodes_are_the_oracles(load_real, variant, num_reqs) -> None:
    """What a schedule of more requests has left behind would make blocks write over others' rows."""
    cases = decodes_of(fit(DECODES, variant), num_reqs)
    backend = load_real(cases[0].requirements(cudagraph="uniform_batch", return_lse=True), variant)

    check_replays(backend, [materialize(case) for case in cases], num_reqs=num_reqs, max_seq_len=1024)


@pytest.mark.parametrize("variant", GRAPHS)
@pytest.mark.parametrize("query_len", [2, 4])
def test_replays_of_decodes_of_several_rows_are_the_oracles(load_real, variant, query_len) -> None:
    lens = ((300, 0, 17), (41,), (17, 17, 900, 5), (41,))
    case = fit(DECODES, variant, decode_query_len=query_len)
    cases = [
        padded_for(evolve(case, query_lens=(query_len,) * len(c), context_lens=c, seed=i), 5 - len(c))
        for i, c in enumerate(lens)
    ]
    backend = load_real(cases[0].requirements(cudagraph="uniform_batch", return_lse=True), variant)

    check_replays(backend, [materialize(case) for case in cases], num_reqs=5, max_seq_len=1024)


@pytest.mark.parametrize("variant", GRAPHS_OF_ALL_STEPS)
@pytest.mark.parametrize(
    "required", [{}, {"sliding_window": 9}, {"kv_cache_dtype": "fp8_e4m3", "k_scale": 0.5}], ids=str
)
def test_replays_of_mixed_steps_are_the_oracles(load_real, variant, required) -> None:
    lens = (
        ((1, 1, 40), (300, 0, 17)),
        ((7,), (5,)),
        ((1, 50), (900, 0)),
        ((1, 1, 1, 1), (3, 30, 300, 0)),
        ((64,), (0,)),
    )
    cases = [
        evolve(DECODES, query_lens=q, context_lens=c, seed=i, num_padding_tokens=64 - sum(q), **required)
        for i, (q, c) in enumerate(lens)
    ]
    backend = load_real(cases[0].requirements(cudagraph="always", return_lse=True), variant)

    check_replays(backend, [materialize(case) for case in cases], num_reqs=4, num_tokens=64, max_seq_len=1024)


@pytest.mark.parametrize("variant", SINKS)
def test_replays_with_sinks_are_the_oracles(load_real, variant) -> None:
    for window in (None, 9):
        cases = decodes_of(fit(DECODES, variant, sinks=True, head_size=64, sliding_window=window), 5)
        scenes = [materialize(case) for case in cases]
        scenes = [evolve(scene, sinks=scenes[0].sinks) for scene in scenes]
        backend = load_real(cases[0].requirements(cudagraph="uniform_batch", return_lse=True), variant)
        check_replays(backend, scenes, num_reqs=5, max_seq_len=1024)


@pytest.mark.parametrize("variant", FP8)
def test_replays_over_8_bit_caches_are_the_oracles(load_real, variant) -> None:
    cases = decodes_of(fit(DECODES, variant, kv_cache_dtype="fp8_e4m3", k_scale=0.25, v_scale=3.0), 5)
    backend = load_real(cases[0].requirements(cudagraph="uniform_batch", return_lse=True), variant)

    check_replays(backend, [materialize(case) for case in cases], num_reqs=5, max_seq_len=1024)


@pytest.mark.parametrize("variant", GRAPHS)
@pytest.mark.parametrize("required", [{}, {"decode_query_len": 3}, {"batch_invariant": True}], ids=str)
def test_graphs_of_several_sizes_replay_in_any_order(load_real, variant, required) -> None:
    if "batch_invariant" in required:
        skip_unchecked_invariance(variant)
    checks.check_graph_sizes(load_real, variant, block_size=block_of(variant), **required)


@pytest.mark.parametrize("variant", SINKS)
def test_graphs_with_sinks_replay_in_any_order(load_real, variant) -> None:
    checks.check_graph_sizes(load_real, variant, sinks=True, head_size=64)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("required", [{}, {"decode_query_len": 3}], ids=str)
def test_no_build_waits_for_the_device(load_real, variant, required) -> None:
    level = "uniform_batch" if variant in GRAPHS else "never"
    checks.check_build_does_not_synchronize(
        load_real, variant, block_size=block_of(variant), cudagraph=level, **required
    )


@pytest.mark.parametrize("variant", VARIANTS)
def test_no_forward_waits_for_the_device(load_real, variant) -> None:
    checks.check_forward_does_not_synchronize(load_real, variant, block_size=block_of(variant))


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if block_of(variant) == 16])
def test_no_cascade_waits_for_the_device(load_real, variant) -> None:
    checks.check_cascade_does_not_synchronize(load_real, variant)


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_may_be_built_while_others_run(load_real, variant) -> None:
    checks.check_queued_steps(load_real, variant, fit(DECODES, variant))


@pytest.mark.parametrize("variant", GRAPHS)
@pytest.mark.parametrize("num_q_heads", [4, 16])
def test_replays_may_be_built_while_others_run(load_real, variant, num_q_heads) -> None:
    required = {"num_q_heads": num_q_heads, "block_size": block_of(variant)}
    checks.check_queued_replays(load_real, variant, **required)


@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_made_under_inference_mode_serves_outside(load_real, variant) -> None:
    checks.check_after_inference_mode(load_real, variant, block_size=block_of(variant))
