"""Five systems on the contract, through its public names alone; design-validation.md in docs explains them."""

from __future__ import annotations

import ast
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attrs import evolve

from attnplug.batching import positions_of
from attnplug.contract import (
    Batch,
    DecodeInputs,
    GraphShape,
    Layer,
    LoadedBackend,
    MetadataBuilder,
    Parallel,
    check_backend_class,
    forward_context,
)
from attnplug.errors import BatchError, LimitsError, NotNegotiatedError
from core.tests.contract.design import blocksparse, flash_attn, flashinfer, int8, vllm
from core.tests.contract.toy import ToyBackend, ToyImpl
from core.tests.contract.world import (
    NUM_BLOCKS,
    agree,
    copy_of,
    limits,
    make_backend,
    make_batch,
    make_qkv,
    page_out,
    random_cache,
    same,
)

DESIGN = Path(__file__).parent / "design"
BACKENDS = {
    "flashinfer": flashinfer.FlashInferBackend,
    "flash_attn": flash_attn.FlashAttentionBackend,
    "int8": int8.Int8Backend,
    "blocksparse": blocksparse.BlockSparseBackend,
}


@pytest.fixture(autouse=True)
def _fresh_doubles(monkeypatch):
    monkeypatch.setattr(flashinfer.Wrapper, "made", [])
    monkeypatch.setattr(flash_attn, "fa3", flash_attn.Library())
    monkeypatch.setattr(int8, "ixformer", int8.Library())
    monkeypatch.setattr(blocksparse, "kernels", blocksparse.Kernels())


class World:
    """A backend, its layers, their builder and a cache of each, as a host makes them."""

    def __init__(self, cls, *layers, limited=None, parallel=None, options=None, level="uniform_batch", **requested):
        selection = agree(agreed_graphs=level, **requested)
        self.backend = LoadedBackend(cls(evolve(selection.agreement, options=options or {}), selection.device))
        self.impls = [self.backend.make_impl(layer) for layer in layers or [Layer(name="layers.0")]]
        self.state = self.backend.make_state(limits(**(limited or {})), parallel)
        self.builder = self.backend.make_builder(self.impls, self.state)
        if self.backend.agreement.requirements.paged:
            self.caches = [self.backend.make_cache(NUM_BLOCKS, impl=impl) for impl in self.impls]

    def run(self, metadata, tokens=None, index=0, lse=None, key=True):
        """Run a layer; return its output, 7 where nothing was written."""
        impl = self.impls[index]
        rows = metadata.batch.num_actual_tokens if tokens is None else tokens
        query, k, v, output = make_qkv(self.backend, rows)
        self.given = query.to(impl.query_dtype), k, v
        k, v = (k, v) if key else (None, None)
        cache = self.caches[index] if hasattr(self, "caches") else None
        impl.forward(self.given[0], k, v, cache, metadata, output, lse=lse)
        return output

    def capture(self, *keys, **how):
        with self.state.graph_capture(self.state.limits.max_num_reqs):
            graphs = [self.state.graph(key, **how) for key in keys]
            return [(graph, self.builder.build(graph.dummy_batch(self.builder), graph=graph)) for graph in graphs]


# --- all -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BACKENDS)
def test_a_sketch_is_a_backend(name):
    assert check_backend_class(BACKENDS[name], f"{name}/design") is BACKENDS[name]


