"""What nothing reads, of a batch and of metadata: refused with a reason, not ignored."""

from __future__ import annotations

import gc

import pytest
import torch
from attrs import evolve

from attnplug.contract import Batch, GraphShape
from attnplug.errors import BatchError, CacheError, NotNegotiatedError, TensorError
from core.tests.contract.test_graphs import capture, world
from core.tests.contract.world import (
    copy_of,
    is_clear,
    make_backend,
    make_batch,
    make_builder,
    make_qkv,
    refused,
    same,
)

QUERIES, LENGTHS = [1, 1, 3], [5, 9, 3]
LENS = torch.tensor(LENGTHS, dtype=torch.int32)
STARTS = torch.tensor([0, 5, 14, 17], dtype=torch.int32)


@pytest.mark.parametrize(
    ("fields", "expected", "fix"),
    [
        ({"max_encoder_seq_len": 9}, "only paged cross attention", "attn_type='encoder_decoder'"),
        ({"encoder_seq_lens_cpu": LENS}, "only paged cross attention", "attn_type='encoder_decoder'"),
        ({"encoder_seq_lens": LENS}, "dense calls have key_start_loc", "attn_type='encoder_decoder'"),
        ({"dcp_local_seq_lens_cpu": LENS}, "dcp_size=1", "dcp_size=..."),
        ({"dcp_local_seq_lens": LENS, "dcp_local_seq_lens_cpu": LENS}, "dcp_size=1", "dcp_size=..."),
        ({"key_start_loc_cpu": STARTS}, "through the block table", "paged=False"),
        ({"key_start_loc": STARTS}, "through the block table", "paged=False"),
    ],
)
def test_a_decoder_reads_no_such_field(fields, expected, fix):
    builder = make_builder(make_backend())

    with refused(NotNegotiatedError, problem=next(iter(fields)), expected=expected, fix=fix):
        builder.build(evolve(make_batch(QUERIES, LENGTHS), **fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"max_encoder_seq_len": 9},
        {"encoder_seq_lens_cpu": LENS},
        {"dcp_local_seq_lens_cpu": LENS},
        {"block_table_cpu": torch.ones(3, 3, dtype=torch.int32)},
        {"slot_mapping_cpu": torch.arange(5)},
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("attn_type", ["decoder", "encoder_only", "encoder_decoder"])
def test_a_dense_call_reads_no_such_field(fields, attn_type):
    causal = attn_type == "decoder"
    builder = make_builder(make_backend(paged=False, attn_type=attn_type))
    batch = Batch.from_lengths(QUERIES, LENGTHS, causal=causal)

    assert builder.build(batch).num_key_rows == 17
    with refused(NotNegotiatedError, problem=next(iter(fields)), fix="select again"):
        builder.build(evolve(batch, **fields))


def test_a_batch_of_cross_attention_has_the_tensor_too():
    builder = make_builder(make_backend(attn_type="encoder_decoder"))
    batch = evolve(make_batch([1], [4]), causal=False, max_encoder_seq_len=3)

    with refused(BatchError, problem="no encoder_seq_lens"):
        builder.build(batch)


# --- metadata of another step -------------------------------------------------------------------------------------


def test_metadata_that_a_later_build_has_overwritten_is_refused():
    backend, impl, builder = world()
    (graph, larger), (captured, _) = capture(builder, GraphShape(4, 4, 1), GraphShape(8, 8, 1))
    query, key, value, output = make_qkv(backend, 4)
    pages = backend.make_cache(32)
    first = builder.build(make_batch([1, 1], [5, 3]), graph=graph)
    impl.forward(query, key, value, pages, first, output)
    before = copy_of(backend, pages)

    for later in (graph, larger):
        second = builder.build(make_batch([1, 1], [9, 7]), graph=later)
        with refused(BatchError, problem="from an earlier step", expected="overwritten", fix="the last build"):
            impl.forward(query, key, value, pages, first, output)
        with refused(BatchError, problem="from an earlier step"):
            builder.advance_step(first)
        first = second if later is graph else first
    assert same(pages, before)
    impl.forward(query, key, value, pages, captured, output)  # a replay: it reads what was built last


def test_a_build_that_is_refused_overwrites_nothing():
    backend, impl, builder = world()
    (graph,), _ = capture(builder, GraphShape(4, 4, 1))
    query, key, value, output = make_qkv(backend, 4)
    metadata = builder.build(make_batch([1, 1], [5, 3]), graph=graph)

    with pytest.raises(BatchError):
        builder.build(make_batch([1] * 5, [5] * 5), graph=graph)
    impl.forward(query, key, value, backend.make_cache(32), metadata, output)
    assert output.ne(7).any()


def test_inputs_that_the_host_owns_are_of_one_graph():
    backend, impl, builder = world()
    query, key, value, output = make_qkv(backend, 4)
    cache, graphs, batches = backend.make_cache(32), [], []
    with builder.state.graph_capture(builder.limits.max_num_reqs):
        for shape in (GraphShape(4, 4, 1), GraphShape(2, 2, 1)):
            graphs.append(builder.state.graph(shape, host_owned_inputs=True))
            batches.append(graphs[-1].dummy_batch())
            builder.build(batches[-1], graph=graphs[-1])
    first = builder.build(batches[0], graph=graphs[0])

    builder.build(batches[1], graph=graphs[1])
    impl.forward(query, key, value, cache, first, output)
    builder.build(batches[0], graph=graphs[0])
    with refused(BatchError, problem="from an earlier step"):
        impl.forward(query, key, value, cache, first, output)


def test_eager_metadata_stays_whatever_is_built_later():
    backend, impl, builder = world()
    (graph,), _ = capture(builder, GraphShape(4, 4, 1))
    query, key, value, output = make_qkv(backend, 2)
    eager = builder.build(make_batch([1, 1], [5, 3]))

    builder.build(make_batch([1, 1], [9, 7]), graph=graph)
    builder.build(make_batch([1, 1], [9, 7]))
    impl.forward(query, key, value, backend.make_cache(32), eager, output)

    assert output.ne(7).all()


def test_metadata_that_is_dropped_is_not_held():
    _, _, builder = world()
    (graph,), _ = capture(builder, GraphShape(4, 4, 1))
    for _ in range(3):
        builder.build(make_batch([1, 1], [5, 3]), graph=graph)
    gc.collect()

    assert len(graph._outdated) == 0


@pytest.mark.parametrize(("rows", "keys"), [(4, 5), (5, 4), (0, 0)])
def test_a_step_with_more_tokens_than_the_call_is_another(rows, keys):
    backend, impl, builder = world()
    metadata = builder.build(make_batch(QUERIES, LENGTHS))
    query, key, value, output = make_qkv(backend, rows, keys)
    cache = backend.make_cache(32)

    with refused(TensorError, fix="that the metadata was built for"):
        impl.forward(query, key, value, cache, metadata, output)
    assert is_clear(cache)
    impl.forward(*make_qkv(backend, 8)[:3], cache, metadata, make_qkv(backend, 8)[3])  # padded rows


def test_a_step_in_blocks_beyond_the_cache_is_another():
    backend, impl, builder = world()
    metadata = builder.build(make_batch(QUERIES, LENGTHS))
    cache = backend.make_cache(3)

    with refused(CacheError, problem="a cache of 3 blocks"):
        impl.forward(*make_qkv(backend, 5)[:3], cache, metadata, make_qkv(backend, 5)[3])
    assert is_clear(cache)


@pytest.mark.parametrize("lens", [LENS.to("meta"), [5, 9, 3]], ids=["meta", "list"])
def test_encoder_lengths_of_another_kind_are_refused(lens):
    builder = make_builder(make_backend(attn_type="encoder_decoder"))
    batch = make_batch(QUERIES, LENGTHS).to_dict() | {"causal": False, "encoder_seq_lens": LENS}

    with pytest.raises((TensorError, BatchError)):
        builder.build(Batch(**batch, encoder_seq_lens_cpu=lens))
