"""The parameters of a pattern per head and rank, against the formula, and their validation."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug import Requirements
from attnplug.contract import Limits, Parallel
from attnplug.errors import LayerError, LimitsError
from attnplug_blocksparse.pattern import BlocksparseParams, Pattern
from attnplug_blocksparse.state import params_of
from attnplug_kit.oracle import seen_by

PHI = {"max_seqlen": 8192, "block_size": 64, "local_blocks": 16, "vert_stride": 8}
MODES = ({}, {"homo_head": True}, {"homo_head_group": True}, {"homo_head": True, "homo_head_group": True})


def params(**more):
    heads = {"num_heads": more.pop("num_heads", 32), "num_kv_heads": more.pop("num_kv_heads", 8)}
    ranks = {name: more.pop(name) for name in ("tp_size", "tp_rank") if name in more}
    return BlocksparseParams.of({**PHI, **more}, **heads, **ranks)


def test_phi3_small_slides_by_one_block_per_head():
    phi = params()

    assert (phi.head_sliding_step, phi.active_head_range, phi.slides_by_kv_head) == (1, (0, 32), False)
    assert [phi.residue(head) for head in range(9)] == [7, 6, 5, 4, 3, 2, 1, 0, 7]
    assert phi.residues(1) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("given_modes", "step"),
    list(zip(MODES, (2, 0, -8, 0), strict=True)),
)
def test_the_sliding_step_counts_the_heads_of_all_ranks(given_modes, step):
    ranks = {"tp_size": 2, "tp_rank": 1, "total_kv_heads": 2}
    one = params(vert_stride=16, num_heads=4, num_kv_heads=1, **ranks, **given_modes)

    assert one.head_sliding_step == step
    assert one.active_head_range == (4, 8)


def test_the_sliding_step_is_at_least_one_block():
    assert params(vert_stride=3).head_sliding_step == 1
    assert params(vert_stride=3, homo_head_group=True).head_sliding_step == -1


def pattern_of(stride, mode):
    return {"max_seqlen": 99, "block_size": 1, "local_blocks": 0, "vert_stride": stride, **mode}


def check_residues(own, pattern, **total):
    """Compare a rank's heads with the formula, which counts the model's heads."""
    keys, (first, last) = torch.arange(3 * own.vert_stride), own.active_head_range
    for head in range(first, last):
        expected = seen_by(head, pattern, **total, queries=keys[-1:], keys=keys)[0]
        assert torch.equal(keys % own.vert_stride == own.residue(head - first), expected)


@given(
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    tp_size=st.integers(1, 3),
    stride=st.integers(1, 12),
    mode=st.sampled_from(MODES),
)
def test_residues_match_the_formula_on_every_rank(group, kv_heads, tp_size, stride, mode):
    pattern, heads = pattern_of(stride, mode), group * kv_heads
    named = pattern if kv_heads > 1 else {**pattern, "total_kv_heads": tp_size}
    for rank in range(tp_size):
        ranks = {"tp_size": tp_size, "tp_rank": rank}
        own = BlocksparseParams.of(named, num_heads=heads, num_kv_heads=kv_heads, **ranks)
        check_residues(own, pattern, num_q_heads=heads * tp_size, num_kv_heads=kv_heads * tp_size)
        for kv_head in range(kv_heads):
            each = {own.residue(kv_head * group + head) for head in range(group)}
            assert own.residues(kv_head) == tuple(sorted(each))


@given(
    kv_heads=st.integers(1, 3),
    repeats=st.integers(1, 3),
    group=st.integers(1, 2),
    stride=st.integers(1, 12),
    mode=st.sampled_from(MODES),
)
def test_ranks_that_replicate_a_kv_head_have_its_pattern(kv_heads, repeats, group, stride, mode):
    pattern, tp_size = pattern_of(stride, mode), kv_heads * repeats
    named = {**pattern, "total_kv_heads": kv_heads}
    for rank in range(tp_size):
        own = BlocksparseParams.of(named, num_heads=group, num_kv_heads=1, tp_size=tp_size, tp_rank=rank)
        check_residues(own, pattern, num_q_heads=group * tp_size, num_kv_heads=kv_heads)


@pytest.mark.parametrize("tp_size", [2, 8])
def test_ambiguous_replication_is_refused(tp_size):
    ranks = {"num_heads": 4, "num_kv_heads": 1, "tp_size": tp_size}
    with pytest.raises(LimitsError) as refused:
        params(homo_head_group=True, **ranks)

    assert f"tp_size={tp_size} is invalid with num_kv_heads=1 per rank" in str(refused.value)
    assert "ranks with one KV head may replicate it" in str(refused.value)
    assert f"add total_kv_heads to the pattern: {tp_size}, or fewer" in str(refused.value)
    for mode in ({}, {"homo_head": True, "homo_head_group": True}):  # no parameter counts KV heads
        assert params(**mode, **ranks).active_head_range == (0, 4)
    assert params(homo_head_group=True, **{**ranks, "num_kv_heads": 2}).head_sliding_step == -max(1, 4 // tp_size)


@pytest.mark.parametrize(
    ("total", "kv_heads", "tp_size"), [(8, 8, 2), (8, 2, 2), (3, 1, 4), (8, 1, 4), (2, 2, 4), (2, 1, 1)]
)
def test_a_total_that_the_ranks_do_not_hold_is_refused(total, kv_heads, tp_size):
    with pytest.raises(LimitsError) as refused:
        params(num_heads=8, num_kv_heads=kv_heads, tp_size=tp_size, total_kv_heads=total)

    assert f"tp_size={tp_size} is invalid with num_kv_heads={kv_heads} per rank" in str(refused.value)
    assert f"total_kv_heads={total}" in str(refused.value)


@given(stride=st.integers(1, 9), local=st.integers(0, 4), mode=st.sampled_from(MODES), length=st.integers(1, 200))
def test_tables_and_bounds_of_a_group(stride, local, mode, length):
    given_pattern = {"max_seqlen": 999, "block_size": 4, "local_blocks": local, "vert_stride": stride, **mode}
    own = BlocksparseParams.of(given_pattern, num_heads=6, num_kv_heads=2)
    pattern, last = Pattern(own, torch.device("cpu")), (length - 1) // 4
    for kv_head in range(2):
        residues = own.residues(kv_head)
        assert pattern.residues[kv_head, : len(residues)].tolist() == list(residues)
        below = [sum(residue < edge for residue in residues) for edge in range(stride + 1)]
        assert pattern.residues_below[kv_head].tolist() == below
        attended = sum(last - j < local or j % stride in residues for j in range(last + 1))
        assert attended <= pattern.max_blocks(length)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"block_size": 0}, "block_size is an integer of at least 1"),
        ({"block_size": True}, "block_size is an integer of at least 1"),
        ({"local_blocks": -1}, "local_blocks is an integer of at least 0"),
        ({"vert_stride": 0}, "vert_stride is an integer of at least 1"),
        ({"max_seqlen": 8.5}, "max_seqlen is an integer of at least 1"),
        ({"homo_head": 1}, "homo_head is True or False"),
        ({"num_heads": 31}, "the layer has num_heads=32 on this rank"),
        ({"num_kv_heads": 4}, "the layer has num_kv_heads=8 on this rank"),
        ({"dense_heads": 2}, "the parameters are max_seqlen, block_size"),
        ({"total_kv_heads": 0}, "total_kv_heads is an integer of at least 1"),
        ({"total_kv_heads": True}, "total_kv_heads is an integer of at least 1"),
        ({"vert_stride": 2**20 + 1}, "vert_stride is at most 1048576"),
        ({"max_seqlen": 2**31}, "max_seqlen is at most 2147483647"),
    ],
)
def test_invalid_parameters_are_refused(changed, expected):
    with pytest.raises(LayerError, match=expected):
        BlocksparseParams.of({**PHI, **changed}, num_heads=32, num_kv_heads=8)


@pytest.mark.parametrize("name", PHI)
def test_missing_parameters_are_refused_by_name(name):
    with pytest.raises(LayerError, match=f"{name} is an integer"):
        BlocksparseParams.of({key: PHI[key] for key in PHI if key != name}, num_heads=32, num_kv_heads=8)


def test_constants_are_limited_to_the_longest_sequence():
    most = {"block_size": 2**31 - 1, "local_blocks": 2**31 - 1}

    assert Pattern(params(**most), torch.device("cpu")).constants == (8192, 1, 8, False)
    assert Pattern(params(local_blocks=2**31 - 1), torch.device("cpu")).constants == (64, 128, 8, False)
    assert Pattern(params(), torch.device("cpu")).constants == (64, 16, 8, False)


def test_head_counts_may_be_in_the_pattern():
    assert params(num_heads=32, num_kv_heads=8) == BlocksparseParams.of(
        {**PHI, "num_heads": 32, "num_kv_heads": 8}, num_heads=32, num_kv_heads=8
    )


@pytest.mark.parametrize("longest", [8192, 8193])
def test_a_pattern_covers_what_the_limits_allow(longest):
    asked = Requirements(head_size=128, num_q_heads=32, num_kv_heads=8, dtype="bfloat16", block_sparse=PHI)
    backend = SimpleNamespace(agreement=SimpleNamespace(requirements=asked))
    limits = Limits(max_num_reqs=1, max_num_tokens=8192, max_seq_len=longest)

    if longest > PHI["max_seqlen"]:
        with pytest.raises(LimitsError, match="max_seq_len=8193 exceeds the pattern"):
            params_of(backend, limits, Parallel())
    else:
        assert params_of(backend, limits, Parallel()).max_seqlen == longest
