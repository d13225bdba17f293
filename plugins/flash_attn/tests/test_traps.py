"""What the GPU tests check of each library holds on its fake: the checks themselves run where there is no GPU."""

from __future__ import annotations

import pytest

from attnplug import Requirements
from attnplug.errors import NoBackendError
from attnplug_kit.oracle import Case, check, materialize
from plugins.flash_attn.tests.real import (
    ALIBI,
    BATCH_INVARIANT,
    DCP,
    FP8,
    GRAPHS,
    GRAPHS_OF_ALL_STEPS,
    SINKS,
    SOFT_CAP,
    VARIANTS,
    block_of,
    fit,
)
from tests.backends import checks

pytestmark = pytest.mark.usefixtures("fakes")

MIXED = Case(query_lens=(1, 1, 1, 30), context_lens=(60, 0, 17, 5), num_q_heads=8, head_size=64, dtype="bfloat16")


REQUIRED = {"head_size": 128, "num_q_heads": 8, "num_kv_heads": 2, "dtype": "bfloat16"}
TABLES = (
    ({"sinks": True}, SINKS),
    ({"alibi": "linear"}, ALIBI),
    ({"kv_cache_dtype": "fp8_e4m3"}, FP8),
    ({"logits_soft_cap": 30.0}, SOFT_CAP),
    ({"cudagraph": "uniform_batch"}, GRAPHS),
    ({"cudagraph": "always"}, GRAPHS_OF_ALL_STEPS),
    ({"batch_invariant": True}, BATCH_INVARIANT),
    ({"cascade": True, "return_lse": True}, VARIANTS),
    ({"dcp_size": 2}, DCP),
)


@pytest.mark.parametrize(("required", "variants"), TABLES, ids=str)
def test_the_tables_of_the_gpu_tests_are_those_of_the_manifest(load_fake, required, variants) -> None:
    serving = set()
    for variant in VARIANTS:
        try:
            load_fake(Requirements(**REQUIRED, **required), variant)
        except NoBackendError:
            continue
        serving.add(variant)

    assert serving == set(variants)


@pytest.mark.parametrize("size", [16, 256])
@pytest.mark.parametrize("head_size", [48, 80, 96, 112])
@pytest.mark.parametrize("window", [None, 9])
def test_fa4_copies_whole_tiles_of_pages(load_fake, head_size, size, window) -> None:
    """Its fake raises where steps do not add up to a tile."""
    case = fit(MIXED, "fa4", head_size=head_size, block_size=size, sliding_window=window)

    check(load_fake(case.requirements(return_lse=True), "fa4"), materialize(case))


@pytest.mark.parametrize("variant", VARIANTS)
def test_kinds_of_requests(load_fake, variant) -> None:
    checks.check_padded_requests(load_fake, variant, fit(MIXED, variant))
    checks.check_lse_of_single_key(load_fake, variant, fit(MIXED, variant))
    checks.check_dense_calls(load_fake, variant, fit(MIXED, variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_layers_beside_each_other(load_fake, variant) -> None:
    checks.check_shared_state(load_fake, variant, fit(MIXED, variant))
    checks.check_strided_output(load_fake, variant, block_size=block_of(variant))
    checks.check_profiling_run(load_fake, variant, computes=False, block_size=block_of(variant))


@pytest.mark.parametrize("variant", VARIANTS)
def test_shared_prefixes(load_fake, variant) -> None:
    sinks = variant in SINKS

    checks.check_cascade(load_fake, variant, fit(MIXED, variant, sinks=sinks).with_shared_prefix(2))


@pytest.mark.parametrize("variant", GRAPHS)
def test_graphs(load_fake, variant) -> None:
    checks.check_graph_sizes(load_fake, variant, block_size=block_of(variant))
