"""
Calls that the kernel libraries get wrong unless the plugin avoids it, on a GPU, compared with the oracle.

The kit requests every declared value as well. These tests cover what it cannot see: which kernels exist, at which sizes
the library switches between them, and which bugs one of them had.
"""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from attnplug import Requirements
from attnplug.contract import GraphShape, Limits
from attnplug.errors import NoBackendError
from attnplug_kit.oracle import Case, check, materialize
from plugins.flash_attn.tests.real import (
    ALIBI,
    BATCH_INVARIANT,
    FLASH_ATTN,
    FP8,
    SINKS,
    SOFT_CAP,
    VARIANTS,
    block_of,
    fit,
    pages_of,
    skip_unchecked_invariance,
)
from tests.backends import checks
from tests.backends.harness import Harness

pytestmark = pytest.mark.gpu

MIXED = Case(query_lens=(1, 1, 1, 40), context_lens=(300, 0, 17, 5), num_q_heads=8, head_size=128, dtype="bfloat16")
DECODES = evolve(MIXED, query_lens=(1, 1, 1), context_lens=(300, 0, 17))
STEPS = pytest.mark.parametrize("step", [MIXED, DECODES], ids=["mixed", "decodes"])

load_real = FLASH_ATTN.load_fixture()


# -- pages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "size"), [(variant, size) for variant in VARIANTS for size in pages_of(variant)])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_pages_of_every_size_are_read_in_both_layouts(load_real, variant, size, layout) -> None:
    """Slots that were never written hold NaN: a kernel that reads full pages or tiles multiplies them by 0."""
    case = fit(MIXED, variant, block_size=size)

    check(load_real(case.requirements(return_lse=True, kv_layout=layout), variant), materialize(case))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("group", [1, 4, 5, 16])
@pytest.mark.parametrize("head_size", [64, 96, 256])
def test_heads_of_other_sizes_and_groups(load_real, variant, group, head_size) -> None:
    case = fit(MIXED, variant, num_q_heads=2 * group, head_size=head_size)

    check(load_real(case.requirements(return_lse=True), variant), materialize(case))


@pytest.mark.parametrize("size", [16, 256])
@pytest.mark.parametrize("head_size", [48, 80, 96, 112])
@pytest.mark.parametrize("window", [None, 200])
def test_fa4_copies_whole_tiles_of_pages(load_real, head_size, size, window) -> None:
    """Each of these heads is copied in other steps; without a mask, tiles of two of them would not be filled."""
    case = fit(MIXED, "fa4", head_size=head_size, block_size=size, sliding_window=window)

    check(load_real(case.requirements(return_lse=True), "fa4"), materialize(case))


@pytest.mark.parametrize(
    "required",
    [
        {"head_size": 160},
        {"head_size": 80, "cascade": True, "return_lse": True},
        {"head_size": 96, "attn_type": "encoder_decoder"},
    ],
    ids=str,
)
def test_fa4_refuses_tiles_that_it_copies_in_part(load_real, required) -> None:
    """Wrong numbers on Hopper, or an illegal memory access: never to be tried here."""
    FLASH_ATTN.skip_if_missing("fa4")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("these rules are about the kernels for Hopper")

    with pytest.raises(NoBackendError, match=r"do\s+not\s+add\s+up\s+to"):
        load_real(Requirements(num_q_heads=8, num_kv_heads=2, dtype="bfloat16", **required), "fa4")


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("lens", [((1,), (5000,)), ((1,) * 3, (5000, 3, 700)), ((30,), (2500,)), ((2, 600), (40, 900))])
def test_keys_by_far_more_than_queries_are_all_read(load_real, variant, lens) -> None:
    """Long contexts are split; the longest keys of a prompt's chunk are its context's, not the chunk's."""
    case = fit(MIXED, variant, query_lens=lens[0], context_lens=lens[1])

    check(load_real(case.requirements(return_lse=True), variant), materialize(case))


# -- latents ---------------------------------------------------------------------------------------------------------