def test_sketches_take_public_names_alone():
    """No module of the contract but the packages themselves, and no name that starts with an underscore."""
    paths = list(DESIGN.glob("*.py"))
    assert paths
    for path in paths:
        tree = ast.parse(path.read_text("utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("attnplug"):
                assert node.module in {"attnplug.contract", "attnplug.batching", "attnplug.ops", "attnplug.errors"}
            if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
                assert isinstance(node.value, ast.Name), path
                assert node.value.id == "self", path


# --- FlashInfer -----------------------------------------------------------------------------------------------------


def flash_infer(*layers, **requested):
    return World(flashinfer.FlashInferBackend, *layers, **requested)


def test_flashinfer_plans_each_phase_once_per_plan_key_and_step():
    names = [Layer(name=f"layers.{i}", scale=scale) for i, scale in enumerate((0.5, 0.5, 0.25))]
    world = flash_infer(*names, logits_soft_cap=30.0)
    metadata = world.builder.build(make_batch([1, 1, 5], [9, 4, 8]))

    assert [len(wrapper.plans) for wrapper in flashinfer.Wrapper.made] == [1] * 4  # two keys, two phases
    assert {wrapper.workspace.data_ptr() for wrapper in flashinfer.Wrapper.made} == {world.state.workspace.data_ptr()}
    for index, scale in enumerate((0.5, 0.5, 0.25)):
        output = world.run(metadata, index=index)
        assert not output.eq(7).any()
        plan = world.impls[index].wrapped.plan_of(metadata)
        for wrapper, rows in ((plan.decode, 2), (plan.prefill, 5)):
            assert wrapper.runs[-1]["q"].shape[0] == rows
            assert wrapper.runs[-1]["cache"] is world.caches[index]
            assert {name: wrapper.plans[0][name] for name in ("sm_scale", "logits_soft_cap", "window_left")} == {
                "sm_scale": scale, "logits_soft_cap": 30.0, "window_left": -1,
            }  # fmt: skip
    assert world.impls[0].wrapped.plan_of(metadata) is world.impls[1].wrapped.plan_of(metadata)

    world.builder.build(make_batch([1], [3]))
    assert sorted(len(wrapper.plans) for wrapper in flashinfer.Wrapper.made) == [1, 1, 2, 2]


def test_flashinfer_gets_pages_in_compressed_rows_from_the_host():
    world = flash_infer()
    metadata = world.builder.build(make_batch([1, 1, 5], [9, 4, 8]))  # blocks of 4: 1-3, 4, 5-6
    plan = world.impls[0].wrapped.plan_of(metadata)

    indptr, indices, last = plan.decode.plans[0]["arrays"]
    assert (indptr.tolist(), indices.tolist(), last.tolist()) == ([0, 3, 4], [1, 2, 3, 4], [1, 4])
    queries, indptr, indices, last = plan.prefill.plans[0]["arrays"]
    assert (queries.tolist(), indptr.tolist(), last.tolist()) == ([0, 5], [4, 6], [4])
    assert indices[4:].tolist() == [5, 6]
    assert plan.prefill.plans[0]["causal"] is True


def test_flashinfer_decodes_of_another_length_are_prefills():
    world = flash_infer(decode_query_len=3)
    metadata = world.builder.build(make_batch([3, 3, 2, 1], [9, 8, 7, 6]))
    plan = world.impls[0].wrapped.plan_of(metadata)

    assert (metadata.num_decodes, metadata.num_prefills, plan.decode.plans[0]["q_len_per_req"]) == (2, 2, 3)
    assert plan.prefill.plans[0]["arrays"][0].tolist() == [0, 2, 3]


def test_flashinfer_scales_are_floats_and_its_lse_has_base_two():
    layer = Layer(name="layers.0", k_scale=0.5, v_scale=2.0)
    world = flash_infer(
        layer,
        kv_cache_dtype="fp8_e4m3",
        dtype="bfloat16",
        return_lse=True,
        kv_layout="HND",
        kv_cache_form="interleaved",
    )
    lse = torch.full((7, 4), 7.0)
    metadata = world.builder.build(make_batch([1, 5], [9, 8]))
    world.run(metadata, tokens=7, lse=lse)
    run = world.impls[0].wrapped.plan_of(metadata).decode.runs[0]

    assert (run["k_scale"], run["v_scale"]) == (0.5, 2.0)
    assert (run["cache"].k.shape, run["cache"].k.dtype) == ((NUM_BLOCKS, 4, 2, 8), torch.float8_e4m3fn)
    assert run["cache"].k.stride() == (2 * 64, 8, 32, 1)  # interleaved, heads first in memory
    torch.testing.assert_close(lse[:6], torch.full((6, 4), math.log(2)))
    assert lse[6].eq(7).all()


def test_flashinfer_sinks_take_the_wrapper_that_knows_them():
    sinks = torch.tensor([0.5, -1.0, 0.0, 2.0])
    world = flash_infer(Layer(name="layers.0", sinks=sinks), sinks=True)
    metadata = world.builder.build(make_batch([1], [9]))
    world.run(metadata)

    (run,) = world.impls[0].wrapped.plan_of(metadata).decode.runs
    assert run["extra"][0] is sinks
    assert run["extra"][1] == world.impls[0].scale


def test_flashinfer_graph_wrappers_keep_their_buffers_and_are_planned_again():
    world = flash_infer()
    ((graph, captured), (_, other)) = world.capture(GraphShape(3, 3, 1), GraphShape(8, 8, 1))
    wrapper = world.impls[0].wrapped.plan_of(captured).decode
    places = [buffer.data_ptr() for buffer in wrapper.buffers]
    assert world.impls[0].wrapped.plan_of(other).decode is not wrapper
    assert [buffer.shape[0] for buffer in wrapper.buffers] == [4, 3 * 16, 3]

    for lens, indptr in (([9, 4], [0, 3, 4, 4]), ([1, 5, 8], [0, 1, 3, 5])):
        seen = world.builder.build(make_batch([1] * len(lens), lens), graph=graph)
        assert world.impls[0].wrapped.plan_of(seen).decode is wrapper
        assert wrapper.buffers[0].tolist() == indptr
        assert wrapper.buffers[1][: indptr[-1]].tolist() == list(range(1, indptr[-1] + 1))
        assert wrapper.buffers[2].tolist() == [*[(n - 1) % 4 + 1 for n in lens], 1][:3]
        world.run(captured, tokens=3)  # a replay makes the captured call
    assert [buffer.data_ptr() for buffer in wrapper.buffers] == places
    assert len(wrapper.plans) == 3
    assert not world.builder.can_run_in_cudagraph(make_batch([5], [9]))
    with pytest.raises(BatchError):  # not even where the shape would fit
        world.builder.build(make_batch([3], [9]), graph=graph)


def test_flashinfer_groups_of_one_state_have_separate_wrappers():
    world = flash_infer()
    second = world.backend.make_builder(world.impls, world.state)
    with world.state.graph_capture(2):
        graph = world.state.graph(GraphShape(2, 2, 1))
        mine, theirs = (each.build(graph.dummy_batch(), graph=graph) for each in (world.builder, second))
    impl = world.impls[0]

    assert impl.wrapped.plan_of(mine).decode is not impl.wrapped.plan_of(theirs).decode


def test_flashinfer_multi_token_graphs_satisfy_the_librarys_shortest_sequence():
    world = flash_infer(decode_query_len=2)
    ((graph, captured),) = world.capture(GraphShape(3, 6, 2))
    world.builder.build(make_batch([2], [9]), graph=graph)

    wrapper = world.impls[0].wrapped.plan_of(captured).decode
    assert wrapper.plans[-1]["q_len_per_req"] == 2
    assert wrapper.buffers[2].tolist() == [1, 2, 2]


@pytest.mark.parametrize("in_graph", [False, True])
def test_flashinfer_advances_by_planning_again_on_the_host(in_graph):
    world = flash_infer()
    ((graph, _),) = world.capture(GraphShape(3, 3, 1))
    metadata = world.builder.build(make_batch([1, 1, 1], [9, 4, 7], width=4), graph=graph if in_graph else None)
    tokens = DecodeInputs(
        sampled=torch.tensor([5, 6, 7]), input_ids=torch.zeros(3, dtype=torch.long), positions=torch.tensor([8, 3, 6])
    )
    with pytest.raises(BatchError):  # the second request has no block for a fifth token
        world.builder.advance_step(metadata, prefills_to_decodes=False, num_queries=4)
    table = metadata.batch.block_table.clone()
    table[1, 1] = 20
    metadata = world.builder.build(
        make_batch([1, 1, 1], [9, 4, 7], block_table=table), graph=graph if in_graph else None
    )
    advanced = world.builder.advance_step(metadata, tokens=tokens, num_queries=2)

    wrapper = world.impls[0].wrapped.plan_of(advanced).decode
    indptr, indices, last = wrapper.plans[-1]["arrays"]
    assert (indptr.tolist()[:3], indices.tolist()[:5]) == ([0, 3, 5], [1, 2, 3, 4, 20])
    assert set(indptr.tolist()[3:]) == ({5} if in_graph else set())  # in a graph the finished request is padding
    assert last.tolist() == ([2, 1, 1] if in_graph else [2, 1])
    assert advanced.batch.slot_mapping.tolist() == [3 * 4 + 1, 20 * 4] + [-1] * in_graph
    assert (tokens.input_ids.tolist(), tokens.positions.tolist()) == ([5, 6, 0], [9, 4, 6])


def test_flashinfer_cascades_in_two_levels():
    world = flash_infer(cascade=True)
    table, _ = page_out([1, 2], [10, 11])
    table[1, :2] = table[0, :2]
    batch = Batch.from_lengths(
        [1, 2], [10, 11], block_table=table, slot_mapping=torch.tensor([4 * 3 + 1, 4 * 6 + 1, 4 * 6 + 2]),
        common_prefix_len=8,
    )  # fmt: skip
    metadata = world.builder.build(batch)
    output = world.run(metadata)
    (shared, own), (shared_pages, own_pages), (shared_indices, own_indices), (full, last) = (
        world.impls[0].wrapped.plan_of(metadata).cascade.plans[0]["levels"]
    )

    assert (shared.tolist(), own.tolist()) == ([0, 3], [0, 1, 3])
    assert (shared_pages.tolist(), own_pages.tolist()) == ([0, 2], [0, 1, 2])
    assert (shared_indices.tolist(), own_indices.tolist()) == ([1, 2], [3, 6])
    assert (full.tolist(), last.tolist()) == ([4], [2, 3])
    assert output.eq(1).all()
    assert not world.builder.can_run_in_cudagraph(batch)


# --- FlashAttention -------------------------------------------------------------------------------------------------


def flash_attention(*layers, **requested):
    return World(flash_attn.FlashAttentionBackend, *layers, **requested)


def test_flash_attention_gets_each_phase_with_its_own_schedule():
    world = flash_attention(sliding_window=9, num_q_heads=8)
    metadata = world.builder.build(make_batch([1, 1, 5], [9, 4, 8]))
    output = world.run(metadata)
    decode, prefill = flash_attn.fa3.attended

    assert (decode["cu_seqlens_q"].tolist(), prefill["cu_seqlens_q"].tolist()) == ([0, 1, 2], [0, 5])
    assert (decode["seqused_k"].tolist(), prefill["seqused_k"].tolist()) == ([9, 4], [8])
    assert (decode["max_seqlen_q"], decode["max_seqlen_k"], prefill["max_seqlen_q"], prefill["max_seqlen_k"]) == (
        1, 9, 5, 8,
    )  # fmt: skip
    assert prefill["block_table"].tolist() == metadata.batch.block_table[2:].tolist()
    assert (decode["window_size"], decode["softcap"], decode["k_descale"]) == ((8, 0), 0.0, None)
    assert [int(call["scheduler_metadata"][0]) for call in (decode, prefill)] == [1, 2]
    assert flash_attn.fa3.scheduled[1]["num_heads_q"] == 8
    assert (output[:2].eq(1).all(), output[2:].eq(2).all()) == (True, True)


def test_flash_attention_builds_fast_without_schedules():
    world = flash_attention()
    world.run(world.builder.build(make_batch([1], [9]), fast=True))

    assert flash_attn.fa3.attended[0]["scheduler_metadata"] is None
    assert not flash_attn.fa3.scheduled


def test_flash_attention_schedules_stay_in_place_and_their_tail_is_zero():
    world = flash_attention(limited={"capture_sizes": (4, 8), "max_num_splits": 16})
    ((small, captured), _) = world.capture(GraphShape(4, 4, 1), GraphShape(8, 8, 1))
    (call,) = world.impls[0].wrapped.plan_of(captured)
    place = call.scheduler_metadata.data_ptr()
    whole = torch.as_strided(call.scheduler_metadata, (1 + 16,), (1,))
    whole.fill_(9)  # what an earlier step left

    seen = world.builder.build(make_batch([1, 1], [9, 4]), graph=small, fast=True)
    (call,) = world.impls[0].wrapped.plan_of(seen)
    assert call.scheduler_metadata.data_ptr() == place
    assert whole[:4].eq(len(flash_attn.fa3.scheduled)).all()
    assert not whole[4:].any()
    assert (captured.num_splits, call.max_seqlen_k, call.seqused_k.tolist()) == (16, 64, [9, 4, 0, 0])
    assert world.builder.build(make_batch([5, 5], [5, 5])).num_splits == 0  # beyond what is captured


def test_flash_attention_has_one_split_where_results_are_batch_invariant():
    world = flash_attention(batch_invariant=True, limited={"capture_sizes": (8,), "max_num_splits": 16})

    assert world.builder.build(make_batch([1], [9])).num_splits == 1


def test_flash_attention_takes_other_pages_without_a_new_schedule():
    world = flash_attention()
    batch = make_batch([1, 5], [9, 8])
    metadata = world.builder.build(batch)
    table, slots = batch.block_table + 10, batch.slot_mapping + 40
    table[batch.block_table == 0] = 0

    updated = world.builder.update_block_table(metadata, table, slots)

    assert len(flash_attn.fa3.scheduled) == 2
    plan_of = world.impls[0].wrapped.plan_of
    for new, old, rows in zip(plan_of(updated), plan_of(metadata), (slice(1), slice(1, 2)), strict=True):
        assert new.scheduler_metadata is old.scheduler_metadata
        assert torch.equal(new.block_table, table[rows])
        assert torch.equal(old.block_table, batch.block_table[rows])


def test_flash_attention_cascades_and_counts_the_sink_once():
    sinks = torch.zeros(4)
    world = flash_attention(Layer(name="layers.0", sinks=sinks), cascade=True, sinks=True, return_lse=True)
    table, _ = page_out([1, 2], [10, 11])
    table[1, :2] = table[0, :2]
    batch = Batch.from_lengths(
        [1, 2], [10, 11], block_table=table, slot_mapping=torch.tensor([4 * 3 + 1, 4 * 6 + 1, 4 * 6 + 2]),
        common_prefix_len=8,
    )  # fmt: skip
    lse = torch.zeros(3, 4)
    output = world.run(world.builder.build(batch), lse=lse)
    prefix, suffix = flash_attn.fa3.attended

    assert (prefix["cu_seqlens_q"].tolist(), prefix["seqused_k"].tolist(), prefix["causal"]) == ([0, 3], [8], False)
    assert (suffix["cu_seqlens_q"].tolist(), suffix["seqused_k"].tolist(), suffix["causal"]) == (
        [0, 1, 3],
        [2, 3],
        True,
    )
    assert (prefix["block_table"].shape[0], suffix["block_table"].tolist()) == (1, table[:, 2:].tolist())
    assert (prefix["s_aux"] is sinks, suffix["s_aux"]) == (True, None)
    assert [call["batch_size"] for call in flash_attn.fa3.scheduled] == [1, 2]
    torch.testing.assert_close(output, torch.full_like(output, 1.5))  # outputs 1 and 2 of equal weight
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(2)))


