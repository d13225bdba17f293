"""Requests that share thousands of tokens: one pass over the prefix for all of them, merged by LSE, on a GPU."""

from __future__ import annotations

import pytest
from attrs import evolve

from attnplug_kit.oracle import Case
from plugins.flash_attn.tests.real import FLASH_ATTN, SINKS, SOFT_CAP, VARIANTS, fit
from tests.backends import checks

pytestmark = pytest.mark.gpu

PREFIX = 4096
MIXED = Case(
    query_lens=(1,) * 7 + (3, 40),
    context_lens=(300, 0, 17, 5, 64, 1, 130, 9, 0),
    num_q_heads=8,
    head_size=128,
    dtype="bfloat16",
)
STEPS = {
    "mixed": MIXED,
    "decodes": evolve(MIXED, query_lens=(1,) * 9),
    "prompts": evolve(MIXED, query_lens=(20, 100, 33), context_lens=(0, 0, 70)),
    "decodes of several rows": evolve(MIXED, query_lens=(3,) * 9, decode_query_len=3),
}

load_real = FLASH_ATTN.load_fixture()


def shared(case: Case, variant: str, **changes: object) -> Case:
    """Return a case whose requests share PREFIX tokens, in blocks that the variant reads."""
    case = fit(case, variant, **changes)
    return case.with_shared_prefix(PREFIX // case.block_size)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("step", STEPS)
def test_a_cascade_is_what_the_flat_step_is(load_real, variant, step) -> None:
    checks.check_cascade(load_real, variant, shared(STEPS[step], variant))


@pytest.mark.parametrize("variant", SINKS)
@pytest.mark.parametrize("step", STEPS)
def test_sinks_count_once(load_real, variant, step) -> None:
    """In the pass over the prefix alone: in both, or in none, is another result."""
    checks.check_cascade(load_real, variant, shared(STEPS[step], variant, sinks=True, head_size=64))


@pytest.mark.parametrize("variant", SOFT_CAP)
def test_soft_caps_apply_to_both_passes(load_real, variant) -> None:
    case = shared(MIXED, variant, logits_soft_cap=2.0, gain=4.0)

    checks.check_cascade(load_real, variant, case)


@pytest.mark.parametrize("variant", VARIANTS)
def test_requests_that_end_with_the_prefix_have_their_new_token_alone(load_real, variant) -> None:
    case = fit(MIXED, variant, query_lens=(1,) * 9, context_lens=(0,) * 9)

    checks.check_cascade(load_real, variant, case.with_shared_prefix(PREFIX // case.block_size))
