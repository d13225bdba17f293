"""What tests of FlashAttention's functions share: tensors, pages, and the float64 oracle of the kit."""

from __future__ import annotations

from itertools import accumulate

import torch

from attnplug_kit.oracle import attend

HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 8, 4


def starts_of(lengths):
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def expected(query, key, value, *, causal, window_size=(-1, -1), softcap=0.0, sinks=None, slopes=None, scale=None):
    """Return the oracle's output and LSE of one sequence."""
    left, right = window_size
    causal = causal or right == 0
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    found = attend(
        query.double(), key.double(), value.double(), scale=scale, causal=causal,
        window=(left, 0 if causal else right) if left >= 0 else (-1, -1), logits_soft_cap=softcap or None,
        sinks=None if sinks is None else sinks.double(), alibi=None if slopes is None else "linear",
        alibi_slopes=slopes,
    )  # fmt: skip
    return found.output, found.lse_with_sink


def paged_of(keys, values, lengths, generator, spare=2):
    """Return pages with a block table that permutes them, block 0 included."""
    rows = [-(-length // BLOCK) for length in lengths]
    count, width = sum(rows) + spare, max(*rows, 1)
    order = torch.randperm(count, generator=generator).tolist()
    pools = [torch.full((count, BLOCK, *one.shape[1:]), float("nan")) for one in (keys, values)]
    table = torch.full((len(lengths), width), -1, dtype=torch.int32)
    begin = 0
    for index, length in enumerate(lengths):
        for block in range(rows[index]):
            table[index, block] = order.pop()
            here = slice(begin + block * BLOCK, begin + min(length, (block + 1) * BLOCK))
            for pool, one in zip(pools, (keys, values), strict=True):
                pool[table[index, block], : here.stop - here.start] = one[here]
        begin += length
    return (*(pool.nan_to_num_(0) for pool in pools), table)


def cached(sequences=2, capacity=16, **more):
    keys, values = (torch.randn(sequences, capacity, KV_HEADS, SIZE, **more) for _ in range(2))
    return torch.randn(sequences, 1, HEADS, SIZE, **more), keys, values