def test_flash_attention_shares_a_sequence_between_ranks():
    group = SimpleNamespace(size=2)
    ranks = Parallel(dcp_rank=1, dcp_size=2, dcp_interleave=2, dcp_group=group)
    world = flash_attention(dcp_size=2, parallel=ranks, level="never")
    lens = torch.tensor([9, 6], dtype=torch.int32)
    table, _ = page_out([1, 4], [9, 6])
    batch = Batch.from_lengths(
        [1, 4], [9, 6], block_table=table, slot_mapping=torch.full((5,), -1), dcp_local_seq_lens=lens // 2
    )
    world.run(world.builder.build(batch))
    context, new = flash_attn.fa3.attended

    assert (context["q"].shape[1], new["q"].shape[1]) == (8, 4)
    assert (context["seqused_k"].tolist(), context["causal"]) == ([4, 0], False)  # of 8 and 2 cached tokens
    assert (context["max_seqlen_k"], flash_attn.fa3.scheduled[0]["num_heads_q"]) == (6, 8)
    assert (new["seqused_k"].tolist(), new["block_table"], new["causal"]) == ([1, 4], None, True)
    assert new["k"] is world.given[1]
    assert flash_attn.fa3.groups == [group, group]


def test_flash_attention_keeps_the_lengths_of_a_shard_in_place():
    ranks = Parallel(dcp_rank=1, dcp_size=2, dcp_interleave=2, dcp_group=SimpleNamespace(size=2))
    world = flash_attention(dcp_size=2, parallel=ranks)
    backend, key = world.backend, GraphShape(3, 3, 1)
    local = torch.ones(3, dtype=torch.int32)
    with world.state.graph_capture(3):
        graph = world.state.graph(key)
        captured = world.builder.build(evolve(backend.dummy_batch(key), dcp_local_seq_lens=local), graph=graph)
    table, _ = page_out([1, 1], [9, 6])
    batch = Batch.from_lengths(
        [1, 1], [9, 6], block_table=table, slot_mapping=torch.full((2,), -1), dcp_local_seq_lens=local[:2]
    )
    world.builder.build(batch, graph=graph)

    context, new = world.impls[0].wrapped.plan_of(captured)
    assert (context.seqused_k.tolist(), new.seqused_k.tolist()) == ([4, 2, 0], [1, 1, 0])
    assert context.scheduler_metadata.data_ptr() != new.scheduler_metadata.data_ptr()


