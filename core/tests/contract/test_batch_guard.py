"""Every number of a batch that build compares: each test corrupts one of them."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from attnplug.batching import pad_batch
from attnplug.contract import PAD_SLOT_ID, Batch, GraphShape, MetadataBuilder, Parallel
from attnplug.errors import BatchError, CacheError, NotNegotiatedError, TensorError
from core.tests.contract.toy import ToyBackend
from core.tests.contract.world import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    at_most,
    calls_of,
    limits,
    make_backend,
    make_batch,
    make_builder,
    make_layer,
    operations_of,
    refused,
)

QUERIES, LENGTHS = [1, 1, 3], [5, 9, 7]  # blocks 1-2, 3-5, 6-7


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


@pytest.fixture
def batch():
    return make_batch(QUERIES, LENGTHS)


@pytest.fixture(params=["its first step", "a later step"])
def builder(request, batch):
    """A builder, perhaps one that has built a batch that fits: what is refused is refused there too."""
    builder = make_builder(make_backend())
    if request.param == "a later step":
        builder.build(evolve(batch))
    return builder


def other(batch, name, index, value):
    """Return the batch with one entry of a tensor changed."""
    tensor = getattr(batch, name).clone()
    tensor[index] = value
    return changed(batch, **{name: tensor})


def changed(batch, **fields):
    """Return the batch with other fields; CPU copies follow their tensors."""
    copies = {f"{name}_cpu": value for name, value in fields.items() if hasattr(batch, f"{name}_cpu")}
    if fields.get("encoder_seq_lens") is not None:
        fields["max_encoder_seq_len"] = int(fields["encoder_seq_lens"].max())
    return evolve(batch, **{**copies, **fields})


def test_a_true_batch_is_described(batch, builder):
    metadata = builder.build(batch)

    assert metadata.batch is batch
    assert metadata.agreement is builder.agreement
    assert (metadata.num_decodes, metadata.num_prefills) == (2, 1)
    assert (metadata.num_decode_tokens, metadata.num_prefill_tokens) == (2, 3)
    assert (metadata.num_key_rows, metadata.highest_block, dict(metadata.plans)) == (5, 7, {})


@pytest.mark.parametrize("name", ["num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len", "common_prefix_len"])
@pytest.mark.parametrize("value", [3.0, torch.tensor(3), True, None])
def test_counts_are_python_ints(batch, builder, name, value):
    with refused(BatchError, problem=f"{name}={value!r}", expected="Python int", fix="int(...)"):
        builder.build(evolve(batch, **{name: value}))


@pytest.mark.parametrize("counts", [{"num_reqs": 0}, {"num_actual_tokens": 0}, {"num_reqs": -1}])
def test_an_empty_batch_is_refused(batch, builder, counts):
    with refused(BatchError, expected="at least one request and one token", fix="skip the step"):
        builder.build(evolve(batch, **counts))


@pytest.mark.parametrize(
    ("bound", "most", "count"),
    [
        ("max_num_reqs", 2, "num_reqs=3"),
        ("max_num_tokens", 4, "num_actual_tokens=5"),
        ("max_seq_len", 8, "max_seq_len=9"),
    ],
)
def test_a_batch_stays_within_the_limits(batch, bound, most, count):
    builder = make_builder(make_backend(), **{bound: most})

    with refused(BatchError, problem=count, expected=f"{bound}={most}", fix=f"Limits({bound}="):
        builder.build(batch)


@pytest.mark.parametrize(
    ("starts", "found"),
    [
        ([1, 2, 3, 5], "starts at 1"),
        ([0, 1, 2, 6], "ends at 6"),
        ([0, 2, 1, 5], "falls from 2 to 1 at request 1"),
        ([0, -1, 2, 5], "falls from 0 to -1 at request 0"),
    ],
)
def test_query_start_loc_starts_at_0_rises_and_ends_at_the_tokens(batch, builder, starts, found):
    with refused(BatchError, problem=found, expected="num_actual_tokens=5", fix="Batch.from_lengths"):
        builder.build(changed(batch, query_start_loc=int32(*starts)))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("query_start_loc", torch.tensor([0, 1, 2, 5])),
        ("query_start_loc", int32(0, 1, 5)),
        ("seq_lens", torch.tensor([5, 9, 7])),
        ("seq_lens", int32(5, 9)),
        ("seq_lens", torch.tensor([[5, 9, 7]], dtype=torch.int32)),
        ("seq_lens", torch.tensor([5, 9, 7], dtype=torch.int32, device="meta")),
        ("block_table", torch.ones(3, 3, dtype=torch.int64)),
        ("block_table", torch.ones(2, 3, dtype=torch.int32)),
        ("block_table", torch.ones(3, dtype=torch.int32)),
        ("slot_mapping", int32(8, 20, 28, 29, 30)),
        ("slot_mapping", torch.ones(1, 5, dtype=torch.int64)),
    ],
)
def test_index_tensors_have_one_form(batch, builder, name, tensor):
    with refused(TensorError, problem=f"{name} of", expected="on cpu", fix="that shape, dtype and device"):
        builder.build(changed(batch, **{name: tensor}))


def test_the_blocks_of_a_request_lie_side_by_side(batch, builder):
    with refused(TensorError, problem="strides", fix=".contiguous()"):
        builder.build(changed(batch, block_table=batch.block_table.t().contiguous().t()))


@pytest.mark.parametrize(("name", "true"), [("max_query_len", 3), ("max_seq_len", 9)])
def test_longest_lengths_are_bounds(batch, builder, name, true):
    with refused(BatchError, problem=f"{name}={true - 1}", fix=f"pass {name}={true}"):
        builder.build(evolve(batch, **{name: true - 1}))
    assert getattr(builder.build(evolve(batch, **{name: true + 7})).batch, name) == true


@pytest.mark.parametrize(("index", "length"), [(2, 2), (0, 0), (0, -5)])
def test_a_sequence_counts_its_query(batch, builder, index, length):
    with refused(
        BatchError, problem=f"request {index} has a sequence of {length} tokens", expected="seq_len >= query_len"
    ):
        builder.build(other(batch, "seq_lens", index, length))


def test_computed_tokens_follow_from_the_lengths(batch, builder):
    assert builder.build(evolve(batch, num_computed_tokens_cpu=int32(4, 8, 4))).num_decodes == 2
    with refused(BatchError, problem="request 1 has num_computed_tokens=7", expected="leave 8"):
        builder.build(evolve(batch, num_computed_tokens_cpu=int32(4, 7, 4)))
    with refused(TensorError, problem="num_computed_tokens_cpu of (2,)"):
        builder.build(evolve(batch, num_computed_tokens_cpu=int32(4, 8)))


def test_a_host_copy_says_what_its_tensor_says(batch, builder):
    with refused(BatchError, problem="seq_lens and seq_lens_cpu", expected="CPU copy", fix="leave seq_lens_cpu out"):
        builder.build(evolve(batch, seq_lens_cpu=int32(5, 9, 8)))
    with refused(TensorError, problem="query_start_loc_cpu of (2,)"):
        builder.build(evolve(batch, query_start_loc_cpu=int32(0, 5)))


@pytest.mark.parametrize("name", ["query_start_loc", "seq_lens"])
def test_lengths_on_a_device_need_their_host_copy(name):
    builder = make_builder(make_backend(device="meta"))
    batch = make_batch(QUERIES, LENGTHS, device="meta")

    with refused(BatchError, problem=f"no {name}_cpu was given", expected="never waits", fix=f"pass {name}_cpu="):
        builder.build(evolve(batch, **{f"{name}_cpu": None}))


def test_a_decode_behind_a_prefill_is_a_prefill(builder):
    metadata = builder.build(make_batch([1, 3, 1, 1], [5, 3, 5, 1]))

    assert (metadata.num_decodes, metadata.num_prefills) == (1, 3)
    assert (metadata.num_decode_tokens, metadata.num_prefill_tokens) == (1, 5)
    assert builder.build(make_batch([3, 1], [3, 5])).num_decodes == 0


def test_padded_requests_may_stand_behind_prefills(builder):
    metadata = builder.build(make_batch([1, 3, 0], [5, 3, 0]))

    assert (metadata.num_decodes, metadata.num_prefills, metadata.num_prefill_tokens) == (1, 2, 3)


def test_the_decode_query_length_is_as_negotiated():
    builder = make_builder(make_backend(decode_query_len=3))

    assert builder.build(make_batch([3, 1, 2, 4], [9, 5, 2, 4])).num_decodes == 3


def test_a_prefill_was_negotiated(batch):
    builder = make_builder(make_backend(phases=("decode",)))

    assert builder.build(make_batch([1, 1], [5, 9])).num_decodes == 2
    with refused(NotNegotiatedError, problem="a query of 3 tokens", expected="decodes alone", fix="phases="):
        builder.build(batch)


def test_without_a_decode_phase_a_short_sequence_is_a_prefill():
    metadata = make_builder(make_backend(phases=("prefill",))).build(make_batch([3, 1], [3, 1]))

    assert (metadata.num_decodes, metadata.num_prefills) == (0, 2)


@pytest.mark.parametrize("causal", [False, None, 1])
def test_causality_is_as_negotiated(batch, builder, causal):
    with refused(NotNegotiatedError, problem=f"causal={causal!r}", expected="causal=True was negotiated"):
        builder.build(evolve(batch, causal=causal))


def test_a_block_table_reaches_the_longest_sequence(batch, builder):
    with refused(BatchError, problem="2 blocks per request", expected="needs 3 blocks of 4", fix="at least 3 columns"):
        builder.build(changed(batch, block_table=batch.block_table[:, :2].contiguous()))


@pytest.mark.parametrize("name", ["block_table", "slot_mapping"])
def test_pages_are_there(batch, builder, name):
    with refused(BatchError, problem=f"without {name}", fix="paged=False"):
        builder.build(changed(batch, **{name: None}))


@pytest.mark.parametrize(
    ("row", "column", "block", "allowed"),
    [(1, 2, NUM_BLOCKS, "to 31"), (1, 0, -1, "from 1"), (0, 1, 0, "null block"), (2, 0, 0, "null block")],
)
def test_used_blocks_are_in_the_cache(batch, builder, row, column, block, allowed):
    given = f"request {row} has block {block} at column {column}"

    with refused(CacheError, problem=given, expected=allowed, fix="Limits"):
        builder.build(other(batch, "block_table", (row, column), block))


@pytest.mark.parametrize("stale", [-7, 2**31 - 1, NUM_BLOCKS])
@pytest.mark.parametrize("num_blocks", [NUM_BLOCKS, None])
def test_unused_columns_may_hold_anything(stale, num_blocks):
    builder = make_builder(make_backend(), num_blocks=num_blocks)
    batch = other(make_batch(QUERIES, LENGTHS, width=5), "block_table", (0, slice(2, 5)), stale)

    assert builder.build(other(batch, "block_table", (1, slice(3, 5)), stale)).highest_block == 7


def test_blocks_that_left_the_window_may_be_the_null_block():
    batch = other(make_batch([1, 2], [13, 14]), "block_table", (slice(0, 2), slice(0, 2)), 0)

    # The first query of request 1 is token 12; with window 5 it attends tokens 8 to 12, blocks 2 and 3.
    assert make_builder(make_backend(sliding_window=5)).build(batch).num_decodes == 1
    assert make_builder(make_backend(attention_chunk=4)).build(batch).num_decodes == 1
    for requested in ({"sliding_window": 6}, {"attention_chunk": 16}, {}):
        with refused(CacheError, expected="null block"):
            make_builder(make_backend(**requested)).build(batch)


@pytest.mark.parametrize("slot", [NUM_BLOCKS * BLOCK_SIZE, 3, 0, -2])
@pytest.mark.parametrize("padded", [False, True])
def test_slots_are_in_the_cache(batch, builder, slot, padded):
    batch = other(batch, "slot_mapping", 2, slot)
    if padded:
        batch = other(batch, "slot_mapping", 0, -1)

    with refused(CacheError, problem=f"token 2 has slot {slot}", expected="slots are 4 to 127", fix="block table"):
        builder.build(batch)


@pytest.mark.parametrize("num_blocks", [NUM_BLOCKS, None])
def test_a_slot_belongs_to_one_token(batch, num_blocks):
    builder = make_builder(make_backend(), num_blocks=num_blocks)

    with refused(CacheError, problem="slot 28 was given to two tokens", fix="a separate slot"):
        builder.build(other(batch, "slot_mapping", slice(2, 4), 28))


def test_the_null_blocks_slots_are_refused_where_the_cache_is_unknown(batch):
    with refused(CacheError, problem="token 0 has slot 3", expected="slots are 4:"):
        make_builder(make_backend(), num_blocks=None).build(other(batch, "slot_mapping", 0, 3))


def test_a_huge_slot_is_refused_where_the_cache_is_unknown(batch):
    with refused(CacheError, problem=f"token 0 has slot {2**50}"):
        make_builder(make_backend(), num_blocks=None).build(other(batch, "slot_mapping", 0, 2**50))


@pytest.mark.parametrize(("queries", "lengths"), [(QUERIES, LENGTHS), ([1, 1], [5, 9])])
def test_a_slot_is_where_the_block_table_says(builder, queries, lengths):
    with refused(CacheError, problem="token 1 has slot 41", expected="puts it into slot 20", fix="block table"):
        builder.build(other(make_batch(queries, lengths), "slot_mapping", 1, 41))


def test_tokens_without_a_slot_are_not_written(batch, builder):
    padded = torch.cat([batch.slot_mapping, torch.tensor([-1, -1])])
    padded[1] = -1

    assert builder.build(changed(batch, slot_mapping=padded)).num_key_rows == 7
    assert builder.build(changed(batch, slot_mapping=torch.full((5,), -1))).highest_block == 7


def test_a_slot_for_each_token_and_none_for_padding(batch, builder):
    with refused(BatchError, problem="slot_mapping of 4 slots", fix="-1"):
        builder.build(changed(batch, slot_mapping=batch.slot_mapping[:4]))
    with refused(BatchError, problem="beyond its 5 actual tokens", fix="-1"):
        builder.build(changed(batch, slot_mapping=torch.cat([batch.slot_mapping, torch.tensor([100])])))


# --- what has to be requested ------------------------------------------------------------------------------------


def test_a_shared_prefix_was_negotiated(batch, builder):
    with refused(NotNegotiatedError, problem="common_prefix_len=4", expected="cascade was not requested"):
        builder.build(evolve(batch, common_prefix_len=4))


def shared(batch, columns=1):
    return other(batch, "block_table", (slice(None), slice(0, columns)), torch.arange(20, 20 + columns).int())


def test_a_shared_prefix_is_whole_blocks_that_all_requests_have_computed(batch):
    builder = make_builder(make_backend(cascade=True))

    assert builder.build(evolve(shared(batch), common_prefix_len=4)).batch.common_prefix_len == 4
    with refused(BatchError, problem="common_prefix_len=3", expected="multiple of the block size 4", fix="pass 0"):
        builder.build(evolve(shared(batch), common_prefix_len=3))
    with refused(BatchError, problem="common_prefix_len=-4", expected="multiple of the block size"):
        builder.build(evolve(shared(batch), common_prefix_len=-4))
    with refused(BatchError, problem="the first 1 blocks differ", expected="same blocks"):
        builder.build(evolve(batch, common_prefix_len=4))
    with refused(BatchError, problem="common_prefix_len=8", expected="a request has 4 tokens computed"):
        builder.build(evolve(shared(batch, 2), common_prefix_len=8))
    with refused(BatchError, problem="common_prefix_len=8", expected="a request has 4 tokens computed"):
        computed = torch.tensor([4, 8, 4], dtype=torch.int32)
        builder.build(evolve(shared(batch, 2), common_prefix_len=8, num_computed_tokens_cpu=computed))


@pytest.mark.parametrize("table", [int32(1, 2), torch.ones(2, 2, dtype=torch.int32), torch.ones(0, 2), "meta"])
def test_a_shared_prefix_is_read_from_a_table_of_the_right_form(batch, table):
    builder = make_builder(make_backend(cascade=True))
    table = batch.block_table.to("meta") if isinstance(table, str) else table

    with refused(TensorError, problem="block_table"):
        builder.build(changed(evolve(batch, common_prefix_len=BLOCK_SIZE), block_table=table))
    with refused(TensorError, problem="block_table_cpu"):
        builder.build(evolve(batch, common_prefix_len=BLOCK_SIZE, block_table_cpu=table))


def test_padded_requests_share_no_prefix():
    builder = make_builder(make_backend(cascade=True))
    batch = shared(make_batch([1, 3], [5, 7]))

    assert builder.build(evolve(pad_batch(batch, 4), common_prefix_len=4)).num_prefills == 3


def test_a_shared_prefix_is_checked_as_far_as_the_host_knows():
    builder = make_builder(make_backend(cascade=True, seq_lens_cpu_kind="absent", device="meta"))
    batch = make_batch([1, 3], [5, 7], device="meta")
    unknown = evolve(batch, seq_lens_cpu=None, block_table_cpu=None, common_prefix_len=4)

    assert builder.build(unknown).batch.common_prefix_len == 4
    with refused(BatchError, problem="common_prefix_len=4", expected="a request has 3 tokens computed"):
        builder.build(evolve(unknown, num_computed_tokens_cpu=int32(4, 3)))


def test_a_mask_was_negotiated(batch, builder):
    mask = torch.ones(5 + 9 + 21, dtype=torch.bool)
    masked = make_builder(make_backend(custom_mask=True))

    assert masked.build(evolve(batch, custom_mask=mask)).batch.custom_mask is mask
    with refused(NotNegotiatedError, problem="custom_mask", expected="was not requested"):
        builder.build(evolve(batch, custom_mask=mask))
    with refused(BatchError, problem="no custom_mask"):
        masked.build(batch)
    for wrong in (mask[:-1], mask.int(), mask.reshape(5, 7)):
        with refused(TensorError, problem="custom_mask of", expected="(35,) bool"):
            masked.build(evolve(batch, custom_mask=wrong))


def test_spans_belong_to_those_that_requested_them():
    builder = make_builder(make_backend(mm_prefix=True))
    batch = make_batch([3, 1], [5, 9])
    spans = torch.tensor([[2, 6]] * 3 + [[-1, -1]] * 3, dtype=torch.int32)  # rows behind the last token are not read

    given = evolve(batch, mm_prefix_range=spans, mm_prefix_range_cpu=spans)
    assert builder.build(given).batch.mm_prefix_range is spans
    assert builder.build(batch).batch.mm_prefix_range is None
    assert builder.advance_step(builder.build(given), prefills_to_decodes=True).batch.mm_prefix_range is None
    with refused(NotNegotiatedError, problem="mm_prefix_range", expected="was not requested"):
        make_builder(make_backend()).build(given)
    with refused(NotNegotiatedError, problem="mm_prefix_range_cpu", expected="CPU copy"):
        builder.build(evolve(given, mm_prefix_range=None))
    with refused(BatchError, problem="no mm_prefix_range_cpu"):
        builder.build(evolve(given, mm_prefix_range_cpu=None))
    for wrong in (spans[:3], spans[:, 0], spans.long()):
        with refused(TensorError, problem="mm_prefix_range of", expected="2) int32"):
            builder.build(evolve(batch, mm_prefix_range=wrong, mm_prefix_range_cpu=wrong))


def test_an_additive_mask_was_negotiated():
    batch = Batch.from_lengths([1, 3, 7], [5, 3, 3 + 7])
    builder = make_builder(make_backend(paged=False))
    biased = make_builder(make_backend(paged=False, attn_bias=True))
    for heads in (1, biased.agreement.requirements.num_q_heads):
        bias = torch.zeros(heads, 5 + 9 + 70)
        assert biased.build(evolve(batch, attn_bias=bias)).batch.attn_bias is bias
    with refused(NotNegotiatedError, problem="attn_bias", expected="was not requested"):
        builder.build(evolve(batch, attn_bias=bias))
    with refused(BatchError, problem="no attn_bias"):
        biased.build(batch)
    for wrong in (bias[:, :-1], bias.bool(), bias[0], torch.zeros(3, 84), torch.zeros(())):
        with refused(TensorError, problem="attn_bias of", expected="84) float32"):
            biased.build(evolve(batch, attn_bias=wrong))


def parallel_builder(**requested):
    backend = make_backend(dcp_size=2, **requested)
    return backend.make_builder([make_layer(backend)], backend.make_state(limits(), Parallel(dcp_size=2)))


def test_local_lengths_were_negotiated(batch, builder):
    local = int32(3, 5, 4)
    # Rank 0 of 2 holds every other token: 5, 9 and 7 keys become 3, 5 and 4; other new tokens have no slot here.
    here = changed(batch, slot_mapping=torch.tensor([6, -1, 26, -1, 27]), dcp_local_seq_lens=local)

    assert parallel_builder().build(here).highest_block == 7
    with refused(NotNegotiatedError, problem="dcp_local_seq_lens of", expected="dcp_size=1 was negotiated"):
        builder.build(here)
    with refused(BatchError, problem="no dcp_local_seq_lens"):
        parallel_builder().build(changed(here, dcp_local_seq_lens=None))
    with refused(BatchError, problem="beyond seq_lens"):
        parallel_builder().build(changed(here, dcp_local_seq_lens=int32(3, 5, 8)))
    with refused(BatchError, problem="the value -1", expected="not negative"):
        parallel_builder().build(changed(here, dcp_local_seq_lens=int32(3, 5, -1)))
    with refused(TensorError, problem="dcp_local_seq_lens of (2,)"):
        parallel_builder().build(changed(here, dcp_local_seq_lens=int32(3, 5)))


def test_a_rank_needs_blocks_for_its_part_alone(batch):
    here = changed(
        batch,
        slot_mapping=torch.full((5,), -1),
        dcp_local_seq_lens=int32(3, 4, 4),
        block_table=batch.block_table[:, :1],
    )

    assert parallel_builder().build(here).highest_block == 6
    with refused(BatchError, problem="1 blocks per request", expected="needs 2 blocks"):
        parallel_builder().build(changed(here, dcp_local_seq_lens=int32(3, 5, 4)))


def test_local_lengths_on_a_device_may_lack_their_host_copy():
    backend = make_backend(dcp_size=2, device="meta")
    builder = backend.make_builder([make_layer(backend)], backend.make_state(limits(), Parallel(dcp_size=2)))
    batch = make_batch(QUERIES, LENGTHS, device="meta")

    metadata = builder.build(evolve(batch, dcp_local_seq_lens=torch.ones(3, dtype=torch.int32, device="meta")))

    assert metadata.highest_block == NUM_BLOCKS - 1


def cross_builder(**requested):
    return make_builder(make_backend(attn_type="encoder_decoder", **requested))


def cross_batch(encoder_lens, slots):
    table = make_batch([0] * len(encoder_lens), encoder_lens).block_table
    return Batch.from_lengths(
        [1, 2],
        [5, 2],
        block_table=table,
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        causal=False,
        encoder_seq_lens=int32(*encoder_lens),
    )


def test_cross_attention_counts_encoder_tokens():
    first = cross_builder().build(cross_batch([6, 5], [*range(4, 10), *range(12, 17)]))
    later = cross_builder().build(cross_batch([6, 5], []))

    assert (first.num_key_rows, first.highest_block) == (11, 4)
    assert (later.num_key_rows, later.highest_block) == (0, 4)


def test_slots_that_are_none_have_a_host_copy_that_says_so():
    builder = make_builder(make_backend(attn_type="encoder_decoder", paged=True))
    none = make_batch([1], [3], slot_mapping=torch.empty(0, dtype=torch.int64), encoder_seq_lens=int32(3), causal=False)

    assert builder.build(none).num_key_rows == 0
    for host in (torch.tensor([4, 5]), torch.empty(0, 2, dtype=torch.int64)):
        with refused(TensorError, problem="slot_mapping_cpu of"):
            builder.build(evolve(none, slot_mapping_cpu=host))


def test_encoder_lengths_belong_to_cross_attention(batch, builder):
    good = cross_batch([6, 5], [])

    with refused(NotNegotiatedError, problem="encoder_seq_lens of", expected="attn_type='decoder'"):
        builder.build(evolve(batch, encoder_seq_lens=int32(1, 1, 1)))
    with refused(BatchError, problem="no encoder_seq_lens"):
        cross_builder().build(changed(good, encoder_seq_lens=None))
    with refused(BatchError, problem="the value -1"):
        cross_builder().build(changed(good, encoder_seq_lens=int32(6, -1)))
    with refused(TensorError, problem="encoder_seq_lens of (1,)"):
        cross_builder().build(changed(good, encoder_seq_lens=int32(6)))
    with refused(BatchError, problem="2 blocks per request", expected="9 tokens needs 3 blocks"):
        cross_builder().build(changed(good, encoder_seq_lens=int32(6, 9)))
    with refused(CacheError, problem="request 1 has block 0"):
        cross_builder().build(other(good, "block_table", (1, 1), 0))


def test_encoder_lengths_may_be_absent_with_the_others():
    builder = cross_builder(seq_lens_cpu_kind="absent", device="meta")
    batch = cross_batch([6, 5], [])
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "encoder_seq_lens")
    moved = {name: getattr(batch, name).to("meta") for name in names}

    metadata = builder.build(evolve(batch, **moved, seq_lens_cpu=None, encoder_seq_lens_cpu=None))

    assert metadata.highest_block == NUM_BLOCKS - 1


def test_a_mask_is_as_long_as_the_host_can_tell():
    builder = make_builder(make_backend(custom_mask=True, seq_lens_cpu_kind="upper_bound"))
    batch = make_batch(QUERIES, LENGTHS)

    assert builder.build(evolve(batch, custom_mask=torch.ones(99, dtype=torch.bool))).num_decodes == 2
    with refused(TensorError, problem="custom_mask of (9, 9)"):
        builder.build(evolve(batch, custom_mask=torch.ones(9, 9, dtype=torch.bool)))


def test_encoder_lengths_need_a_host_copy_where_lengths_are_exact():
    builder = make_builder(make_backend(attn_type="encoder_decoder", device="meta"))
    batch = cross_batch([6, 5], [])
    moved = {
        name: getattr(batch, name).to("meta")
        for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "encoder_seq_lens")
    }

    assert builder.build(evolve(batch, **moved)).num_decodes == 1
    with refused(BatchError, problem="no encoder_seq_lens_cpu"):
        builder.build(evolve(batch, **moved, encoder_seq_lens_cpu=None))


# --- lengths that the host knows in part, or not at all -----------------------------------------------------------


def test_an_upper_bound_may_be_above_the_lengths(batch):
    builder = make_builder(make_backend(seq_lens_cpu_kind="upper_bound"))

    bounded = evolve(batch, seq_lens_cpu=int32(6, 9, 8), max_seq_len=11)

    assert builder.build(bounded).highest_block == NUM_BLOCKS - 1
    assert builder.build(evolve(bounded, num_computed_tokens_cpu=int32(4, 8, 4))).num_decodes == 2
    with refused(BatchError, problem="different values", expected="or an upper bound"):
        builder.build(evolve(batch, seq_lens_cpu=int32(4, 9, 7)))
    with refused(BatchError, problem="max_seq_len=8", expected="at least that", fix="9 or more"):
        builder.build(evolve(batch, max_seq_len=8))
    with refused(BatchError, problem="num_computed_tokens=9", expected="at most"):
        builder.build(evolve(bounded, num_computed_tokens_cpu=int32(4, 9, 4)))
    with refused(BatchError, problem="3 blocks per request", expected="needs 4 blocks"):
        builder.build(evolve(bounded, max_seq_len=13))


def test_computed_tokens_are_not_negative_where_sequences_may_be_shorter_than_queries():
    builder = make_builder(make_backend(paged=False, attn_type="encoder", seq_lens_cpu_kind="upper_bound"))
    dense = Batch.from_lengths([3, 2], [1, 4], causal=False)

    builder.build(dense)
    with refused(
        BatchError, problem="request 0 has num_computed_tokens=-2", expected="leave -2: seq_len - query_len, at"
    ):
        builder.build(evolve(dense, num_computed_tokens_cpu=int32(-2, 2)))


@pytest.mark.parametrize("computed", [int32(4, 8), torch.tensor([4, 8, 4]), int32(4, 8, 4).to("meta")])
def test_computed_tokens_have_a_form_where_lengths_are_absent(batch, computed):
    builder = make_builder(make_backend(seq_lens_cpu_kind="absent", cascade=True))
    absent = evolve(batch, seq_lens_cpu=None, num_computed_tokens_cpu=computed)

    for length in (0, BLOCK_SIZE):
        with refused(TensorError, problem="num_computed_tokens_cpu of"):
            builder.build(evolve(absent, common_prefix_len=length))


def test_lengths_may_be_absent_from_the_host():
    builder = make_builder(make_backend(seq_lens_cpu_kind="absent", device="meta"), num_blocks=None)
    batch = evolve(make_batch(QUERIES, LENGTHS, device="meta"), seq_lens_cpu=None)

    assert builder.build(batch).highest_block == 7  # from the slots
    with refused(BatchError, problem="max_seq_len=2", expected="the longest sequence has 3 tokens"):
        builder.build(evolve(batch, max_seq_len=2))


def test_tables_on_a_device_are_checked_where_host_copies_are_given():
    builder = make_builder(make_backend(device="meta"))
    batch = make_batch(QUERIES, LENGTHS, device="meta")
    bad = evolve(batch, block_table_cpu=torch.full_like(batch.block_table_cpu, 99))

    with refused(CacheError, problem="block 99"):
        builder.build(bad)
    alone = evolve(batch, block_table_cpu=None, slot_mapping_cpu=None)
    assert builder.build(alone).highest_block == NUM_BLOCKS - 1
    assert make_builder(make_backend(device="meta"), num_blocks=None).build(alone).highest_block == -1


# --- dense calls --------------------------------------------------------------------------------------------------


def test_a_dense_batch_says_where_keys_start():
    builder = make_builder(make_backend(paged=False))
    batch = Batch.from_lengths([1, 3], [4, 3])

    metadata = builder.build(batch)

    assert (metadata.num_decodes, metadata.num_prefills, metadata.num_key_rows) == (0, 2, 7)
    assert metadata.highest_block == -1
    with refused(BatchError, problem="without key_start_loc", fix="Batch.from_lengths"):
        builder.build(changed(batch, key_start_loc=None))
    for starts in ([0, 4, 8], [1, 5, 8], [0, 5, 4]):
        with refused(BatchError, problem="contradicts seq_lens"):
            builder.build(changed(batch, key_start_loc=int32(*starts)))
    with refused(TensorError, problem="key_start_loc of (2,)"):
        builder.build(changed(batch, key_start_loc=int32(0, 7)))


def test_pages_belong_to_paged_agreements(batch, builder):
    dense = make_builder(make_backend(paged=False))
    whole = Batch.from_lengths([1, 3], [4, 3])

    for pages in ({"block_table": int32([1], [2])}, {"slot_mapping": torch.tensor([4, 8])}):
        with refused(NotNegotiatedError, problem=f"with a {next(iter(pages))}", expected="paged=False was negotiated"):
            dense.build(changed(whole, **pages))
    with refused(NotNegotiatedError, problem="with a key_start_loc", expected="paged=True was negotiated"):
        builder.build(changed(batch, key_start_loc=int32(0, 5, 14, 21)))


def test_keys_of_an_encoder_may_be_fewer_than_queries():
    builder = make_builder(make_backend(attn_type="encoder_decoder", paged=False))

    assert builder.build(Batch.from_lengths([3, 4], [2, 9], causal=False)).num_key_rows == 11
    with refused(BatchError, problem="a sequence of 2 tokens and a query of 3"):
        make_builder(make_backend(paged=False)).build(Batch.from_lengths([3], [2]))


# --- nothing waits, nothing is kept -------------------------------------------------------------------------------


def test_build_reads_no_device_tensor():
    """Reading a value of a meta tensor is impossible, so a build that succeeds on one reads CPU copies alone."""
    builder = make_builder(make_backend(device="meta"))
    batch = make_batch(QUERIES, LENGTHS, device="meta")

    assert builder.build(batch).highest_block == 7
    with pytest.raises((RuntimeError, NotImplementedError)):
        batch.seq_lens.tolist()


def test_a_refused_batch_leaves_the_builder_as_it_was(batch, builder):
    with refused(BatchError):
        builder.build(evolve(batch, max_query_len=1))

    assert builder.build(batch).num_decodes == 2


def test_a_batch_that_changed_is_checked_again(batch, builder):
    builder.build(batch)
    batch.block_table[0, 0] = 0

    with refused(CacheError, problem="block 0"):
        builder.build(batch)


def test_the_toy_builds_with_the_default_builder():
    assert type(make_builder(make_backend()).wrapped) is ToyBackend.builder_class


def test_the_longest_encoder_is_known_and_within_the_limits():
    good, builder = cross_batch([6, 5], []), cross_builder()
    assert good.max_encoder_seq_len == 6
    for wrong in (5, 7, None):
        with refused(BatchError, problem=f"max_encoder_seq_len={wrong}", expected="has 6 tokens"):
            builder.build(evolve(good, max_encoder_seq_len=wrong))
    with refused(BatchError, problem="max_encoder_seq_len=6.0", expected="max_seq_len=64"):
        builder.build(evolve(good, max_encoder_seq_len=6.0))
    with refused(BatchError, problem="max_encoder_seq_len=65", fix="max_seq_len=65"):
        builder.build(evolve(good, max_encoder_seq_len=65))
    absent = cross_builder(seq_lens_cpu_kind="absent", device="meta")
    names = ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "encoder_seq_lens")
    moved = {name: getattr(good, name).to("meta") for name in names}
    unknown = {"seq_lens_cpu": None, "encoder_seq_lens_cpu": None, "max_encoder_seq_len": None}
    with refused(BatchError, problem="no max_encoder_seq_len"):
        absent.build(evolve(good, **moved, **unknown))


def test_what_open_features_bring_is_asked_for():
    table = torch.zeros(3)
    with refused(NotNegotiatedError, problem="a batch with extra 'acme.rope'", fix="features=('acme.rope',)"):
        make_builder(make_backend()).build(make_batch([1], [3], extra={"acme.rope": table}))
    backend = make_backend(features=("acme.rope",))
    assert (
        make_builder(backend).build(make_batch([1], [3], extra={"acme.rope": table})).batch.extra["acme.rope"] is table
    )
    assert make_layer(backend, extra={"acme.rope": table}).layer.extra["acme.rope"] is table
    with refused(NotNegotiatedError, problem="layer 'layers.0' with extra 'acme.nope'", expected="acme.rope"):
        make_layer(backend, extra={"acme.nope": table})


def test_a_dummy_names_the_null_block_alone():
    backend = make_backend()
    builder, dummy = make_builder(backend), backend.dummy_batch(GraphShape(2, 5))
    assert builder.build(dummy).highest_block == 0
    assert dummy.query_start_loc.tolist() == [0, 2, 5]
    for real in ({"block_table": torch.ones_like(dummy.block_table)}, {"slot_mapping": torch.arange(5)}):
        replaced = builder.build(changed(dummy, **real)).batch
        assert not replaced.block_table.any()
        assert set(replaced.slot_mapping.tolist()) == {PAD_SLOT_ID}
    with refused(CacheError, problem="block 0"):
        builder.build(evolve(dummy, dummy=False))


@pytest.mark.parametrize(
    ("lens", "num_decodes"),
    [([2, 2, 1], 2), ([1, 2, 2], 1), ([2, 0, 2, 5], 1), ([2, 2, 0], 2), ([0, 2, 1], 0), ([3, 3], 2), ([5], 0)],
)
def test_decodes_of_one_length(lens, num_decodes):
    """Kernels that take one query length have the others among the prefills."""
    uniform = type("Uniform", (MetadataBuilder,), {"requires_uniform_decodes": True})
    backend = make_backend(type("B", (ToyBackend,), {"builder_class": uniform}), decode_query_len=3)
    metadata = make_builder(backend).build(make_batch(lens, [9 if length else 0 for length in lens]))
    assert (metadata.num_decodes, metadata.num_prefills) == (num_decodes, len(lens) - num_decodes)
    assert metadata.num_decode_tokens == sum(lens[:num_decodes])


# --- what a build costs -------------------------------------------------------------------------------------------


def many_decodes(device, count=24):
    """Return a builder that plans nothing, and a step of decodes of different lengths."""
    builder = make_builder(make_backend(device=device), max_num_reqs=count, num_blocks=200)
    return builder, make_batch([1] * count, [2 + index for index in range(count)], device=device)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_decodes_are_checked_by_few_functions_and_operations(device):
    builder, batch = many_decodes(device)
    builder.build(evolve(batch))
    steps = [evolve(batch) for _ in range(2)]

    python, foreign = calls_of(lambda: builder.build(steps[0]))

    at_most(python, 29)
    at_most(foreign, 25)
    # The starts; the shortest and the longest sequence; the range of blocks; where each slot belongs; no slot twice.
    at_most(operations_of(lambda: builder.build(steps[1])), 22)


def test_a_batch_that_was_built_is_not_made_exact_again():
    builder, batch = many_decodes("cpu")
    builder.build(batch)

    python, _ = calls_of(lambda: builder.build(batch))

    assert not [name for name in python if "_read_queries" in name or "check_index" in name]


def test_the_forms_of_each_step_are_checked():
    builder, batch = many_decodes("cpu")
    builder.build(evolve(batch))

    with refused(TensorError, problem="seq_lens of", expected="(24,) int32"):
        builder.build(changed(batch, seq_lens=batch.seq_lens[:23]))
    with refused(TensorError, problem="strides"):
        table = batch.block_table.T.contiguous().T
        builder.build(evolve(batch, block_table=table, block_table_cpu=table))
    builder.build(evolve(batch))


def test_a_cpu_copy_of_a_tensor_on_the_cpu_is_compared_in_each_step():
    builder, batch = many_decodes("cpu")
    builder.build(evolve(batch))
    table = batch.block_table.clone()
    builder.build(evolve(batch, block_table_cpu=table))
    table[3, 0] = 199

    with refused(BatchError, problem="block_table and block_table_cpu", expected="the CPU copy"):
        builder.build(evolve(batch, block_table_cpu=table))