LATENT = evolve(MIXED, num_kv_heads=1, head_size=576, head_size_v=512, latent=True)
SPLIT = evolve(LATENT, query_lens=(1, 4, 2), context_lens=(5000, 2500, 700))


@pytest.mark.parametrize("sizes", [(576, 512), (320, 256)], ids=str)
@pytest.mark.parametrize("block_size", [16, 48, 64, 96, 256])
@pytest.mark.parametrize("heads", [1, 16, 128])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_latents(load_real, dtype, heads, block_size, sizes) -> None:
    """Pages of 64 and 96 are tiles of their kernels, which load full ones for many heads without padding."""
    for step in (LATENT, evolve(LATENT, query_lens=(1, 1, 1), context_lens=(300, 0, 17)), SPLIT):
        case = evolve(step, head_size=sizes[0], head_size_v=sizes[1], num_q_heads=heads, dtype=dtype)
        case = evolve(case, block_size=block_size)
        check(load_real(case.requirements(return_lse=True), "fa3_vllm"), materialize(case))


@pytest.mark.parametrize("sizes", [(576, 512), (320, 256)], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 9},
        {"sliding_window": 128},
        {"logits_soft_cap": 2.0, "gain": 4.0},
        {"logits_soft_cap": 2.0, "gain": 4.0, "sliding_window": 9},
        {"causal": False},
        {"query_lens": (70, 300, 1), "context_lens": (0, 0, 0)},
    ],
    ids=str,
)
def test_latents_with_other_features(load_real, changes, sizes) -> None:
    for heads in (16, 128):
        case = evolve(LATENT, num_q_heads=heads, head_size=sizes[0], head_size_v=sizes[1], **changes)
        check(load_real(case.requirements(return_lse=True), "fa3_vllm"), materialize(case))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize(("head_size", "head_size_v"), [(192, 128), (256, 256)])
def test_uncompressed_latents(load_real, head_size, head_size_v, paged, causal, dtype) -> None:
    case = evolve(MIXED, num_kv_heads=8, head_size=head_size, head_size_v=head_size_v, causal=causal, dtype=dtype)

    check(load_real(case.requirements(paged=paged, return_lse=True), "fa3_vllm"), materialize(case))


def test_quantized_keys_of_192_with_values_of_128(load_real) -> None:
    case = evolve(MIXED, head_size=192, head_size_v=128, kv_cache_dtype="fp8_e4m3", k_scale=0.3, v_scale=0.7)

    check(load_real(case.requirements(return_lse=True), "fa3_vllm"), materialize(case))


# -- windows, soft caps, ALiBi, sinks ------------------------------------------------------------------------------


@STEPS
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("window", [1, 9, 128])
def test_windows(load_real, variant, step, window) -> None:
    """No bound is None for one library, and -1 for the others."""
    case = fit(step, variant, sliding_window=window)

    check(load_real(case.requirements(return_lse=True), variant), materialize(case))


@pytest.mark.parametrize("variant", VARIANTS)
def test_windows_of_encoders_reach_to_both_sides(load_real, variant) -> None:
    case = fit(MIXED, variant, query_lens=(40, 1, 300), context_lens=(0,) * 3, attn_type="encoder_only", causal=False)
    case = evolve(case, sliding_window=9)

    check(load_real(case.requirements(return_lse=True), variant), materialize(case))


@STEPS
@pytest.mark.parametrize("variant", SOFT_CAP)
def test_soft_caps(load_real, variant, step) -> None:
    for window in (None, 9):
        case = fit(step, variant, logits_soft_cap=2.0, gain=4.0, sliding_window=window)
        check(load_real(case.requirements(return_lse=True), variant), materialize(case))


@STEPS
@pytest.mark.parametrize("variant", ALIBI)
def test_alibi(load_real, variant, step) -> None:
    for window in (None, 9):
        case = fit(step, variant, alibi="linear", sliding_window=window)
        check(load_real(case.requirements(), variant), materialize(case))


