"""What a build makes of a batch: which rows are one call, over which keys, with which arguments."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from attnplug.contract import Batch, Layer, Limits
from core.tests.contract.world import at_most, calls_of
from plugins.flash_attn.tests.recording_kernels import load
from tests.backends.harness import BLOCK, Harness

KINDS = ["pages", "cumulative", "packed", "padded", "scheduled"]


def plan_of(harness: Harness, batch: Batch, **keywords):
    return harness.impls[0].wrapped.plan_of(harness.builder.build(batch, **keywords))


def test_decodes_and_prefills_are_separate_calls() -> None:
    harness = Harness(load)
    batch = harness.batch([1, 1, 5, 3], [9, 40, 5, 20])
    plan = plan_of(harness, batch)

    decode, prefill = plan.decode, plan.prefill
    assert plan.parts == (decode, prefill)
    assert (decode.first, decode.last, prefill.first, prefill.last) == (0, 2, 2, 10)
    assert decode.call.cu_seqlens_q.tolist() == [0, 1, 2]
    assert prefill.call.cu_seqlens_q.tolist() == [0, 5, 8]
    assert (decode.call.max_seqlen_q, prefill.call.max_seqlen_q) == (1, 5)
    assert (decode.call.seqused_k.tolist(), prefill.call.seqused_k.tolist()) == ([9, 40], [5, 20])
    assert (decode.call.max_seqlen_k, prefill.call.max_seqlen_k) == (40, 20)  # keys, not the longest query
    assert decode.call.block_table.data_ptr() == batch.block_table.data_ptr()
    assert torch.equal(prefill.call.block_table, batch.block_table[2:])
    assert decode.slots is prefill.slots is plan.prefix is plan.dcp is None


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_decodes_go_first_where_results_may_not_depend_on_the_batch(batch_invariant) -> None:
    assert Harness(load, batch_invariant=batch_invariant).builder.decodes_first is batch_invariant


@pytest.mark.parametrize("query_lens", [[1, 1], [5, 9]])
def test_a_batch_of_one_phase_is_one_call_on_the_tensors_of_the_batch(query_lens) -> None:
    harness = Harness(load)
    batch = harness.batch(query_lens, [20, 30])
    (part,) = plan_of(harness, batch).parts

    assert part.call.cu_seqlens_q.data_ptr() == batch.query_start_loc.data_ptr()
    assert part.call.seqused_k.data_ptr() == batch.seq_lens.data_ptr()


def test_queries_of_several_rows_are_decodes_up_to_the_agreed_length() -> None:
    harness = Harness(load, decode_query_len=3)
    plan = plan_of(harness, harness.batch([3, 1, 2, 4], [20] * 4))

    assert plan.decode.call.cu_seqlens_q.tolist() == [0, 3, 4, 6]
    assert (plan.decode.call.max_seqlen_q, plan.decode.call.causal) == (3, True)
    assert plan.prefill.call.cu_seqlens_q.tolist() == [0, 4]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("query_lens", [[0, 1, 1], [1, 0, 4], [1, 4, 0], [0, 4]])
def test_padded_requests_may_be_anywhere(kind, query_lens) -> None:
    harness = Harness(load, variant=kind)
    seq_lens = [length and length + 9 for length in query_lens]
    metadata = harness.builder.build(harness.batch(query_lens, seq_lens))

    rows = [row for part in harness.impls[0].wrapped.plan_of(metadata).parts for row in range(part.first, part.last)]
    assert rows == list(range(sum(query_lens)))
    harness.forward(metadata)  # the kernels check every number


def test_key_lengths_are_passed_in_the_form_that_a_library_takes() -> None:
    batches = {}
    for kind in KINDS:
        harness = Harness(load, variant=kind)
        batches[kind] = plan_of(harness, harness.batch([1, 1, 20], [9, 40, 33]))

    assert batches["pages"].decode.call.cu_seqlens_k is None
    cumulative = batches["cumulative"]
    assert cumulative.decode.call.cu_seqlens_k.tolist() == [0, 9, 49]
    assert cumulative.decode.call.seqused_k.tolist() == [9, 40]
    packed = batches["packed"].decode
    assert packed.call.cu_seqlens_k.tolist() == [0, 9, 49]
    assert packed.call.block_table is packed.call.seqused_k is None
    assert packed.slots.tolist() == [*range(16, 25), *range(32, 72)]


@pytest.mark.parametrize("kind", KINDS)
def test_first_prefills_read_the_keys_of_the_call(kind) -> None:
    harness = Harness(load, variant=kind)
    plan = plan_of(harness, harness.batch([1, 5, 3], [9, 5, 3]))
    harness.forward(harness.builder.build(harness.batch([1, 5, 3], [9, 5, 3])))

    call = plan.prefill.call
    assert plan.prefill.reads_new_kv
    assert call.block_table is call.seqused_k is plan.prefill.slots is call.scheduler_metadata is None
    assert (call.cu_seqlens_k.tolist(), call.max_seqlen_k, call.causal) == ([0, 5, 8], 5, True)
    assert not plan.decode.reads_new_kv
    assert harness.backend.wrapped.kernels.calls[-1].key.shape == (8, 2, 64)


@pytest.mark.parametrize(
    ("required", "lens"),
    [
        ({}, ([5, 3], [5, 4])),  # a chunk of a prompt
        ({}, ([1, 1], [1, 1])),  # decodes
        ({"kv_cache_dtype": "fp8_e4m3"}, ([5], [5])),  # the cache rounds
        ({"batch_invariant": True}, ([5], [5])),  # in another batch the same rows may be read from pages
        ({"seq_lens_cpu_kind": "upper_bound"}, ([5], [5])),
    ],
)
def test_pages_are_read_where_the_call_lacks_keys(required, lens) -> None:
    harness = Harness(load, **required)
    (part,) = plan_of(harness, harness.batch(*lens)).parts

    assert not part.reads_new_kv
    assert part.call.block_table is not None


def test_a_layer_that_shares_a_kv_cache_reads_pages() -> None:
    layers = [Layer(name="layers.0"), Layer(name="layers.1", kv_sharing_target="layers.0")]
    harness = Harness(load, layers, kv_sharing=True)

    (part,) = plan_of(harness, harness.batch([5], [5])).parts
    assert not part.reads_new_kv


@pytest.mark.parametrize("seq_lens_cpu_kind", ["upper_bound", "absent"])
@pytest.mark.parametrize("kind", ["packed", "cumulative"])
def test_lengths_without_exact_cpu_copies_are_read_on_the_device(kind, seq_lens_cpu_kind) -> None:
    harness = Harness(load, variant=kind, seq_lens_cpu_kind=seq_lens_cpu_kind)
    exact = harness.batch([1, 12], [60, 50])
    known = {"seq_lens_cpu": None if seq_lens_cpu_kind == "absent" else exact.seq_lens + 16, "max_seq_len": 80}
    table = torch.nn.functional.pad(exact.block_table, (0, 2), value=7)
    inexact = evolve(exact, **known, block_table=table, block_table_cpu=None, num_computed_tokens_cpu=None)

    sure = Harness(load, variant=kind)
    output = harness.forward(harness.builder.build(inexact))
    assert torch.equal(output, sure.forward(sure.builder.build(exact)))


def test_keys_of_the_call_are_one_pass() -> None:
    harness = Harness(load, paged=False, block_size=None)
    batch = Batch.from_lengths([3, 1, 7], [3, 1, 9])
    (part,) = plan_of(harness, batch).parts

    assert (part.first, part.last) == (0, 11)
    assert part.call.cu_seqlens_k.tolist() == [0, 3, 4, 13]
    assert part.call.block_table is part.call.seqused_k is None
    assert (part.call.max_seqlen_q, part.call.max_seqlen_k) == (7, 9)


def test_the_window_of_an_encoder_reaches_as_far_to_the_right() -> None:
    required = {"attn_type": "encoder_only", "paged": False, "block_size": None, "sliding_window": 4}
    harness = Harness(load, **required)
    harness.forward(harness.builder.build(Batch.from_lengths([9, 3], causal=False)))

    (recorded,) = harness.backend.wrapped.kernels.calls
    assert recorded.params.window == (3, 3)
    assert recorded.call.causal is False


@pytest.mark.parametrize("kind", KINDS)
def test_cross_attention_reads_the_keys_of_the_encoder(kind) -> None:
    harness = Harness(load, variant=kind, attn_type="encoder_decoder")
    lens = torch.tensor([20, 5], dtype=torch.int32)
    given = {"encoder_seq_lens": lens, "causal": False, "block_table": torch.tensor([[1, 2], [3, 0]]).int()}
    slots = torch.tensor([*range(16, 36), *range(48, 53)])
    first = harness.batch([4, 2], **given, slot_mapping=slots)
    later = harness.batch([1, 1], [5, 3], **given, slot_mapping=slots[:0])
    cache, impl = harness.backend.make_cache(8), harness.impls[0]
    query, keys = torch.randn(6, 4, 64).bfloat16(), torch.randn(25, 2, 64).bfloat16()
    output = torch.empty(6, 256).bfloat16()

    impl.forward(query, keys, keys, cache, harness.builder.build(first), output)
    impl.forward(query[:2], None, None, cache, harness.builder.build(later), output[:2])

    call = harness.backend.wrapped.kernels.calls[-1].call
    assert call.max_seqlen_k == 20
    lengths = call.cu_seqlens_k.diff() if call.seqused_k is None else call.seqused_k
    assert lengths.tolist() == [20, 5]


def test_layers_of_equal_windows_share_a_plan() -> None:
    layers = [Layer(name=f"layers.{i}", scale=scale) for i, scale in enumerate((0.1, 0.2))]
    harness = Harness(load, layers, variant="scheduled")
    metadata = harness.builder.build(harness.batch([1, 5], [9, 5]))

    assert harness.impls[0].wrapped.plan_of(metadata) is harness.impls[1].wrapped.plan_of(metadata)
    assert len(harness.backend.wrapped.kernels.scheduled) == 2
    for impl in harness.impls:
        harness.forward(metadata, impl)
    assert [recorded.params.softmax_scale for recorded in harness.backend.wrapped.kernels.calls] == [0.1, 0.1, 0.2, 0.2]


def test_batch_invariance_uses_the_same_bounds_for_every_batch() -> None:
    harness = Harness(load, batch_invariant=True, decode_query_len=2, sliding_window=9)
    calls = []
    for query_lens, seq_lens in (([1, 7], [30, 40]), ([2, 1, 20], [2, 9, 20])):
        plan = plan_of(harness, harness.batch(query_lens, seq_lens))
        calls.append([(call.max_seqlen_q, call.max_seqlen_k, call.num_splits) for call in (p.call for p in plan.parts)])

    limits = harness.limits
    assert calls[0] == calls[1] == [(2, limits.max_seq_len, 1), (limits.max_num_tokens, limits.max_seq_len, 1)]


def test_a_state_may_turn_batch_invariance_off() -> None:
    harness = Harness(load, batch_invariant=True)
    limits = Limits(max_num_reqs=4, max_num_tokens=16, max_seq_len=64, batch_invariant=False)
    builder = harness.backend.make_builder(harness.impls, harness.backend.make_state(limits))

    (part,) = harness.impls[0].wrapped.plan_of(builder.build(harness.batch([1]))).parts
    assert (part.call.num_splits, part.call.max_seqlen_k) == (0, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_another_block_table_is_followed_by_every_pass(kind) -> None:
    harness = Harness(load, variant=kind)
    before = harness.builder.build(harness.batch([1, 1, 20], [9, 40, 33]))
    other = harness.batch([1, 1, 20], [9, 40, 33], first_block=20)
    made = len(harness.backend.wrapped.kernels.scheduled)
    after = harness.builder.update_block_table(before, other.block_table, other.slot_mapping)

    old, new = (harness.impls[0].wrapped.plan_of(metadata) for metadata in (before, after))
    assert len(harness.backend.wrapped.kernels.scheduled) == made  # schedules follow from lengths, which are the same
    for name, rows in (("decode", slice(0, 2)), ("prefill", slice(2, 3))):
        earlier, later = getattr(old, name), getattr(new, name)
        assert later.call.scheduler_metadata is earlier.call.scheduler_metadata
        if kind == "packed":
            assert torch.equal(later.slots, earlier.slots + 19 * BLOCK)
        else:
            assert torch.equal(later.call.block_table, other.block_table[rows])
            assert torch.equal(earlier.call.block_table, before.batch.block_table[rows])
    harness.forward(after)


def test_metadata_of_other_layers_is_scheduled_for_those_of_the_builder() -> None:
    harness = Harness(load, variant="scheduled", sliding_window=9)
    batch = harness.batch([1, 5], [9, 20])
    before = harness.builder.build(batch)
    strange = evolve(before, plans={})

    plan = harness.impls[0].wrapped.plan_of(
        harness.builder.update_block_table(strange, batch.block_table, batch.slot_mapping)
    )
    assert all(part.call.scheduler_metadata is not None for part in plan.parts)


def test_a_schedule_of_pages_is_not_one_of_rows() -> None:
    shared = Layer(name="layers.1", kv_sharing_target="layers.0")
    harness = Harness(load, variant="scheduled", kv_sharing=True)
    other = harness.backend.make_builder([harness.backend.make_impl(shared)], harness.state)
    batch = harness.batch([5], [5])
    pages = other.build(batch)
    rows = harness.builder.update_block_table(pages, batch.block_table, batch.slot_mapping)
    again = other.update_block_table(harness.builder.build(batch), batch.block_table, batch.slot_mapping)

    first, second, third = (other.impls[0].wrapped.plan_of(metadata).prefill for metadata in (pages, rows, again))
    assert [part.reads_new_kv for part in (first, second, third)] == [False, True, False]
    assert first.call.scheduler_metadata is not None
    assert second.call.scheduler_metadata is third.call.scheduler_metadata is None


def test_advanced_steps_are_decodes() -> None:
    harness = Harness(load, variant="scheduled")
    metadata = harness.builder.build(harness.batch([1, 1], [9, 16]))
    table = torch.nn.functional.pad(metadata.batch.block_table, (0, 1), value=9)
    metadata = harness.builder.update_block_table(metadata, table, metadata.batch.slot_mapping)

    (part,) = harness.impls[0].wrapped.plan_of(harness.builder.advance_step(metadata)).parts
    assert part.call.seqused_k.tolist() == [10, 17]
    assert part.call.scheduler_metadata is None  # the next step is near, and a schedule is a launch


@pytest.mark.parametrize(("kind", "most"), [("pages", 17), ("scheduled", 34)])
def test_a_plan_of_decodes_takes_few_functions(kind, most) -> None:
    harness = Harness(load, variant=kind)
    steps = [harness.builder._guard.check(harness.batch([1] * 8, [9] * 8)) for _ in range(2)]
    plan = harness.builder.wrapped.plan_batch
    plan(steps[0].batch, steps[0], fast=False, graph=None)

    python, _ = calls_of(lambda: plan(steps[1].batch, steps[1], fast=False, graph=None))

    at_most(python, most)
