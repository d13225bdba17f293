"""The checks that plugins share: torch's own kernels pass on any device, and wrong outputs fail."""

from __future__ import annotations

import pytest
from attrs import evolve

import attnplug
from attnplug.contract import Attention
from attnplug_kit.oracle import Case
from tests.backends import checks

MIXED = Case(query_lens=(1, 1, 1, 40), context_lens=(30, 0, 17, 5), num_q_heads=8, head_size=128, dtype="bfloat16")
CHECKS = (
    checks.check_lse_of_single_key,
    checks.check_shared_state,
    checks.check_padded_requests,
    checks.check_dense_calls,
)


def load(requirements: attnplug.Requirements, variant: str) -> attnplug.Backend:
    return attnplug.load(requirements, "cpu", backend=f"torch/{variant}")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_layers_pass(check) -> None:
    check(load, "sdpa", MIXED)


def test_shared_prefixes_pass() -> None:
    checks.check_cascade(load, "sdpa", MIXED.with_shared_prefix(2))


def test_steps_pass() -> None:
    checks.check_profiling_run(load, "sdpa", computes=True)
    checks.check_strided_output(load, "sdpa")
    checks.check_graph_sizes(load, "sdpa")
    checks.check_after_inference_mode(load, "sdpa")


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_halved_outputs_fail(monkeypatch, check) -> None:
    forward = Attention.forward

    def halved(self, query, key, value, kv_cache, metadata, output, *, lse=None, **sinks):
        forward(self, query, key, value, kv_cache, metadata, output, lse=lse, **sinks)
        output *= 0.5
        if lse is not None:
            lse *= 0.5

    monkeypatch.setattr(Attention, "forward", halved)
    with pytest.raises(AssertionError):
        check(load, "sdpa", evolve(MIXED, seed=1))