def test_flash_attention_descales_per_request_and_head():
    scales = {"q_scale": 0.25, "k_scale": 0.5, "v_scale": 2.0}
    layer = Layer(name="layers.0", **scales)
    world = flash_attention(layer, kv_cache_dtype="fp8_e4m3", dtype="bfloat16")
    world.run(world.builder.build(make_batch([1, 1], [9, 4])))
    (call,) = flash_attn.fa3.attended

    for name, scale in scales.items():
        descale = call[name.replace("scale", "descale")]
        assert (descale.shape, descale.stride(), descale[1, 1].item()) == ((2, 2), (0, 0), scale)
    assert (call["q"].dtype, call["k"].dtype) == (torch.float8_e4m3fn, torch.float8_e4m3fn)
    assert flash_attn.fa3.scheduled[0]["qkv_dtype"] == torch.float8_e4m3fn


def test_flash_attention_encodes_without_a_cache():
    world = flash_attention(attn_type="encoder_only", paged=False, level="never")
    world.run(world.builder.build(Batch.from_lengths([4, 2], causal=False)))
    (call,) = flash_attn.fa3.attended

    assert (call["k"] is world.given[1], call["block_table"], call["causal"]) == (True, None, False)
    assert (call["seqused_k"].tolist(), call["max_seqlen_k"]) == ([4, 2], 4)


def test_flash_attention_reads_what_the_encoder_left():
    world = flash_attention(attn_type="encoder_decoder", level="never")
    table, _ = page_out([0, 0], [7, 3])
    lens = torch.tensor([7, 3], dtype=torch.int32)
    batch = Batch.from_lengths(
        [1, 1], [5, 6], block_table=table, slot_mapping=torch.empty(0, dtype=torch.int64), encoder_seq_lens=lens,
        causal=False,
    )  # fmt: skip
    world.run(world.builder.build(batch), key=False)
    (call,) = flash_attn.fa3.attended

    assert (call["seqused_k"].tolist(), call["max_seqlen_k"], call["causal"]) == ([7, 3], 7, False)


# --- ixformer -------------------------------------------------------------------------------------------------------


