"""Batches as hosts pass them, in any order and with any padding, compared with the float64 oracle."""

from __future__ import annotations

import random

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

import attnplug
from attnplug.contract import PAD_SLOT_ID, GraphShape, Limits, forward_context
from attnplug.errors import BatchError, CacheError, ContractError, TensorError
from attnplug.request.device import Device
from attnplug_kit.oracle import CANARY, Case, SceneRunner, cases, check, materialize
from attnplug_kit.oracle.padding import with_bounds, with_padded_requests

FEATURES = ("sliding_window", "attention_chunk", "sinks", "decode_query_len", "kv_cache_dtype", "causal")
LIMITS = Limits(max_num_reqs=16, max_num_tokens=1024, max_seq_len=1024, num_blocks=4096)


def load(case, **engine):
    requested = case.requirements(block_size=case.block_size, return_lse=True, **engine)
    return attnplug.load(requested, Device.cpu(), backend="torch/sdpa")


def shuffled(case, seed):
    order = random.Random(seed).sample(range(len(case.query_lens)), len(case.query_lens))
    return evolve(
        case, **{name: tuple(getattr(case, name)[i] for i in order) for name in ("query_lens", "context_lens")}
    )


@settings(max_examples=20)
@given(cases(features=FEATURES), st.integers(0, 99), st.booleans())
def test_the_order_of_a_batch_changes_no_result(case, seed, host_writes):
    case = shuffled(case, seed)
    ran = check(load(case), materialize(case), host_writes=host_writes)

    assert ran.output.shape[0] == case.num_tokens


@settings(max_examples=20)
@given(
    cases(features=FEATURES, num_padding_tokens=3),
    st.sampled_from([with_bounds, with_padded_requests, lambda batch: with_bounds(with_padded_requests(batch), 2)]),
    st.sampled_from(["exact", "upper_bound", "absent"]),
    st.booleans(),
)
def test_padding_changes_no_result(case, padded, lengths, paged):
    case = case if paged else evolve(case, kv_cache_dtype="auto", per_head_scales=False, k_scale=1.0, v_scale=1.0)
    scene = materialize(case)
    requested = case.requirements(paged=paged, return_lse=True, seq_lens_cpu_kind=lengths)
    backend = attnplug.load(requested, Device.cpu(), backend="torch/sdpa")
    runner = SceneRunner(backend, scene, limits=LIMITS)
    call = runner.call(scene)
    batch = padded(call.batch)
    if lengths != "exact":
        bounds = batch.seq_lens + 5 if lengths == "upper_bound" else None
        batch = evolve(batch, seq_lens_cpu=bounds, key_start_loc_cpu=None, max_seq_len=batch.max_seq_len + 5)
    metadata = runner.builder.build(batch)
    runner.forward(call, metadata)

    runner.compare(call, scene, "padded")
    assert bool((call.output[case.num_tokens :] == CANARY).all())
    seen = metadata.batch
    assert (seen.num_reqs, seen.num_padded_reqs) == (len(case.query_lens), 0)
    assert (seen.num_actual_tokens, seen.max_query_len) == (case.num_tokens, max(case.query_lens))
    assert seen.max_seq_len == max(case.seq_lens)
    assert seen.seq_lens_cpu.tolist() == list(case.seq_lens)


@settings(max_examples=12)
@given(cases(features=FEATURES), st.integers(0, 99))
def test_calls_without_kv_read_the_cache(case, seed):
    """One metadata serves calls with K/V and without, in each phase, and those without write nothing."""
    scene = materialize(shuffled(case, seed))
    runner = SceneRunner(load(case, kv_in_cache=True), scene, limits=LIMITS)
    written = scene.paged(runner.backend, written=True)
    unslotted = evolve(written.batch, slot_mapping=None, slot_mapping_cpu=None)
    unwritten = torch.full_like(written.batch.slot_mapping, PAD_SLOT_ID)
    for batch in (written.batch, unslotted, evolve(written.batch, slot_mapping=unwritten, slot_mapping_cpu=unwritten)):
        call = evolve(written, key=None, value=None, output=torch.full_like(written.output, CANARY))
        before = [pages.clone().view(torch.uint8) for pages in (call.cache.k, call.cache.v)]
        runner.forward(call, runner.builder.build(batch))
        runner.compare(call, scene, "without K/V")
        now = [pages.view(torch.uint8) for pages in (call.cache.k, call.cache.v)]
        assert all(map(torch.equal, now, before))
    metadata = runner.builder.build(written.batch)
    call = runner.call(scene)
    runner.forward(call, metadata)
    runner.compare(call, scene, "with K/V again")


