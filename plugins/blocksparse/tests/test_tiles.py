"""Tile sizes: the splits of a sequence, the workspace, and shared memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attnplug_blocksparse.tiles import MAX_SPLITS, DecodeTiles, PrefillTiles

numbers = {"kv_heads": st.integers(1, 32), "multiprocessors": st.integers(1, 200), "programs": st.integers(1, 64)}


@given(requests=st.integers(1, 300), spare=st.integers(0, 50), blocks=st.integers(1, 3000), **numbers)
def test_the_workspace_holds_all_splits(requests, spare, blocks, kv_heads, multiprocessors, programs):
    tiles = DecodeTiles(programs=programs)
    splits = tiles.splits(sequences=requests * kv_heads, blocks=blocks, multiprocessors=multiprocessors)

    assert 1 <= splits <= MAX_SPLITS
    assert splits == 1 or splits * 4 <= blocks
    assert requests * splits <= tiles.max_parts(requests + spare, kv_heads, multiprocessors)


def test_few_long_sequences_are_split():
    tiles = DecodeTiles(programs=16)

    assert tiles.splits(sequences=8, blocks=264, multiprocessors=132) == 64
    assert tiles.splits(sequences=64 * 8, blocks=264, multiprocessors=132) == 5
    assert tiles.splits(sequences=4096, blocks=264, multiprocessors=132) == 1
    assert tiles.splits(sequences=8, blocks=3, multiprocessors=132) == 1


@pytest.mark.parametrize("size", [64, 96, 128, 256])
@pytest.mark.parametrize("paged", [True, False])
@pytest.mark.parametrize("kib", [227, 163, 99])
def test_tiles_fit_shared_memory(size, paged, kib):
    tiles, width = PrefillTiles.of(size, paged=paged, shared_memory=kib * 1024), 1 << (size - 1).bit_length()

    assert tiles.shared_bytes(size) == 2 * width * (tiles.rows + 2 * tiles.stages * tiles.keys)
    assert tiles.shared_bytes(size) <= kib * 1024


def test_register_limit():
    assert PrefillTiles().options == {"num_warps": 4}
    assert PrefillTiles(registers=128).options == {"num_warps": 4, "maxnreg": 128}
