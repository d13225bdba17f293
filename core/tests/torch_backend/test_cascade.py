"""Cascades: a shared prefix is computed once, and gives what computing it for every request gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import attnplug
from attnplug.request.device import Device
from attnplug.torch_backend import builder, sdpa
from attnplug_kit.oracle import Case, cases, check, limits_of, materialize, run
from core.tests.torch_backend.tiers import in_two_tiers

if TYPE_CHECKING:
    from attnplug.contract import Backend
    from attnplug.torch_backend.plan import Plan

FEATURES = ("logits_soft_cap", "sinks", "head_size_v", "causal", "kv_sharing", "decode_query_len", "kv_cache_dtype")
layouts = st.sampled_from(["NHD", "HND"])
shared = st.builds(Case.with_shared_prefix, cases(features=FEATURES), st.integers(1, 6))


def load(case: Case, layout: str = "NHD", **engine: object) -> Backend:
    requested = case.requirements(block_size=case.block_size, kv_layout=layout, **engine)
    return attnplug.load(requested, Device.cpu(), backend="torch/sdpa")


def check_cascade(case: Case, layout: str, return_lse: bool, host_writes: bool) -> None:
    host_writes = host_writes and not case.kv_sharing

    check(load(case, layout, return_lse=return_lse), materialize(case), host_writes=host_writes)


test_gives_what_the_oracle_gives, test_gives_it_at_length = in_two_tiers(
    check_cascade, shared, layouts, st.booleans(), st.booleans(), fast=40, full=120
)


@pytest.mark.parametrize("kernel", ["fused without LSE", "unfused"])
@given(case=shared, layout=layouts)
@settings(max_examples=30)
def test_every_kernel(kernel: str, case: Case, layout: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if kernel == "unfused":
            patch.setattr(builder, "choose_kernel", lambda *_: sdpa.UNFUSED)
        else:
            patch.setattr(sdpa, "fused_cpu_op", lambda: None)
        check(load(case, layout), materialize(case))


@given(shared.map(lambda case: evolve(case, dtype="float32")), layouts)
@settings(max_examples=40)
def test_gives_what_flat_attention_gives(case: Case, layout: str) -> None:
    scene, backend = materialize(case), load(case, layout, return_lse=True)
    flat = evolve(scene, case=evolve(case, common_prefix_len=0))

    one, other = run(backend, scene), run(backend, flat)

    torch.testing.assert_close(one.output, other.output, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(one.lse, other.lse, rtol=2e-5, atol=2e-5)


def test_the_prefix_is_read_once() -> None:
    case = Case(query_lens=(1, 1, 1, 5), context_lens=(3, 9, 0, 4)).with_shared_prefix(4)
    scene, backend = materialize(case), load(case)
    impl = backend.make_impl(scene.layer())
    builder = backend.make_builder([impl], backend.make_state(limits_of(scene)))

    plan: Plan = impl.wrapped.plan_of(builder.build(scene.paged(backend).batch))

    assert plan.prefix is not None
    assert (plan.prefix.members, plan.prefix.rows, plan.prefix.keys) == (1, 8, 64)
    assert max(group.keys for group in plan.groups) == 10
    assert sum(group.members for group in plan.groups) == 4


def test_requests_that_are_padding_share_nothing() -> None:
    case = Case(query_lens=(0, 1, 4, 0), context_lens=(0, 5, 3, 0), sinks=True).with_shared_prefix(2)

    check(load(case, return_lse=True), materialize(case))


def test_only_cascades_require_a_kernel_with_lse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa, "fused_cpu_op", lambda: None)
    case = Case(query_lens=(1,), context_lens=(9,)).with_shared_prefix(1)
    scene, backend = materialize(case), load(case)
    impl = backend.make_impl(scene.layer())
    builder = backend.make_builder([impl], backend.make_state(limits_of(scene)))
    batch = scene.paged(backend).batch

    flat: Plan = impl.wrapped.plan_of(builder.build(evolve(batch, common_prefix_len=0)))
    cascade: Plan = impl.wrapped.plan_of(builder.build(batch))

    assert flat.kernel is sdpa.FUSED
    assert cascade.kernel is sdpa.UNFUSED


@pytest.mark.parametrize(
    "requested",
    [
        {"sliding_window": 8},
        {"attention_chunk": 16},
        {"alibi": "linear"},
        {"custom_mask": True},
        {"dcp_size": 2},
        {"attn_type": "encoder_decoder", "causal": False},
    ],
    ids=str,
)
def test_masks_and_relative_positions_do_not_cascade(requested: dict[str, object]) -> None:
    requirements = evolve(Case(query_lens=(), context_lens=()).requirements(cascade=True), **requested)

    with pytest.raises(attnplug.NoBackendError):
        attnplug.select(requirements, Device.cpu(), backend="torch/sdpa")
