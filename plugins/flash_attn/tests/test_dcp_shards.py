"""What a host says about this rank's share is compared with `Parallel`, before anything is written."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from attnplug.batching import check_local_shard, local_lens
from attnplug.contract import PAD_SLOT_ID, Batch, Parallel
from attnplug.errors import BatchError, CacheError
from tests.backends.dcp_steps import DcpStep, RankPages

CPU = torch.device("cpu")
STEP = DcpStep(ranks=2, interleave=4, new=(1, 6), cached=(20, 9))


def parallel(rank: int, step: DcpStep = STEP) -> Parallel:
    return Parallel(dcp_rank=rank, dcp_size=step.ranks, dcp_interleave=step.interleave)


def batch_of(rank: int) -> Batch:
    return RankPages(STEP, rank).batch(CPU)


@given(st.integers(2, 4), st.integers(1, 9), st.lists(st.tuples(st.integers(1, 9), st.integers(0, 40)), min_size=1))
def test_what_each_rank_holds_is_accepted(ranks, interleave, lens):
    step = DcpStep(
        ranks=ranks,
        interleave=interleave,
        new=tuple(n for n, _ in lens),
        cached=tuple(c for _, c in lens),
        block_size=3,
    )
    for rank in range(ranks):
        batch = RankPages(step, rank).batch(CPU)
        check_local_shard(batch, parallel(rank, step), 3)
        assert torch.equal(local_lens(batch.seq_lens, parallel(rank, step)), batch.dcp_local_seq_lens)


@pytest.mark.parametrize("rank", [0, 1])
def test_lengths_of_other_runs_are_refused(rank):
    batch = batch_of(rank)
    with pytest.raises(BatchError, match=r"(?s)dcp_local_seq_lens is .*with runs of 1 tokens, has") as refusal:
        check_local_shard(batch, evolve(parallel(rank), dcp_interleave=1), STEP.block_size)
    assert "num_local_tokens_per_dcp_rank" in str(refusal.value)


def test_lengths_of_another_rank_are_refused():
    with pytest.raises(BatchError, match="for request 0 of 21 tokens"):
        check_local_shard(batch_of(0), parallel(1), STEP.block_size)


def test_the_slot_of_another_rank_is_refused():
    batch = batch_of(1)  # the first request's new token is its 20th, which rank 1 holds; rank 0 does not
    taken = evolve(batch_of(0), slot_mapping=batch.slot_mapping, slot_mapping_cpu=batch.slot_mapping_cpu)
    with pytest.raises(CacheError, match=r"(?s)token 0 has slot .*token 20 of its request.*does not have"):
        check_local_shard(evolve(taken), parallel(0), STEP.block_size)


def test_the_wrong_slot_is_refused():
    batch = batch_of(1)
    place = int((batch.slot_mapping != PAD_SLOT_ID).int().argmax())
    slots = batch.slot_mapping.clone()
    slots[place] += 1
    with pytest.raises(CacheError, match=rf"(?s)token {place} has slot {int(slots[place])}.*has in slot"):
        check_local_shard(evolve(batch, slot_mapping=slots, slot_mapping_cpu=slots), parallel(1), STEP.block_size)


def test_tokens_without_a_slot_are_accepted():
    batch = batch_of(1)
    nowhere = torch.full_like(batch.slot_mapping, PAD_SLOT_ID)
    check_local_shard(evolve(batch, slot_mapping=nowhere, slot_mapping_cpu=nowhere), parallel(1), STEP.block_size)


def test_missing_cpu_lengths_are_not_checked():
    batch = evolve(batch_of(0), dcp_local_seq_lens_cpu=None, slot_mapping_cpu=None)
    check_local_shard(batch, parallel(1), STEP.block_size)
    check_local_shard(evolve(batch_of(0), seq_lens_cpu=None), parallel(1), STEP.block_size)
    check_local_shard(evolve(batch_of(0), dummy=True), parallel(1), STEP.block_size)
