"""What the GPU tests check of each library holds on its double: the checks themselves run where there is no GPU."""

from __future__ import annotations

import pytest

from attnplug.testing import Case
from plugins.flash_attn.tests.real import GRAPHS, SINKS, VARIANTS, block_of, fit
from tests.backends import steps, traps

pytestmark = pytest.mark.usefixtures("doubled")

MIXED = Case(query_lens=(1, 1, 1, 30), context_lens=(60, 0, 17, 5), num_q_heads=8, head_size=64, dtype="bfloat16")


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