def calibrated(tmp_path, **requested):
    """Level 1, with value scales from a calibration file."""
    scales = {f"layers.{i}": torch.full((2, 8), 0.02 * (i + 1)) for i in range(2)}
    torch.save(scales, tmp_path / "scales.pt")
    layers = [Layer(name=name) for name in scales]
    options = {"value_scales": str(tmp_path / "scales.pt")}
    return World(
        int8.Int8Backend, *layers, options=options, kv_cache_dtype="int8", kv_layout="HND", **requested
    ), scales


def test_int8_caches_have_roles_with_and_without_blocks(tmp_path):
    world, scales = calibrated(tmp_path)

    for cache, values in zip(world.caches, scales.values(), strict=True):
        assert {role: (tuple(each.shape), each.dtype) for role, each in cache.tensors.items()} == {
            "k": ((NUM_BLOCKS, 4, 2, 8), torch.int8),
            "v": ((NUM_BLOCKS, 4, 2, 8), torch.int8),
            "k_scale": ((NUM_BLOCKS, 2, 4), torch.float32),
            "v_scale": ((2, 8), torch.float32),
        }
        assert torch.equal(cache["v_scale"], values)
    assert world.backend.bytes_per_block == 2 * 2 * 4 * 8 + 4 * 2 * 4


def test_int8_blocks_move_with_their_scales_and_static_scales_stay(tmp_path):
    world, _ = calibrated(tmp_path)
    first, second = world.caches
    first.k[3], first.v[3], first["k_scale"][3] = 5, 6, 0.5

    world.backend.copy_blocks([first], {3: [7, 8]})
    world.backend.swap_blocks(first, second, [(3, 9)])

    assert first.k[7:9].eq(5).all()
    assert first.v[7:9].eq(6).all()
    assert first["k_scale"][7:9].eq(0.5).all()
    assert (second.v[9].eq(6).all(), second["k_scale"][9].eq(0.5).all()) == (True, True)
    assert not second["v_scale"].eq(first["v_scale"]).any()


def test_int8_planes_are_views_by_role():
    """Level 2 of the vendor: three planes, K in the first, V as 16-bit numbers in the other two."""
    world = World(int8.Int8Backend, kv_cache_dtype="int8_k", dtype="bfloat16", kv_layout="HND")
    planes = torch.zeros(3, NUM_BLOCKS, 2, 4, 8, dtype=torch.int8)
    values = planes[1:].reshape(-1).view(torch.bfloat16).view(NUM_BLOCKS, 2, 4, 8)
    views = {"k": planes[0].transpose(1, 2), "v": values.transpose(1, 2), "k_scale": torch.zeros(NUM_BLOCKS, 2, 4)}
    cache = world.backend.bind_cache(views)
    world.caches = [cache]
    world.run(world.builder.build(make_batch([5], [5])))
    (call,) = int8.ixformer.prefills
    assert call["v"].data_ptr() == planes[1].data_ptr()

    written = [each.clone() for each in (planes[0, 1], values[1], cache["k_scale"][1])]
    world.backend.copy_blocks(world.caches, [(1, 9)])

    assert written[1].any()
    for kept, now in zip(written, (planes[0, 9], values[9], cache["k_scale"][9]), strict=True):
        assert torch.equal(kept, now)
    assert not torch.equal(planes[1, 9].view(torch.bfloat16), values[9][..., :4])  # block 9 of V is elsewhere


def test_int8_prefills_write_apart_and_decodes_fused(tmp_path):
    world, _ = calibrated(tmp_path)
    batch = make_batch([1, 1, 5], [9, 4, 8])
    metadata = world.builder.build(batch)
    world.run(metadata)
    (prefill,), (decode,) = int8.ixformer.prefills, int8.ixformer.decodes

    assert (world.impls[0].forward_writes, int8.ixformer.written[0].tolist()) == (
        {"prefill", "decode"}, batch.slot_mapping[2:].tolist(),
    )  # fmt: skip
    assert (prefill["q_scale"].shape, prefill["cu_seqlens_k"].tolist()) == ((4, 5), [0, 8])
    assert (decode["save_key"].shape, decode["save_key"].dtype) == ((2, 2, 8), torch.int8)
    assert (decode["context_lens"].tolist(), decode["max_context_len"], decode["use_cuda_graph"]) == ([9, 4], 9, False)
    assert decode["value_scale_cache"] is world.caches[0]["v_scale"]
    slots = batch.slot_mapping
    written = world.caches[0]["k_scale"].transpose(1, 2).reshape(-1, 2).any(1).nonzero().flatten()
    assert sorted(slots.tolist()) == written.tolist()  # each token once, wherever the writer found its place


def test_int8_hosts_may_write_prefills_as_a_separate_op():
    layer = Layer(name="layers.0", cache_write="host")
    world = World(int8.Int8Backend, layer, kv_cache_dtype="int8_k", dtype="bfloat16", kv_layout="HND")
    impl, batch = world.impls[0], make_batch([1, 5], [9, 8])
    metadata = world.builder.build(batch)
    query, key, value, output = make_qkv(world.backend, 6)

    with forward_context({"layers.0": metadata}), torch.inference_mode():
        impl.write_kv_op(key, value, world.caches[0])
        impl.forward_op(query, key, value, world.caches[0], output)

    assert (impl.forward_writes, impl.host_writes) == ({"decode"}, {"prefill"})
    assert [slots.tolist() for slots in int8.ixformer.written] == [batch.slot_mapping[1:].tolist()]
    assert int8.ixformer.decodes[0]["save_key"].shape[0] == 1