def numbers(cache):
    """Return keys and values of a KV cache, copied, with numbers in place of NaN."""
    return torch.stack((cache.k, cache.v)).nan_to_num()


def scene_of(**fields):
    return materialize(Case(**{"query_lens": (1, 5, 1), "context_lens": (17, 3, 0), "num_padding_tokens": 2, **fields}))


def test_without_kv_in_cache_a_call_needs_its_kv():
    scene = scene_of()
    runner = SceneRunner(load(scene.case), scene, limits=LIMITS)
    call = runner.call(scene)
    metadata = runner.builder.build(call.batch)
    before = numbers(call.cache)

    with pytest.raises(TensorError, match="kv_in_cache=True"):
        runner.forward(evolve(call, key=None, value=None), metadata)
    with pytest.raises(BatchError, match="kv_in_cache=True"):
        runner.builder.build(evolve(call.batch, slot_mapping=None, slot_mapping_cpu=None))
    assert torch.equal(numbers(call.cache), before)


def test_kv_of_a_batch_without_slots_is_refused():
    scene = scene_of()
    runner = SceneRunner(load(scene.case, kv_in_cache=True), scene, limits=LIMITS)
    call = runner.call(scene)
    metadata = runner.builder.build(evolve(call.batch, slot_mapping=None, slot_mapping_cpu=None))
    before = numbers(call.cache)

    with pytest.raises(TensorError, match="no slot_mapping"):
        runner.forward(call, metadata)
    assert torch.equal(numbers(call.cache), before)


def test_forward_op_takes_calls_without_kv():
    scene = scene_of()
    runner = SceneRunner(load(scene.case, kv_in_cache=True), scene, limits=LIMITS)
    call = scene.paged(runner.backend, written=True)
    with forward_context({runner.impl.layer.name: runner.builder.build(call.batch)}):
        runner.impl.forward_op(call.query, None, None, call.cache, call.output, lse=call.lse)

    runner.compare(call, scene, "through the op")


@pytest.mark.parametrize("padded", [True, False])
def test_a_dummy_run_may_look_like_a_real_batch(padded):
    scene = scene_of()
    runner = SceneRunner(load(scene.case), scene, limits=LIMITS)
    call = runner.call(scene)
    batch = with_bounds(with_padded_requests(call.batch)) if padded else call.batch
    before = numbers(call.cache)
    metadata = runner.builder.build(evolve(batch, dummy=True))
    for pages in (call.cache.k, call.cache.v):
        pages[0] = 0  # the null block of an engine holds what padding left
    runner.forward(call, metadata)

    assert not metadata.batch.block_table.any()
    assert set(metadata.batch.slot_mapping.tolist()) == {PAD_SLOT_ID}
    assert torch.equal(numbers(call.cache)[:, 1:], before[:, 1:])


def decodes(*contexts, padding=0):
    return materialize(
        Case(query_lens=(1,) * len(contexts), context_lens=contexts, num_padding_tokens=padding, head_size=16)
    )


def padded_to(batch, num_reqs):
    """Return the batch as SGLang pads it: row 0 again and again, with its length and pages, and slot 0."""
    more, slots = num_reqs - batch.num_reqs, batch.slot_mapping[: batch.num_reqs]
    return evolve(
        batch,
        num_reqs=num_reqs,
        num_padded_reqs=more,
        num_actual_tokens=num_reqs,
        query_start_loc=(starts := torch.arange(num_reqs + 1, dtype=torch.int32)),
        query_start_loc_cpu=starts,
        seq_lens=(lens := torch.cat([batch.seq_lens, batch.seq_lens[:1].expand(more)])),
        seq_lens_cpu=lens,
        block_table=(table := torch.cat([batch.block_table, batch.block_table[:1].expand(more, -1)])),
        block_table_cpu=table,
        slot_mapping=(mapping := torch.cat([slots, slots.new_zeros(more)])),
        slot_mapping_cpu=mapping,
    )


