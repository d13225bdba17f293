"""The density, bytes and operations that the benchmark reports, against token masks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug_blocksparse.pattern import BlocksparseParams
from attnplug_kit.oracle import seen_by
from benchmarks.sparsity import decode_cost, prefill_cost

PHI = {"max_seqlen": 131072, "block_size": 64, "local_blocks": 16, "vert_stride": 8}
MODES = ({}, {"homo_head": True}, {"homo_head_group": True})


def params(pattern, heads=32, kv_heads=8):
    return BlocksparseParams.of(pattern, num_heads=heads, num_kv_heads=kv_heads)


@given(
    local=st.integers(0, 3),
    stride=st.integers(1, 5),
    mode=st.sampled_from(MODES),
    blocks=st.integers(1, 8),
    new=st.integers(1, 8),
)
def test_costs_match_the_mask(local, stride, mode, blocks, new):
    pattern = {"max_seqlen": 64, "block_size": 4, "local_blocks": local, "vert_stride": stride, **mode}
    tokens, rows = 4 * blocks, 4 * min(new, blocks)
    keys, queries = torch.arange(tokens), torch.arange(tokens - rows, tokens)
    causal = keys <= queries[:, None]
    masks = torch.stack(
        [seen_by(head, pattern, num_q_heads=6, num_kv_heads=2, queries=queries, keys=keys) for head in range(6)]
    )
    masks &= causal
    tiles = masks.view(6, rows // 4, 4, blocks, 4).any(4).any(2)
    union = masks[:, -1].view(2, 3, tokens).any(1)

    prefill = prefill_cost(params(pattern, 6, 2), 6, 10, tokens, rows, 4)
    decode = decode_cost(params(pattern, 6, 2), (6, 2), 10, tokens, 4)

    assert prefill.density == int(masks.sum()) / int(6 * causal.sum())
    assert prefill.flop == 4 * 10 * int(masks.sum())
    assert prefill.bytes == 2 * 2 * 10 * 4 * int(tiles.sum())
    assert decode.density == int(union.sum()) / union.numel()
    assert decode.bytes == 2 * 2 * 10 * int(union.sum())
    assert decode.flop == 4 * 10 * int(masks[:, -1].sum())


def test_dense_attention_has_density_1():
    assert prefill_cost(None, 6, 10, 32, 8, 4).density == decode_cost(None, (6, 2), 10, 32, 4).density == 1
    assert decode_cost(None, (6, 2), 10, 32, 4).bytes == 2 * 2 * 10 * 2 * 32


@pytest.mark.parametrize(
    ("mode", "density", "gigabytes"), [(MODES[0], 0.52, 4.43), (MODES[1], 0.15, 1.31), (MODES[2], 0.15, 1.31)]
)
def test_numbers_of_the_documentation(mode, density, gigabytes):
    decode = decode_cost(params({**PHI, **mode}), (32, 8), 128, 32768, 64)

    assert round(decode.density, 2) == density
    assert round(64 * decode.bytes / 1e9, 2) == gigabytes
    assert round(decode_cost(params(PHI, 32, 32), (32, 32), 128, 32768, 64).density, 2) == 0.15