def test_int8_graphs_write_padding_into_the_null_block():
    world = World(int8.Int8Backend, kv_cache_dtype="int8_k", dtype="bfloat16", kv_layout="HND")
    ((graph, captured),) = world.capture(GraphShape(4, 4, 1))
    world.run(captured, tokens=4)
    assert not world.caches[0]["k_scale"][1:].any()  # the capture touches no block of a request

    batch = make_batch([1, 1], [9, 4])
    seen = world.builder.build(batch, graph=graph)
    world.run(captured, tokens=4)

    assert seen.context_lens.data_ptr() == captured.context_lens.data_ptr()
    assert (captured.context_lens.tolist(), int8.ixformer.decodes[-1]["use_cuda_graph"]) == ([9, 4, 1, 1], True)
    written = world.caches[0]["k_scale"].transpose(1, 2).reshape(-1, 2).any(1).nonzero().flatten().tolist()
    assert [place for place in written if place >= 4] == sorted(batch.slot_mapping.tolist())


def test_int8_layers_that_share_a_cache_save_nothing():
    layer = Layer(name="layers.1", kv_sharing_target="layers.0")
    world = World(int8.Int8Backend, layer, kv_cache_dtype="int8_k", dtype="bfloat16", kv_sharing=True, kv_layout="HND")
    world.run(world.builder.build(make_batch([1, 5], [9, 8])), key=False)

    assert not int8.ixformer.written
    assert "save_key" not in int8.ixformer.decodes[0]
    assert not world.caches[0]["k_scale"].any()


def test_int8_calibrates_around_a_backend_that_the_selector_chose():
    inner = make_backend()
    world = World(type("B", (int8.ObserverBackend,), {"inner": inner}), level="never")
    other = World(ToyBackend, level="never")
    for lens in ([1, 5], [9, 8]), ([1], [3]):
        batch = make_batch(*lens)
        output = world.run(world.builder.build(batch))
        expected = torch.full_like(output, 7.0)
        query, (key, value) = world.given[0], world.given[1:]
        other.impls[0].forward(query, key, value, other.caches[0], other.builder.build(batch), expected)
        assert torch.equal(output, expected)
        assert torch.equal(world.impls[0].wrapped.largest >= value.abs().amax(0), torch.ones(2, 8, dtype=torch.bool))
    assert same(world.caches[0], other.caches[0])


# --- block-sparse ---------------------------------------------------------------------------------------------------

PATTERN = {"block_size": 4, "local_blocks": 2, "vert_stride": 8, "max_seqlen": 64}