def test_padded_requests_fit_the_captured_shape():
    scene = decodes(40, 3, 18, padding=1)
    runner = SceneRunner(load(scene.case, cudagraph="uniform_batch"), scene, limits=LIMITS)
    call = runner.call(scene)
    batch = padded_to(call.batch, 4)
    with runner.state.graph_capture(4):
        graph = runner.state.graph(GraphShape(4, 4, 1, max_seq_len=64))
        captured = runner.builder.build(graph.dummy_batch(), graph=graph)
    assert runner.builder.can_run_in_cudagraph(batch)
    assert runner.state.find_graph({runner.builder: batch}) is graph
    runner.builder.build(batch, graph=graph)
    runner.forward(call, captured)

    runner.compare(call, scene, "a replay with padded requests")


def test_a_graph_of_host_owned_inputs_checks_their_padding():
    scene = decodes(40, 3, 18, padding=1)
    runner = SceneRunner(load(scene.case, cudagraph="uniform_batch"), scene, limits=LIMITS)
    call = runner.call(scene)
    real = padded_to(call.batch, 4)
    null = real.block_table.clone()
    null[3] = 0
    batch = evolve(real, block_table=null, block_table_cpu=null)
    with runner.state.graph_capture(4):
        graph = runner.state.graph(GraphShape(4, 4, 1, max_seq_len=64), host_owned_inputs=True)
        captured = runner.builder.build(batch, graph=graph)
    runner.forward(call, captured)
    runner.compare(call, scene, "the host's own tensors")

    with pytest.raises(CacheError, match="padding, and have blocks or slots of running requests"):
        runner.builder.build(real, graph=graph)
    wrong = real.slot_mapping.clone()
    wrong[3] = real.slot_mapping[0]
    with pytest.raises(CacheError, match="padding, and have blocks or slots"):
        runner.builder.build(evolve(batch, slot_mapping=wrong, slot_mapping_cpu=wrong), graph=graph)


def test_padded_decodes_advance_without_their_padding():
    scene = decodes(40, 3, 18, padding=1)
    runner = SceneRunner(load(scene.case), scene, limits=LIMITS)
    wide = torch.cat([scene.block_table, torch.arange(40, 43, dtype=torch.int32)[:, None]], 1).clamp(max=250)
    batch = padded_to(evolve(runner.call(scene).batch, block_table=wide, block_table_cpu=wide), 4)
    after = runner.builder.advance_step(runner.builder.build(batch))

    assert after.batch.seq_lens.tolist() == [42, 5, 20]


def test_another_groups_pages_are_cut_alike():
    scene = decodes(40, 3, 18, padding=1)
    runner = SceneRunner(load(scene.case), scene, limits=LIMITS)
    batch = padded_to(runner.call(scene).batch, 4)
    metadata = runner.builder.build(batch)
    updated = runner.builder.update_block_table(metadata, batch.block_table, batch.slot_mapping)

    assert updated.batch.num_reqs == 3
    assert updated.batch.slot_mapping.tolist() == batch.slot_mapping[:3].tolist()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_padded_reqs": 5}, "num_padded_reqs=5 of 5"),
        ({"num_padded_reqs": -1}, "num_padded_reqs=-1"),
        ({"num_padded_reqs": True}, "num_padded_reqs=True"),
        ({"num_padded_reqs": 1}, "has slot 0"),
        ({"max_query_len": 4}, "the longest query has 5 tokens"),
        ({"max_seq_len": 17}, "the longest sequence has 18 tokens"),
        ({"num_actual_tokens": 6}, "ends at 7"),
    ],
)
def test_padding_that_contradicts_the_batch_is_refused(change, said):
    scene = scene_of()
    runner = SceneRunner(load(scene.case), scene, limits=LIMITS)
    call = runner.call(scene)
    batch = with_padded_requests(call.batch)
    before = numbers(call.cache)
    with pytest.raises(ContractError, match=said):
        runner.builder.build(evolve(batch, **change))
    assert torch.equal(numbers(call.cache), before)


def test_a_bound_below_the_length_on_the_device_is_refused():
    scene = scene_of()
    backend = load(scene.case, seq_lens_cpu_kind="upper_bound")
    assert backend.agreement.reads_lengths
    runner = SceneRunner(backend, scene, limits=LIMITS)
    batch = runner.call(scene).batch

    with pytest.raises(BatchError, match="upper bound"):
        runner.builder.build(evolve(batch, seq_lens_cpu=batch.seq_lens - 1))


