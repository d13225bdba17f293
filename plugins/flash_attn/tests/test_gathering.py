"""The slots that are packed are those of the keys in use, in order, whatever else a block table holds."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from attnplug_flash_attn.packing import slots_of_keys
from attnplug_flash_attn.passes import cumulative


@given(
    lens=st.lists(st.integers(0, 50), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 4, 12, 16]),
    spare=st.integers(0, 3),
    more=st.integers(0, 9),
    seed=st.integers(0, 99),
)
def test_slots_are_those_of_a_plain_loop(lens, block_size, spare, more, seed) -> None:
    columns = -(-max([*lens, 1]) // block_size) + spare
    generator = torch.Generator().manual_seed(seed)
    table = torch.randperm(len(lens) * columns, generator=generator).view(len(lens), columns).int()
    expected = [
        int(table[request, place // block_size]) * block_size + place % block_size
        for request, length in enumerate(lens)
        for place in range(length)
    ]
    for request, length in enumerate(lens):
        table[request, -(-length // block_size) :] = 2**30  # names no block, and is not read
    starts = cumulative(torch.tensor(lens, dtype=torch.int32))

    assert starts.dtype == torch.int32
    assert starts.diff().tolist() == lens
    found = slots_of_keys(table, starts, sum(lens) + more, block_size)
    assert found.tolist() == expected + [0] * more
    assert found.dtype == torch.int64
