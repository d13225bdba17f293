"""Values that an earlier request left behind the last key of a page do not count, where kernels load full tiles."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch
from attrs import evolve
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from attnplug.contract import GraphShape, Limits
from attnplug_flash_attn.kernels.interface import LayerParams
from attnplug_kit.oracle import Case, check, materialize
from plugins.flash_attn.tests.varlen_requests import HEADS, kernels, module_of, requests
from tests.backends.harness import Harness

pytestmark = pytest.mark.usefixtures("fakes")

VARIANTS = ("fa3", "fa3_vllm", "fa3_tokenspeed")
TERMS = LayerParams(softmax_scale=0.3)
CASE = Case(
    query_lens=(1, 70), context_lens=(30, 17), num_q_heads=8, num_kv_heads=2, head_size=128, dtype="bfloat16",
    block_size=128,
)  # fmt: skip


def assume_no_whole_tiles(monkeypatch: pytest.MonkeyPatch, variant: str) -> None:
    """Make an adapter assume that no page is loaded by full tiles."""
    monkeypatch.setattr(module_of(variant), "may_load_whole_tiles", lambda _: False)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A decode, and a chunk of a prompt on pages of any size."""
    return evolve(
        CASE,
        query_lens=(1, draw(st.integers(2, 90))),
        context_lens=(30, draw(st.integers(1, 70))),
        num_q_heads=2 * draw(st.sampled_from([1, 4, 8])),
        head_size=draw(st.sampled_from([16, 64, 80, 96, 112, 128, 192, 256])),
        block_size=16 * draw(st.integers(1, 16)),
        sliding_window=draw(st.sampled_from([None, 9, 40, 500])),
        kv_cache_dtype=draw(st.sampled_from(["auto", "fp8_e4m3"])),
    )


@pytest.mark.parametrize("variant", VARIANTS)
@given(case=cases())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_pages_of_all_sizes_ignore_unused_slots(load_fake, variant, case) -> None:
    """Slots that were never written hold NaN."""
    assume(variant != "fa3_tokenspeed" or case.head_size not in {80, 96})
    check(load_fake(case.requirements(return_lse=True), variant), materialize(case))


@pytest.mark.parametrize(
    ("variant", "block_size", "head_size", "window", "is_read"),
    [
        ("fa3", 128, 128, None, True),
        ("fa3", 128, 128, 9, True),
        ("fa3", 112, 192, None, True),
        ("fa3_tokenspeed", 128, 128, 9, True),
        ("fa3_vllm", 128, 128, None, True),
        ("fa3_vllm", 128, 128, 9, False),  # its kernels with a window load keys one by one
        ("fa3_vllm", 128, 128, 500, True),  # longer than any request: no window
        ("fa3_vllm", 80, 256, None, True),
        ("fa3_vllm", 96, 256, None, False),
        ("fa3_vllm", 64, 128, None, False),
    ],
)
def test_without_the_padding_the_rest_of_a_page_is_read(
    load_fake, monkeypatch, variant, block_size, head_size, window, is_read
) -> None:
    assume_no_whole_tiles(monkeypatch, variant)
    case = evolve(CASE, block_size=block_size, head_size=head_size, sliding_window=window)
    backend = load_fake(case.requirements(), variant)

    if is_read:
        with pytest.raises(AssertionError, match="nan, exact"):
            check(backend, materialize(case))
    else:
        check(backend, materialize(case))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("block_size", "is_padded"), [(16, False), (48, False), (64, True), (256, True)])
def test_calls_on_large_pages_pass_zero_padding(load_fake, journal, variant, block_size, is_padded) -> None:
    case = evolve(CASE, block_size=block_size)
    check(load_fake(case.requirements(), variant), materialize(case))

    name = "cache_leftpad" if variant == "fa3" else "leftpad_k"
    assert [call.arguments.get(name) for call in journal.calls] == [(1,) if is_padded else None] * len(journal.calls)
    functions = {"flash_attn_with_kvcache"} if variant == "fa3" else {"fwd", "get_scheduler_metadata"}
    assert {call.function for call in journal.calls} == functions


@pytest.mark.parametrize("variant", VARIANTS)
def test_all_steps_share_the_zeros_of_a_builder(load_fake, variant) -> None:
    class Large(Harness):
        limits = Limits(max_num_reqs=8, max_num_tokens=64, max_seq_len=256)

    harness = Large(load_fake, variant=variant, block_size=128)
    plans = [
        harness.impls[0].wrapped.plan_of(harness.builder.build(harness.batch([1] * count + [5], [20] * (count + 1))))
        for count in (2, 7)
    ]
    found = [part.call.leftpad_k for plan in plans for part in plan.parts]

    assert [len(each) for each in found] == [2, 1, 7, 1]
    assert len({each.data_ptr() for each in found}) == 1
    assert all(each.dtype == torch.int32 and not each.any() for each in found)


def test_graph_buffers_keep_the_zeros_that_the_graph_reads(load_fake) -> None:
    harness = Harness(load_fake, variant="fa3", block_size=64, cudagraph="always")
    with harness.state.graph_capture(4):
        graph = harness.state.graph(GraphShape(4, 4, 1))
        plan = harness.impls[0].wrapped.plan_of(harness.builder.build(graph.dummy_batch(harness.builder), graph=graph))
    (zeros,), zeros_of_builder = (part.call.leftpad_k for part in plan.parts), ref(harness.builder.wrapped._leftpad)
    assert zeros.data_ptr() == zeros_of_builder().data_ptr()

    del plan, zeros, harness.builder
    gc.collect()
    assert zeros_of_builder() is not None


def test_a_schedule_is_for_calls_with_the_same_padding() -> None:
    step, adapter = requests((100, 1), (110, 300)), kernels("fa3_vllm")
    call = step.call(adapter)
    same, other = (
        adapter.schedule(evolve(call, leftpad_k=padding), TERMS, num_heads_q=HEADS)
        for padding in (call.leftpad_k, None)
    )

    found, _ = step.attend(adapter, evolve(call, scheduler_metadata=same), TERMS)
    torch.testing.assert_close(found.double(), step.truth(TERMS)[0], rtol=1e-2, atol=1e-2)
    with pytest.raises(RuntimeError, match="scheduler_metadata must have shape"):
        step.attend(adapter, evolve(call, scheduler_metadata=other), TERMS)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_fakes_know_no_other_padding(variant) -> None:
    step, adapter = requests((5, 1), (20, 7)), kernels(variant)
    call = step.call(adapter)
    for wrong, match in (
        (call.leftpad_k.long(), "int32"),
        (call.leftpad_k[:1], "shape"),
        (torch.zeros(4, dtype=torch.int32)[::2], "contiguous"),
        (torch.ones(2, dtype=torch.int32), "supports no padding but 0"),
    ):
        with pytest.raises((RuntimeError, AssertionError), match=match):
            step.attend(adapter, evolve(call, leftpad_k=wrong), TERMS)
