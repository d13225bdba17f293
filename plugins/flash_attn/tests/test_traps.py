"""What the GPU tests check of each library holds on its double: the checks themselves run where there is no GPU."""

from __future__ import annotations

import pytest

from attnplug import Requirements
from attnplug.errors import NoBackendError
from attnplug_kit.oracle import Case, check, materialize
from plugins.flash_attn.tests.real import (
    ALIBI,
    BATCH_INVARIANT,
    FP8,
    GRAPHS,
    GRAPHS_OF_ALL_STEPS,
    SINKS,
    SOFT_CAP,
    SPREADING,
    VARIANTS,
    block_of,
    fit,
)
from tests.backends import steps, traps

pytestmark = pytest.mark.usefixtures("doubled")

MIXED = Case(query_lens=(1, 1, 1, 30), context_lens=(60, 0, 17, 5), num_q_heads=8, head_size=64, dtype="bfloat16")


ASKED = {"head_size": 128, "num_q_heads": 8, "num_kv_heads": 2, "dtype": "bfloat16"}
TABLES = (
    ({"sinks": True}, SINKS),
    ({"alibi": "linear"}, ALIBI),
    ({"kv_cache_dtype": "fp8_e4m3"}, FP8),
    ({"logits_soft_cap": 30.0}, SOFT_CAP),
    ({"cudagraph": "uniform_batch"}, GRAPHS),
    ({"cudagraph": "always"}, GRAPHS_OF_ALL_STEPS),
    ({"batch_invariant": True}, BATCH_INVARIANT),
    ({"cascade": True, "return_lse": True}, VARIANTS),
    ({"dcp_size": 2}, SPREADING),
)


@pytest.mark.parametrize(("asked", "variants"), TABLES, ids=str)
def test_the_tables_of_the_gpu_tests_are_those_of_the_manifest(load_doubled, asked, variants) -> None:
    serving = set()
    for variant in VARIANTS:
        try:
            load_doubled(Requirements(**ASKED, **asked), variant)
        except NoBackendError:
            continue
        serving.add(variant)

    assert serving == set(variants)


@pytest.mark.parametrize("size", [16, 256])
@pytest.mark.parametrize("head_size", [48, 80, 96, 112])
@pytest.mark.parametrize("window", [None, 9])
def test_fa4_copies_whole_tiles_of_pages(load_doubled, head_size, size, window) -> None:
    """Its double raises where steps do not add up to a tile."""
    case = fit(MIXED, "fa4", head_size=head_size, block_size=size, sliding_window=window)

    check(load_doubled(case.requirements(return_lse=True), "fa4"), materialize(case))


@pytest.mark.parametrize("variant", VARIANTS)
def test_kinds_of_requests(load_doubled, variant) -> None:
    traps.check_padded_requests_anywhere(load_doubled, variant, fit(MIXED, variant))
    traps.check_the_lse_of_a_single_key(load_doubled, variant, fit(MIXED, variant))
    traps.check_dense_calls(load_doubled, variant, fit(MIXED, variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_layers_beside_each_other(load_doubled, variant) -> None:
    traps.check_groups_that_share_a_state(load_doubled, variant, fit(MIXED, variant))
    traps.check_an_output_that_is_not_contiguous(load_doubled, variant, block_size=block_of(variant))
    traps.check_a_profiling_run(load_doubled, variant, computes=False, block_size=block_of(variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_shared_prefixes(load_doubled, variant) -> None:
    sinks = variant in SINKS

    traps.check_a_cascade_and_the_flat_step(
        load_doubled, variant, fit(MIXED, variant, sinks=sinks).with_shared_prefix(2)
    )


@pytest.mark.parametrize("variant", GRAPHS)
def test_graphs(load_doubled, variant) -> None:
    steps.check_graphs_of_several_sizes(load_doubled, variant, block_size=block_of(variant))