def block_sparse(rank=0, size=1, limited=None, **requested):
    parallel = Parallel(tp_rank=rank, tp_size=size)
    return World(
        blocksparse.BlockSparseBackend, parallel=parallel, limited=limited, level="single_token_decode",
        **{"block_sparse": PATTERN, **requested},
    )  # fmt: skip


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
def test_block_sparse_heads_are_counted_over_all_ranks(rank, size):
    world = block_sparse(rank, size)
    lens = [33, 7]
    metadata = world.builder.build(make_batch([1, 1], lens, block_size=4))
    visited = world.impls[0].wrapped.plan_of(metadata)["visited"]
    step = max(1, 8 // (4 * size))

    for request, length in enumerate(lens):
        last = (length - 1) // 4
        for group in range(2):
            heads = [rank * 4 + group * 2, rank * 4 + group * 2 + 1]
            expected = [j <= last and any(last - j < 2 or (j + h * step + 1) % 8 == 0 for h in heads) for j in range(9)]
            assert visited[request, group].tolist() == expected


def test_block_sparse_prefix_hits_start_behind_what_is_cached():
    world = block_sparse()
    metadata = world.builder.build(make_batch([1, 5, 3], [9, 8, 3]))
    world.run(metadata)
    (prefill,), (decode,) = blocksparse.kernels.prefills, blocksparse.kernels.decodes

    assert (prefill["context_lens"].tolist(), prefill["seq_lens"].tolist()) == ([3, 0], [8, 3])
    assert (prefill["query_start_loc"].tolist(), prefill["max_query_len"], prefill["q"].shape[0]) == ([0, 5, 8], 5, 8)
    assert (decode["seq_lens"].tolist(), decode["q"].shape[0], decode["pattern"]) == ([9], 1, prefill["pattern"])


def test_block_sparse_decode_graphs_update_what_is_visited_in_place():
    world = block_sparse()
    ((graph, captured),) = world.capture(GraphShape(3, 3, 1))
    kept = world.impls[0].wrapped.plan_of(captured)["visited"]

    world.builder.build(make_batch([1, 1], [33, 7]), graph=graph)

    eager = world.impls[0].wrapped.plan_of(world.builder.build(make_batch([1, 1], [33, 7])))["visited"]
    assert kept.shape == (3, 2, 16)
    assert torch.equal(kept[:2, :, :9], eager)
    assert not kept[:2, :, 9:].any()
    world.run(captured, tokens=3)
    assert blocksparse.kernels.decodes[-1]["visited"] is kept
    assert not world.builder.can_run_in_cudagraph(make_batch([2], [9]))


def test_block_sparse_patterns_cover_what_the_limits_allow():
    with pytest.raises(LimitsError, match="covers 64 tokens"):
        block_sparse(limited={"max_seq_len": 65})


# --- vLLM's V1 engine -----------------------------------------------------------------------------------------------


class GraphBuilder(MetadataBuilder):
    supports_graphs = True


class GraphBackend(ToyBackend):
    builder_class = GraphBuilder


class Model:
    """Layers that a forward context finds their metadata for; its inputs stay where they are."""

    def __init__(self, groups, rows):
        impl = groups[0].impls[0]
        requested = impl.agreement.requirements
        self.groups = groups
        self.query, self.key, self.value, _ = make_qkv(impl.backend, rows)
        self.outputs = {each.layer.name: torch.full((rows, 32), 7.0) for group in groups for each in group.impls}
        self.heads = requested.num_q_heads

    def __call__(self):
        for group in self.groups:
            for impl in group.impls:
                cache = group.caches[impl.layer.kv_sharing_target or impl.layer.name]
                key, value = (None, None) if impl.layer.kv_sharing_target else (self.key, self.value)
                if impl.host_writes:
                    impl.write_kv_op(key, value, cache)
                impl.forward_op(self.query, key, value, cache, self.outputs[impl.layer.name])


def runner(rows, *groups, level="uniform_batch", **requested):
    """Return a runner over groups of layers of one backend."""
    backend = make_backend(GraphBackend, agreed_graphs=level, **requested)
    state = backend.make_state(limits(num_blocks=2 * NUM_BLOCKS))
    made = []
    for layers in groups:
        impls = [backend.make_impl(layer) for layer in layers]
        caches = {
            impl.layer.name: random_cache(backend, 2 * NUM_BLOCKS)
            for impl in impls if not impl.layer.kv_sharing_target
        }  # fmt: skip
        made.append(vllm.KVCacheGroup(impls, backend.make_builder(impls, state), caches))
    return vllm.Runner(made, Model(made, rows))


def common(query_lens, seq_lens, **changes):
    """Return what the engine prepares for a step, without pages: each group has its own."""
    batch = Batch.from_lengths(query_lens, seq_lens)
    names = ("query_start_loc", "query_start_loc_cpu", "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len")
    return vllm.CommonAttentionMetadata(**{
        **{name: getattr(batch, name) for name in names}, "max_seq_len": batch.max_seq_len,
        "seq_lens_cpu_upper_bound": batch.seq_lens, "block_table_tensor": None, "slot_mapping": None, **changes,
    })  # fmt: skip


def tables(query_lens, seq_lens, count):
    table, slots = page_out(query_lens, seq_lens)
    used, shift = table.gt(0).int(), int(table.max())
    return [(table + used * shift * i, slots + 4 * shift * i) for i in range(count)]


def test_a_host_of_kv_cache_groups_replays_what_it_would_compute():
    groups = [[Layer(name="layers.0"), Layer(name="layers.1", cache_write="host")], [Layer(name="layers.2")]]
    host = runner(4, *groups)
    backend = host.groups[0].builder.backend
    before = [{name: copy_of(backend, cache) for name, cache in group.caches.items()} for group in host.groups]
    host.capture_model([GraphShape(2, 2, 1), GraphShape(4, 4, 1)])
    for lens in ([9, 4, 7], [3, 8], [5]):
        query_lens = [1] * len(lens)
        pages = tables(query_lens, lens, 2)
        for group, kept in zip(host.groups, before, strict=True):
            for name, cache in group.caches.items():
                backend.swap_blocks(kept[name], cache, [(block, block) for block in range(cache.num_blocks)])
        step = host.execute_model(common(query_lens, lens), pages)
        assert step.graph.key.num_reqs == (4 if len(lens) == 3 else 2)
        replayed = {name: output.clone() for name, output in host.model.outputs.items()}
        written = {name: copy_of(backend, cache) for group in host.groups for name, cache in group.caches.items()}

        for group, kept in zip(host.groups, before, strict=True):
            for name, cache in group.caches.items():
                backend.swap_blocks(kept[name], cache, [(block, block) for block in range(cache.num_blocks)])
        batches = {
            group.builder: evolve(common(query_lens, lens), block_table_tensor=table, slot_mapping=slots).to_batch()
            for group, (table, slots) in zip(host.groups, pages, strict=True)
        }
        host._run({builder: builder.build(batch) for builder, batch in batches.items()})
        for name, output in host.model.outputs.items():
            torch.testing.assert_close(replayed[name][: len(lens)], output[: len(lens)])
        for group in host.groups:
            for name, cache in group.caches.items():
                for role, tensor in cache.tensors.items():
                    assert torch.equal(tensor[1:], written[name][role][1:])


def test_a_host_runs_mixed_batches_eagerly_and_leaves_padded_rows_alone():
    host = runner(8, [Layer(name="layers.0")])
    host.capture_model([GraphShape(4, 4, 1)])
    step = host.execute_model(common([1, 5], [9, 8]), tables([1, 5], [9, 8], 1))

    assert step.graph is None
    assert not host.model.outputs["layers.0"][:6].eq(7).any()
    assert host.model.outputs["layers.0"][6:].eq(7).all()


def test_a_host_may_own_what_its_graphs_read():
    host = runner(2, [Layer(name="layers.0")])
    (group,) = host.groups
    table, slots = page_out([1, 1], [9, 4])
    mine = evolve(common([1, 1], [9, 4]), block_table_tensor=table, slot_mapping=slots).to_batch()
    key = GraphShape(2, 2, 1)
    with host.state.graph_capture(2):
        graph = host.state.graph(key, host_owned_inputs=True)
        captured = group.builder.build(mine, graph=graph)
    mine.seq_lens.copy_(torch.tensor([8, 3], dtype=torch.int32))
    mine.slot_mapping.copy_(torch.tensor([int(table[0, 1]) * 4 + 3, int(table[1, 0]) * 4 + 2]))

    step = host.state.begin_forward({group.builder: evolve(mine, max_seq_len=8)}, key=key)

    assert step.graph is graph
    assert captured.batch.seq_lens is mine.seq_lens
    assert step.metadata[group.builder].batch.block_table.data_ptr() == table.data_ptr()


def test_a_host_shares_caches_between_layers():
    shared = Layer(name="layers.1", kv_sharing_target="layers.0")
    host = runner(6, [Layer(name="layers.0", cache_write="forward"), shared], kv_sharing=True)
    pages = tables([1, 5], [9, 8], 1)
    host.execute_model(common([1, 5], [9, 8]), pages)

    torch.testing.assert_close(*host.model.outputs.values())


def test_a_host_that_knows_only_bounds_of_its_lengths():
    """Asynchronous speculative decoding: the device knows how many drafts were accepted, the host does not."""
    host = runner(2, [Layer(name="layers.0")], seq_lens_cpu_kind="upper_bound", decode_query_len=2)
    exact = torch.tensor([8], dtype=torch.int32)
    given = evolve(common([2], [9]), seq_lens=exact)
    table, slots = page_out([2], [8])
    table = torch.nn.functional.pad(table, (0, 1))
    step = host.execute_model(given, [(table, slots)])
    metadata = step.metadata[host.groups[0].builder]

    assert (metadata.num_decodes, metadata.batch.max_seq_len, metadata.batch.seq_lens.tolist()) == (1, 9, [8])


def test_a_host_attends_encoders_densely():
    impl_class = type("Impl", (ToyImpl,), {})
    world = World(
        type("Backend", (ToyBackend,), {"impl_class": impl_class}), attn_type="encoder_only", paged=False, level="never"
    )
    given = common([4, 2], [4, 2], causal=False)
    output = world.run(world.builder.build(given.to_batch()))

    assert not output.eq(7).any()


def test_a_host_asks_before_it_cascades():
    host = runner(16, [Layer(name="layers.0")], cascade=True)
    builder = host.groups[0].builder

    assert not builder.use_cascade_attention(128, [1] * 16)
    assert builder.use_cascade_attention(256, [2] * 8)


LEVELS = ("never", "single_token_decode", "uniform_batch", "always")


@pytest.mark.parametrize("key", [GraphShape(4, 4, 1), GraphShape(4, 8, 2), GraphShape(4, 16)])
@pytest.mark.parametrize("level", LEVELS)
def test_levels_of_graphs_are_those_of_the_engine(key, level):
    host = runner(16, [Layer(name="layers.0")], level=level, decode_query_len=2)
    if LEVELS.index(key.level) > LEVELS.index(level):
        with pytest.raises((LimitsError, NotNegotiatedError)):
            host.capture_model([key])
    else:
        host.capture_model([key])
        assert host.state.graphs[key].is_captured(host.groups[0].builder)


def test_agreements_that_share_a_state_may_differ_in_page_size():
    """Windowed and full layers are two agreements of one backend, one workspace, and one graph."""
    requested = {}, {"sliding_window": 9, "block_size": 2}
    full, windowed = (make_backend(GraphBackend, agreed_graphs="always", **each) for each in requested)
    state = full.make_state(limits(num_blocks=None))
    builders = [each.make_builder([each.make_impl(Layer(name="layers.0"))], state) for each in (full, windowed)]
    with state.graph_capture(2):
        graph = state.graph(GraphShape(2, 2, 1))
        for builder in builders:
            builder.build(graph.dummy_batch(builder), graph=graph)
    sizes = (4, 2)

    step = state.begin_forward(
        {builder: make_batch([1, 1], [60, 39], block_size=size) for builder, size in zip(builders, sizes, strict=True)}
    )

    for builder, size in zip(builders, sizes, strict=True):
        table = step.metadata[builder].batch.block_table
        assert torch.equal(table[:, : -(-60 // size)], make_batch([1, 1], [60, 39], block_size=size).block_table)


def test_a_host_lays_roles_into_its_own_memory():
    world = World(int8.Int8Backend, kv_cache_dtype="int8_k", dtype="bfloat16", kv_layout="HND")
    specs = world.backend.cache_tensors(NUM_BLOCKS)
    memory = torch.zeros(sum(spec.nbytes for spec in specs.values()), dtype=torch.uint8)
    parts = memory.split([spec.nbytes for spec in specs.values()])
    views = {role: spec.view(part) for (role, spec), part in zip(specs.items(), parts, strict=True)}
    world.caches = [world.backend.bind_cache(views, impl=world.impls[0])]

    world.run(world.builder.build(make_batch([5], [5])))

    assert all(part.any() for part in parts)


def test_ranks_without_requests_run_the_model_and_touch_nothing():
    host = runner(4, [Layer(name="layers.0")])
    (group,) = host.groups
    before = copy_of(group.builder.backend, group.caches["layers.0"])

    host._run({group.builder: group.builder.build(group.builder.backend.dummy_batch(GraphShape(3, 3, 1)))})

    assert not host.model.outputs["layers.0"][:3].eq(7).any()
    assert same(group.caches["layers.0"], before)


def test_layers_on_two_states_replay_one_shape():
    one, two = (runner(8, [Layer(name="layers.0")]) for _ in range(2))
    one.capture_model([GraphShape(2, 2, 1), GraphShape(8, 8, 1)])
    two.capture_model([GraphShape(8, 8, 1)])
    batches = [{host.groups[0].builder: make_batch([1, 1], [9, 4])} for host in (one, two)]

    steps = [
        host.state.begin_forward(each, key=GraphShape(8, 8, 1)) for host, each in zip((one, two), batches, strict=True)
    ]

    assert [step.graph.key for step in steps] == [GraphShape(8, 8, 1)] * 2


def test_other_ranks_plan_from_the_same_plain_data():
    world, other = flash_infer(), flash_infer()
    mine = world.builder.build(make_batch([1, 5], [9, 8]))

    theirs = other.builder.build(Batch(**mine.batch.to_dict()))

    for one, two in zip(
        world.impls[0].wrapped.plan_of(mine).decode.plans[0]["arrays"],
        other.impls[0].wrapped.plan_of(theirs).decode.plans[0]["arrays"],
        strict=True,
    ):
        assert torch.equal(one, two)


def test_what_open_features_need_reaches_layers_and_builders():
    """A rotary embedding fused into the attention call: its table by layer, positions by batch."""

    class Impl(ToyImpl):
        def run(self, query, key, value, kv_cache, metadata, output, lse):
            turned = self.layer.extra["acme.rope_fused"][metadata.batch.extra["acme.rope_fused"]].view(-1, 1, 1)
            super().run(query * turned, key * turned, value, kv_cache, metadata, output, lse)

    table = torch.randn(64)
    layer = Layer(name="layers.0", extra={"acme.rope_fused": table})
    world = World(type("B", (GraphBackend,), {"impl_class": Impl}), layer, features=("acme.rope_fused",))
    batch = make_batch([1, 3], [9, 3])
    positions = positions_of(batch)
    output = world.run(world.builder.build(evolve(batch, extra={"acme.rope_fused": positions})))

    plain = World(ToyBackend, level="never")
    expected = torch.empty_like(output)
    turned = table[positions].view(-1, 1, 1)
    query, key, value = world.given
    metadata = plain.builder.build(batch)
    plain.impls[0].forward(query * turned, key * turned, value, plain.caches[0], metadata, expected)
    torch.testing.assert_close(output, expected)
