"""Splits of sequences."""

from __future__ import annotations

from attnplug_int8_ixformer.tiles import MAX_SPLITS, DecodeTiles


def test_splits_fill_the_device():
    tiles = DecodeTiles(keys=64, programs=16)

    assert tiles.splits(sequences=512, keys=4096, multiprocessors=132) == 5
    assert tiles.splits(sequences=1, keys=100, multiprocessors=132) == 1
    assert tiles.splits(sequences=8, keys=1 << 20, multiprocessors=132) == MAX_SPLITS
    assert tiles.splits(sequences=8, keys=1 << 20, multiprocessors=132, most=3) == 3
    for requests in (1, 7, 64, 500):
        most = tiles.max_parts(requests=requests, kv_heads=8, multiprocessors=132)
        assert requests * tiles.splits(sequences=requests * 8, keys=1 << 20, multiprocessors=132) <= most
