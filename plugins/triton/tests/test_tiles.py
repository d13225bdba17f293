"""Tile sizes, and the splits of requests."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from attnplug_triton.tiles import MAX_SPLITS, max_parts, splits


@given(
    requests=st.integers(1, 300),
    spare=st.integers(0, 50),
    keys=st.integers(1, 1 << 20),
    kv_heads=st.integers(1, 32),
    multiprocessors=st.integers(1, 200),
)
def test_the_workspace_holds_all_splits(requests, spare, keys, kv_heads, multiprocessors):
    found = splits(sequences=requests * kv_heads, keys=keys, tile=64, multiprocessors=multiprocessors)

    assert 1 <= found <= MAX_SPLITS
    assert found == 1 or requests * found <= max_parts(requests + spare, kv_heads, multiprocessors)


def test_few_long_requests_are_split():
    assert splits(sequences=8, keys=1 << 15, tile=64, multiprocessors=132) == 33
    assert splits(sequences=8, keys=1 << 15, tile=64, multiprocessors=132, most=3) == 3
    assert splits(sequences=64 * 8, keys=4096, tile=64, multiprocessors=132) == 1
    assert splits(sequences=1, keys=300, tile=64, multiprocessors=132) == 1