@settings(max_examples=20)
@given(
    cases(features=FEATURES, num_padding_tokens=3), st.sampled_from(["exact", "absent"]), st.booleans(), st.booleans()
)
def test_starts_of_queries_on_the_device_change_no_result(case, lengths, paged, padded):
    case = case if paged else evolve(case, kv_cache_dtype="auto", per_head_scales=False, k_scale=1.0, v_scale=1.0)
    scene = materialize(case)
    requested = case.requirements(paged=paged, return_lse=True, seq_lens_cpu_kind=lengths, query_lens_cpu_kind="absent")
    backend = attnplug.load(requested, Device.cpu(), backend="torch/sdpa")
    assert backend.agreement.reads_lengths
    runner = SceneRunner(backend, scene, limits=LIMITS)
    call = runner.call(scene)
    batch = with_bounds(with_padded_requests(call.batch)) if padded else call.batch
    batch = evolve(batch, query_start_loc_cpu=None, seq_lens_cpu=None if lengths == "absent" else batch.seq_lens_cpu)
    call = evolve(call, batch=batch)
    runner.forward(call, runner.builder.build(batch))

    runner.compare(call, scene, "no starts on the CPU")


@pytest.mark.parametrize("with_slots", [True, False])
def test_a_graph_of_calls_without_kv_reads_the_cache(with_slots):
    scene = decodes(40, 3, 18, padding=1)
    runner = SceneRunner(load(scene.case, cudagraph="uniform_batch", kv_in_cache=True), scene, limits=LIMITS)
    call = evolve(scene.paged(runner.backend, written=True), key=None, value=None)
    batch = call.batch if with_slots else evolve(call.batch, slot_mapping=None, slot_mapping_cpu=None)
    before = numbers(call.cache)
    with runner.state.graph_capture(4):
        graph = runner.state.graph(GraphShape(4, 4, 1, max_seq_len=64))
        captured = runner.builder.build(graph.dummy_batch(), graph=graph)
    runner.builder.build(batch, graph=graph)
    runner.forward(call, captured)

    runner.compare(call, scene, "a replay without K/V")
    assert torch.equal(numbers(call.cache), before)
    advanced = runner.builder.advance_step(runner.builder.build(batch))
    assert (advanced.batch.slot_mapping is None) is not with_slots


def test_dense_keys_that_only_the_device_counts():
    """The built-in backend needs exact lengths, so that each build reads them: K/V rows are counted then."""
    scene = scene_of(num_padding_tokens=0)
    requested = scene.case.requirements(paged=False, seq_lens_cpu_kind="absent")
    runner = SceneRunner(attnplug.load(requested, Device.cpu(), backend="torch/sdpa"), scene, limits=LIMITS)
    call = runner.call(scene)
    batch = evolve(call.batch, seq_lens_cpu=None, key_start_loc_cpu=None, max_seq_len=99)
    metadata = runner.builder.build(batch)
    runner.forward(call, metadata)

    runner.compare(call, scene, "dense")
    assert metadata.num_key_rows == sum(scene.case.seq_lens)


@pytest.mark.parametrize("captured", [True, False])
def test_a_mask_may_have_that_of_padded_requests(captured):
    case = Case(query_lens=(1, 1, 1), context_lens=(40, 3, 18), num_padding_tokens=1, custom_mask=True, causal=False)
    scene = materialize(case)
    engine = {"cudagraph": "uniform_batch"} if captured else {}
    runner = SceneRunner(load(case, **engine), scene, limits=LIMITS)
    call = runner.call(scene)
    batch = padded_to(call.batch, 4)
    batch = evolve(batch, custom_mask=torch.cat([batch.custom_mask, batch.custom_mask[:41]]))
    metadata = runner.builder.build(batch)
    if captured:
        with runner.state.graph_capture(4):
            graph = runner.state.graph(GraphShape(4, 4, 1, max_seq_len=64))
            metadata = runner.builder.build(graph.dummy_batch(), graph=graph)
        runner.builder.build(batch, graph=graph)
    runner.forward(call, metadata)

    runner.compare(call, scene, "with a mask")
