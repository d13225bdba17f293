from __future__ import annotations

import pickle

import torch
from attrs import evolve

from attnplug.contract import PAD_SLOT_ID, Batch
from core.tests.contract.world import make_batch


def test_lengths_are_all_that_a_dense_batch_needs():
    batch = Batch.from_lengths([2, 1, 3])

    assert batch.query_start_loc.tolist() == [0, 2, 3, 6]
    assert batch.seq_lens.tolist() == [2, 1, 3]
    assert batch.key_start_loc.tolist() == [0, 2, 3, 6]
    assert (batch.num_reqs, batch.num_actual_tokens, batch.max_query_len, batch.max_seq_len) == (3, 6, 3, 3)
    assert batch.query_start_loc.dtype == batch.seq_lens.dtype == torch.int32
    assert (batch.block_table, batch.slot_mapping, batch.causal) == (None, None, True)


def test_a_paged_batch_has_no_key_starts():
    batch = make_batch([1, 2], [9, 4])

    assert batch.key_start_loc is None
    assert batch.max_seq_len == 9
    assert batch.slot_mapping.tolist() == [3 * 4, 4 * 4 + 2, 4 * 4 + 3]


def test_a_batch_is_made_of_its_tensors():
    starts, lengths = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([2], dtype=torch.int32)

    batch = Batch(
        query_start_loc=starts, seq_lens=lengths, num_reqs=1, num_actual_tokens=2, max_query_len=2, max_seq_len=2
    )

    assert batch.query_start_loc_cpu is starts
    assert batch.seq_lens_cpu is lengths
    assert batch.common_prefix_len == 0


def test_a_tensor_on_the_cpu_is_its_own_host_copy():
    batch = make_batch([1], [3])

    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
        assert getattr(batch, f"{name}_cpu") is getattr(batch, name)
    assert batch.encoder_seq_lens_cpu is None


def test_a_batch_for_a_device_keeps_the_host_copies():
    batch = make_batch([1], [3], device="meta")

    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
        assert getattr(batch, name).device.type == "meta"
        assert getattr(batch, f"{name}_cpu").device.type == "cpu"


def test_a_batch_follows_its_block_table():
    table = torch.ones(1, 1, dtype=torch.int32, device="meta")

    batch = Batch.from_lengths([1], [3], block_table=table, slot_mapping=torch.tensor([6]))

    assert batch.seq_lens.device.type == batch.slot_mapping.device.type == "meta"
    assert batch.block_table_cpu is None


def test_given_fields_win_over_derived_ones():
    batch = Batch.from_lengths([1], [3], causal=False, max_seq_len=100)

    assert (batch.causal, batch.max_seq_len) == (False, 100)


def test_what_is_derived_once_is_shared_and_not_copied_to_another_batch():
    batch = make_batch([1], [3])
    calls = []

    values = [batch.once("pages", lambda: calls.append(1) or len(calls)) for _ in range(2)]

    assert values == [1, 1]
    assert evolve(batch, causal=True).once("pages", lambda: 7) == 7


def test_a_batch_pickles():
    batch = pickle.loads(pickle.dumps(make_batch([1, 2], [9, 4])))

    assert batch.slot_mapping.tolist() == [12, 18, 19]


def test_padding_is_minus_one():
    assert PAD_SLOT_ID == -1
