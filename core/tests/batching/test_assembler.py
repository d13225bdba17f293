"""Batches that are built request by request, compared with loops, and checked by the builder's guards."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import attnplug
from attnplug.batching import BatchAssembler, first_attended_key, num_freeable_blocks, positions_of
from attnplug.contract import PAD_SLOT_ID, Limits
from attnplug.contract.guards.batch import BatchGuard
from attnplug.errors import BatchError

requests = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 40), st.integers(0, 2)), min_size=1, max_size=6)


def allocate(lens, block_size):
    """Distinct blocks for each request, counted from 1, with some to spare."""
    fresh = iter(range(1, 10_000))
    return [
        [next(fresh) for _ in range(-(-(query + computed) // block_size) + spare)] for query, computed, spare in lens
    ]


@given(st.lists(requests, min_size=1, max_size=4), st.sampled_from([1, 3, 16]), st.integers(0, 3), st.integers(0, 9))
def test_agrees_with_a_loop_over_tokens_step_after_step(steps, block_size, more_reqs, more_rows):
    assembler = BatchAssembler(block_size)
    finished = []
    for lens in steps:
        tables = allocate(lens, block_size)
        rows = [assembler.add(q, c, blocks) for (q, c, _), blocks in zip(lens, tables, strict=True)]
        assert rows == list(range(len(lens)))
        tokens = sum(q for q, _, _ in lens)
        assert (assembler.num_reqs, assembler.num_tokens) == (len(lens), tokens)
        batch = assembler.finish(len(lens) + more_reqs, tokens + more_rows)
        finished.append((lens, tables, batch))
    for lens, tables, batch in finished:  # a later step has not changed an earlier one
        places = [(r, p) for r, (q, c, _) in enumerate(lens) for p in range(c, c + q)]
        assert (
            batch.slot_mapping.tolist()
            == [tables[r][p // block_size] * block_size + p % block_size for r, p in places] + [PAD_SLOT_ID] * more_rows
        )
        assert positions_of(batch).tolist() == [p for _, p in places] + [0] * more_rows
        width = max(map(len, tables))
        assert batch.block_table.tolist() == [
            *(blocks + [0] * (width - len(blocks)) for blocks in tables),
            *([[0] * width] * more_reqs),
        ]
        starts = [sum(q for q, _, _ in lens[:r]) for r in range(len(lens) + 1)]
        assert batch.query_start_loc.tolist() == starts + starts[-1:] * more_reqs
        assert batch.seq_lens.tolist() == [q + c for q, c, _ in lens] + [0] * more_reqs
        assert batch.num_computed_tokens_cpu.tolist() == [c for _, c, _ in lens] + [0] * more_reqs
        assert (batch.num_reqs, batch.num_actual_tokens) == (len(lens) + more_reqs, starts[-1])
        assert (batch.max_query_len, batch.max_seq_len) == (max(q for q, *_ in lens), max(q + c for q, c, _ in lens))
        assert {t.dtype for t in (batch.query_start_loc, batch.seq_lens, batch.block_table)} == {torch.int32}


def agreement(**requested):
    fields = {"head_size": 16, "num_q_heads": 2, "num_kv_heads": 2, "dtype": "float32", **requested}
    return attnplug.select(attnplug.Requirements(**fields), "cpu", backend="torch/sdpa").agreement


@given(requests, st.sampled_from([1, 8]), st.integers(1, 20) | st.none(), st.booleans())
def test_the_guards_of_a_builder_accept_its_batches(lens, block_size, window, frees):
    tables = allocate(lens, block_size)
    agreed = agreement(block_size=block_size, sliding_window=window)
    assembler = BatchAssembler.of(agreed)
    for (query_len, computed, _), blocks in zip(lens, tables, strict=True):
        freed = num_freeable_blocks(computed, block_size, sliding_window=window) if frees else 0
        assembler.add(query_len, computed, [None] * freed + blocks[freed:])

    facts = BatchGuard(
        agreed, Limits(max_num_reqs=9, max_num_tokens=99, max_seq_len=99, num_blocks=10_000), torch.device("cpu")
    ).check(assembler.finish())

    assert facts.num_decodes == next((row for row, (query_len, *_) in enumerate(lens) if query_len > 1), len(lens))


@given(st.integers(0, 60), st.integers(1, 20), st.integers(0, 1), st.sampled_from([1, 4, 16]))
def test_a_block_that_is_attended_to_may_not_be_freed(computed, reach, chunked, block_size):
    """Free one block more than `num_freeable_blocks` allows: the assembler refuses it."""
    kind = ("sliding_window", "attention_chunk")[chunked]
    first = computed // reach * reach if chunked else max(0, computed - (reach - 1))
    assert first_attended_key(computed, **{kind: reach}) == first
    freeable = num_freeable_blocks(computed, block_size, **{kind: reach})
    assert freeable * block_size <= first < (freeable + 1) * block_size
    blocks = list(range(1, computed // block_size + 2))
    assembler = BatchAssembler(block_size, **{kind: reach})

    assembler.add(1, computed, [0] * freeable + blocks[freeable:])
    with pytest.raises(BatchError, match=f"its first {freeable} blocks may be freed"):
        assembler.add(1, computed, [0] * (freeable + 1) + [*blocks, 1][freeable + 1 :])

    assert assembler.num_reqs == 1


def test_without_a_window_no_block_may_be_freed():
    assembler = BatchAssembler(4)

    with pytest.raises(BatchError, match="without a block that its step attends to"):
        assembler.add(1, 7, [None, 3])


def test_freed_blocks_after_the_length_are_ignored():
    assembler = BatchAssembler(4)

    assembler.add(1, 2, [5, None, 6, 0, 0])

    assert assembler.finish().block_table.tolist() == [[5, 0, 6]]


@pytest.mark.parametrize(
    ("given_", "said"),
    [
        ((0, 3, [1]), "query_len=0"),
        ((1, -1, [1]), "num_computed_tokens=-1"),
        ((1, 4, [1]), "1 blocks for 5 tokens"),
        ((1, 4, [1, None]), "1 blocks for 5 tokens"),
        ((1, 0, [-3]), "the block -3"),
        ((1, 0, [2**31]), "the block 2147483648"),
        ((1, 0, [1.5]), "the block 1.5"),
        ((1, 0, [None, "a"]), "the block 'a'"),
        ((1, 0, None), "request 1 was given with blocks=None"),
        ((1, 0, 7), "request 1 was given with blocks=7"),
        ((1.5, 0, [1]), "query_len=1.5"),
        (("1", 0, [1]), "query_len='1'"),
        ((1, None, [1]), "num_computed_tokens=None"),
    ],
)
def test_wrong_requests_are_refused_without_effect(given_, said):
    assembler = BatchAssembler(4)
    assembler.add(1, 5, [1, 2])

    with pytest.raises(BatchError, match=said):
        assembler.add(*given_)

    assert (assembler.num_reqs, assembler.num_tokens) == (1, 1)
    assembler.add(2, 0, [7])
    batch = assembler.finish()
    assert batch.block_table.tolist() == [[1, 2], [7, 0]]
    assert batch.slot_mapping.tolist() == [9, 28, 29]


@pytest.mark.parametrize("given_", [None, "torch/sdpa", attnplug])
def test_an_assembler_is_made_from_an_agreement(given_):
    with pytest.raises(BatchError, match=f"a {type(given_).__name__} was given to BatchAssembler.of") as caught:
        BatchAssembler.of(given_)

    assert "backend.agreement" in caught.value.fix


def test_integers_of_torch_are_accepted():
    assembler = BatchAssembler(4)

    assembler.add(torch.tensor(1), torch.tensor(5), [1, 2])

    assert assembler.finish().seq_lens.tolist() == [6]


def test_a_negative_write_from_is_refused():
    with pytest.raises(BatchError, match="write_from=-1"):
        BatchAssembler(4).add(1, 0, [1], write_from=-1)


@pytest.mark.parametrize("name", ["block_size", "sliding_window", "attention_chunk"])
def test_numbers_of_the_assembler_are_positive(name):
    with pytest.raises(BatchError, match=f"{name}=0"):
        BatchAssembler(**{"block_size": 4, name: 0})


def test_only_a_paged_cache_has_slots():
    with pytest.raises(BatchError, match="paged=False"):
        BatchAssembler.of(agreement(paged=False))


@pytest.mark.parametrize(
    ("requested", "said"),
    [({"dcp_size": 2}, "dcp_size=2"), ({"attn_type": "encoder_decoder", "causal": False}, "'encoder_decoder'")],
)
def test_dcp_and_cross_attention_are_refused(requested, said):
    agreed = agreement(block_size=4)

    with pytest.raises(BatchError, match=said):
        BatchAssembler.of(evolve(agreed, requirements=agreed.requirements.evolve(**requested)))


@given(st.integers(1, 6), st.integers(0, 9), st.integers(0, 20))
def test_tokens_before_write_from_have_no_slot(query_len, computed, write_from):
    assembler = BatchAssembler(4)
    assembler.add(1, 2, [9])
    assembler.add(query_len, computed, [1, 2, 3, 4], write_from=write_from)

    batch = assembler.finish(num_tokens=8)

    slots = [p + 4 if p >= write_from else PAD_SLOT_ID for p in range(computed, computed + query_len)]
    assert batch.slot_mapping.tolist() == [38, *slots, *[PAD_SLOT_ID] * (7 - query_len)]


def test_sizes_that_are_too_small_are_refused_without_effect():
    assembler = BatchAssembler(4)
    assembler.add(1, 5, [1, 2])
    assembler.add(3, 0, [3])

    for sizes, said in (
        ({"num_reqs": 1}, "2 requests are to be padded to 1"),
        ({"num_tokens": 3}, "4 tokens are to be padded to 3"),
        ({"num_blocks": 1}, "a block table of 1 columns"),
    ):
        with pytest.raises(BatchError, match=said):
            assembler.finish(**sizes)

    assert assembler.finish(num_blocks=5).block_table.tolist() == [[1, 2, 0, 0, 0], [3, 0, 0, 0, 0]]
    with pytest.raises(BatchError, match="no requests"):
        assembler.finish()


def test_a_host_may_upload_tensors():
    uploaded = {}

    def upload(name, host):
        uploaded[name] = host
        return host.clone()

    assembler = BatchAssembler(4, upload=upload)
    assembler.add(2, 3, [5, 6])
    batch = assembler.finish(causal=False)

    assert set(uploaded) == {"query_start_loc", "seq_lens", "block_table", "slot_mapping", "positions"}
    for name in set(uploaded) - {"positions"}:
        assert getattr(batch, f"{name}_cpu") is uploaded[name]
        assert getattr(batch, name) is not uploaded[name]
    assert positions_of(batch).tolist() == [3, 4]
    assert not batch.causal


@pytest.mark.gpu
def test_on_a_gpu_many_concurrent_steps_keep_their_values():
    assembler = BatchAssembler(16, device="cuda")
    batches = []
    for step in range(50):
        for row in range(64):
            assembler.add(1, 100 + step, [row * 10 + column + 1 for column in range(10)])
        batches.append(assembler.finish(num_reqs=80, num_tokens=80))
    for batch in batches:
        for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
            assert getattr(batch, name).is_cuda
            assert torch.equal(getattr(batch, name).cpu(), getattr(batch, f"{name}_cpu"))
        assert positions_of(batch).cpu().tolist() == [
            *batch.num_computed_tokens_cpu[:64].tolist(),
            *[0] * 16,
        ]