@STEPS
@pytest.mark.parametrize("variant", SINKS)
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize("window", [None, 9])
def test_sinks_count(load_real, variant, step, head_size, window) -> None:
    case = fit(step, variant, sinks=True, head_size=head_size, sliding_window=window)
    backend, scene = load_real(case.requirements(return_lse=True), variant), materialize(case)
    outputs = [check(backend, evolve(scene, sinks=sinks)).output for sinks in (scene.sinks, scene.sinks + 3.0)]

    assert not torch.equal(*outputs)


@pytest.mark.parametrize("variant", SINKS)
def test_sinks_count_for_64_heads(load_real, variant) -> None:
    case = fit(MIXED, variant, sinks=True, num_q_heads=64, num_kv_heads=8, head_size=64)

    check(load_real(case.requirements(return_lse=True), variant), materialize(case))


# -- logarithms of sums --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_lse_of_a_single_key_is_its_score(load_real, variant) -> None:
    checks.check_lse_of_single_key(load_real, variant, fit(MIXED, variant))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_kv_heads", [8, 2, 1])
def test_the_lse_is_right_for_each_head_and_row(load_real, variant, num_kv_heads) -> None:
    """Where heads are folded into rows, a library may return them in an order that its shape does not show."""
    case = fit(DECODES, variant, query_lens=(1,) * 5, context_lens=(300, 0, 17, 64, 200), num_kv_heads=num_kv_heads)

    check(load_real(case.requirements(return_lse=True), variant), materialize(case))


# -- FP8 KV caches -------------------------------------------------------------------------------------------------


@STEPS
@pytest.mark.parametrize("variant", FP8)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("per_head", [False, True], ids=["per layer", "per head"])
def test_8_bit_caches_are_read_with_their_scales(load_real, variant, step, layout, per_head) -> None:
    scales = {"k_scale": 0.25, "v_scale": 3.0, "per_head_scales": per_head}
    case = fit(step, variant, kv_cache_dtype="fp8_e4m3", **scales)
    backend = load_real(case.requirements(return_lse=True, kv_layout=layout), variant)

    check(backend, materialize(case))
    check(backend, materialize(case), host_writes=True)


@pytest.mark.parametrize("variant", FP8)
def test_8_bit_caches_beside_windows_and_soft_caps(load_real, variant) -> None:
    for required in ({"sliding_window": 9}, {"logits_soft_cap": 5.0}, {"head_size": 64, "num_q_heads": 32}):
        case = fit(MIXED, variant, kv_cache_dtype="fp8_e4m3", k_scale=0.25, v_scale=3.0, **required)
        check(load_real(case.requirements(return_lse=True), variant), materialize(case))


def test_8_bit_caches_beside_sinks(load_real) -> None:
    case = evolve(MIXED, kv_cache_dtype="fp8_e4m3", k_scale=0.5, v_scale=2.0, sinks=True, head_size=64)

    check(load_real(case.requirements(return_lse=True), "fa3_vllm"), materialize(case))


