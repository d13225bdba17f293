"""What the GPU tests of all plugins check holds for torch's own kernels, wherever they run; broken ones are found."""

from __future__ import annotations

import pytest
from attrs import evolve

import attnplug
from attnplug.contract.impl import AttentionImpl
from attnplug_kit.oracle import Case
from tests.backends import steps, traps

MIXED = Case(query_lens=(1, 1, 1, 40), context_lens=(30, 0, 17, 5), num_q_heads=8, head_size=128, dtype="bfloat16")
CHECKS = (
    traps.check_the_lse_of_a_single_key,
    traps.check_groups_that_share_a_state,
    traps.check_padded_requests_anywhere,
    traps.check_dense_calls,
)


def load(requirements: attnplug.Requirements, variant: str) -> attnplug.Backend:
    return attnplug.load(requirements, "cpu", backend=f"torch/{variant}")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_they_hold_for_layers(check) -> None:
    check(load, "sdpa", MIXED)


def test_they_hold_for_shared_prefixes() -> None:
    traps.check_a_cascade_and_the_flat_step(load, "sdpa", MIXED.with_shared_prefix(2))


def test_they_hold_for_steps() -> None:
    traps.check_a_profiling_run(load, "sdpa", computes=True)
    traps.check_an_output_that_is_not_contiguous(load, "sdpa")
    steps.check_graphs_of_several_sizes(load, "sdpa")
    steps.check_what_inference_mode_leaves(load, "sdpa")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_outputs_that_are_half_as_large_are_found(monkeypatch, check) -> None:
    forward = AttentionImpl.forward

    def halved(self, query, key, value, kv_cache, metadata, output, *, lse=None):
        forward(self, query, key, value, kv_cache, metadata, output, lse=lse)
        output *= 0.5
        if lse is not None:
            lse *= 0.5

    monkeypatch.setattr(AttentionImpl, "forward", halved)
    with pytest.raises(AssertionError):
        check(load, "sdpa", evolve(MIXED, seed=1))