# -- kinds of requests ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("query_lens", [(4, 4, 4), (4, 2, 1), (1, 4, 4)])
def test_every_row_of_a_decode_is_written(load_real, variant, query_lens) -> None:
    case = fit(MIXED, variant, query_lens=query_lens, context_lens=(300, 0, 17), decode_query_len=4)

    check(load_real(case.requirements(return_lse=True), variant), materialize(evolve(case, num_padding_tokens=3)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_encoder_keys_are_read_from_the_cache_after_the_first_step(load_real, variant) -> None:
    case = fit(MIXED, variant, query_lens=(1, 1, 7), context_lens=(5, 30, 0), attn_type="encoder_decoder", causal=False)
    case = evolve(case, encoder_lens=(40, 3, 90))

    check(load_real(case.requirements(return_lse=True), variant), materialize(case))


@pytest.mark.parametrize("variant", VARIANTS)
def test_float16_and_encoders(load_real, variant) -> None:
    """Requests of one dtype after those of the other: what is compiled for one is not taken for the other."""
    for dtype in ("bfloat16", "float16"):
        case = fit(MIXED, variant, dtype=dtype)
        check(load_real(case.requirements(return_lse=True), variant), materialize(case))
    case = evolve(case, query_lens=(40, 1, 300), context_lens=(0, 0, 0), attn_type="encoder", causal=False)
    check(load_real(case.requirements(paged=False, return_lse=True), variant), materialize(case))


@pytest.mark.parametrize("variant", VARIANTS)
def test_keys_of_another_layer_are_read(load_real, variant) -> None:
    case = fit(MIXED, variant, kv_sharing=True)

    check(load_real(case.requirements(return_lse=True), variant), materialize(case))


@pytest.mark.parametrize("variant", VARIANTS)
def test_padded_requests_may_be_anywhere(load_real, variant) -> None:
    checks.check_padded_requests(load_real, variant, fit(MIXED, variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_dense_calls_and_profiling_runs(load_real, variant) -> None:
    checks.check_dense_calls(load_real, variant, fit(MIXED, variant))
    checks.check_profiling_run(load_real, variant, computes=False, block_size=block_of(variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_an_output_that_is_not_contiguous_is_written_where_it_is(load_real, variant) -> None:
    checks.check_strided_output(load_real, variant, block_size=block_of(variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_groups_with_different_windows_share_a_state(load_real, variant) -> None:
    """Each group has its own schedules, where there are schedules."""
    checks.check_shared_state(load_real, variant, fit(MIXED, variant))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("required", [{}, {"cascade": True, "return_lse": True}, {"decode_query_len": 3}], ids=str)
def test_warm_up_runs(load_real, variant, required) -> None:
    harness = Harness(load_real, variant=variant, head_size=128, block_size=block_of(variant), **required)

    harness.backend.warmup([GraphShape(4, 4, 1)])


# -- batch invariance ----------------------------------------------------------------------------------------------

LENGTHS = (4096, 3000, 3, 4096, 2048, 17, 4000, 1)


class Long(Harness):
    """Room for a batch of LENGTHS."""

    limits = Limits(max_num_reqs=8, max_num_tokens=64, max_seq_len=4096)


@pytest.mark.parametrize("variant", BATCH_INVARIANT)
def test_a_request_has_the_same_bits_in_every_batch(load_real, variant) -> None:
    skip_unchecked_invariance(variant)
    required = {"head_size": 128, "block_size": block_of(variant)}

    assert _bits_that_differ(Long(load_real, variant=variant, batch_invariant=True, **required)) == 0


def test_without_batch_invariance_bits_depend_on_the_batch(load_real) -> None:
    """Otherwise the test before this one would show nothing."""
    assert _bits_that_differ(Long(load_real, variant="fa3_vllm", head_size=128)) > 0


def _bits_that_differ(harness: Harness) -> int:
    """Return how many requests have other bits alone than together."""
    rows = [torch.randn(8, heads, 128, device=harness.backend.device).bfloat16() for heads in (4, 2, 2)]
    size = harness.backend.agreement.block_size
    cache = harness.backend.make_cache(1 + len(LENGTHS) * max(LENGTHS) // size)
    for pages in (cache.k, cache.v):
        pages.normal_()
    together = run(harness, cache, harness.batch([1] * 8, LENGTHS), rows)
    first, differing = 1, 0
    for request, length in enumerate(LENGTHS):
        alone = harness.batch([1], [length], first_block=first)
        found = run(harness, cache, alone, [row[request : request + 1] for row in rows])
        differing += not torch.equal(found[0], together[request])
        first += -(-length // size)
    return differing


def run(harness, cache, batch, rows):
    impl = harness.impls[0]
    output = rows[0].new_empty(batch.num_actual_tokens, impl.output_width)
    impl.forward(*rows, cache, harness.builder.build(batch), output)
    return output
