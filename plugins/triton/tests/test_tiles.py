"""Tile sizes, and the splits of requests."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

import attnplug
from attnplug_triton import tiles as tiles_module
from attnplug_triton.tiles import MAX_SPLITS, TABLE, TileKey, Tiles, max_parts, measured_tiles, page_class, splits
from tests.backends.triton_on_cpu import NEEDS_TRITON

if TYPE_CHECKING:
    from attnplug_triton.backend import TritonBackend


def backend_for(device: str = "h200", block_size: int = 16, **fields: Any) -> TritonBackend:
    from attnplug_triton.backend import TritonBackend  # noqa: PLC0415 - imports Triton

    llama = attnplug.Requirements(head_size=128, num_q_heads=32, num_kv_heads=8, dtype="bfloat16")
    request, here = llama.evolve(block_size=block_size, **fields), attnplug.Device.parse(device)
    explanation = attnplug.explain(request, here, backend="triton", assume_installed=True)
    return TritonBackend(explanation.chosen.agreement, here)


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[TileKey, Tiles]:
    """A table without rows, which tests fill."""
    rows: dict[TileKey, Tiles] = {}
    for module in (tiles_module, pytest.importorskip("attnplug_triton.backend", exc_type=ImportError)):
        monkeypatch.setattr(module, "measured_tiles", lambda: rows)
    return rows


@NEEDS_TRITON
@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("other", "is_found"),
    [
        ({}, True),
        ({"device": "h100"}, True),
        ({"dtype": "float16"}, True),
        ({"block_size": 48}, True),
        ({"num_q_heads": 128}, True),
        ({"device": "a100"}, False),
        ({"block_size": 32}, False),
        ({"head_size": 64}, False),
        ({"head_size_v": 64}, False),
        ({"kv_cache_dtype": "fp8"}, False),
        ({"num_q_heads": 256}, False),
    ],
    ids=str,
)
def test_measured_tiles_are_those_of_their_key(
    other: dict[str, Any], is_found: bool, table: dict[TileKey, Tiles]
) -> None:
    usual = backend_for()
    decode, prefill = evolve(usual.decode_tiles, stages=2), evolve(usual.prefill_tiles, keys=32)
    table |= {usual.tile_key("decode"): decode, usual.tile_key("prefill"): prefill}

    found = backend_for(**other)

    assert (found.decode_tiles == decode) == is_found
    assert (found.prefill_tiles == prefill) == (is_found or other == {"num_q_heads": 256})


@NEEDS_TRITON
@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("other", "is_found"),
    [
        ({}, True),
        ({"causal": False}, True),
        ({"sliding_window": 1024}, False),
        ({"attention_chunk": 8192}, False),
        ({"mm_prefix": True}, False),
        ({"custom_mask": True}, False),
        ({"dcp_size": 2, "num_q_heads": 16}, False),
    ],
    ids=str,
)
def test_tiles_of_descriptors_are_those_of_rows_that_they_load(other: dict[str, Any], is_found: bool) -> None:
    assert backend_for(block_size=64, **other).decode_tiles.descriptors == is_found


@NEEDS_TRITON
@pytest.mark.usefixtures("registered")
def test_latents_have_rows_of_their_own(table: dict[TileKey, Tiles]) -> None:
    latent = {"head_size": 576, "head_size_v": 512, "latent": True, "num_kv_heads": 1, "return_lse": True}
    phases = ("latent decode", "selected", "latent prefill")
    keys = [backend_for(**latent).tile_key("decode"), backend_for(**latent, topk=64).tile_key("decode")]
    keys.append(backend_for(**latent).tile_key("prefill"))

    assert tuple(key.phase for key in keys) == phases
    assert {(key.size, key.size_v) for key in keys} == {(64, 512)}


def test_the_table_has_one_row_of_a_key_in_order() -> None:
    rows = json.loads(TABLE.read_text("utf-8"))["rows"]
    keys = [json.dumps(row["key"], sort_keys=True) for row in rows]

    assert keys == sorted(set(keys))
    assert len(measured_tiles()) == len(rows) > 0
    for row in rows:
        assert row["triton"]
        assert row["device"]
        assert row["key"]["page"] == page_class(row["key"]["page"])


@given(
    requests=st.integers(1, 300),
    spare=st.integers(0, 50),
    keys=st.integers(1, 1 << 20),
    kv_heads=st.integers(1, 32),
    multiprocessors=st.integers(1, 200),
    residents=st.sampled_from([None, 1, 2]),
)
def test_the_workspace_holds_all_splits(requests, spare, keys, kv_heads, multiprocessors, residents):
    given = {"sequences": requests * kv_heads, "keys": keys, "tile": 64, "multiprocessors": multiprocessors}
    found = splits(**given, residents=residents)

    assert 1 <= found <= MAX_SPLITS
    assert found == 1 or requests * found <= max_parts(requests + spare, kv_heads, multiprocessors)


def test_few_long_requests_are_split():
    assert splits(sequences=8, keys=1 << 15, tile=64, multiprocessors=132) == 33
    assert splits(sequences=8, keys=1 << 15, tile=64, multiprocessors=132, most=3) == 3
    assert splits(sequences=64 * 8, keys=4096, tile=64, multiprocessors=132) == 1
    assert splits(sequences=1, keys=300, tile=64, multiprocessors=132) == 1


@pytest.mark.parametrize(
    ("sequences", "residents", "expected"),
    [
        (64, 2, 4),  # 256 programs of 16 tiles at once; 5 splits would be 320, in two waves
        (128, 1, 1),  # 128 programs of 64 tiles; 3 splits would be three waves of 22
        (16, 1, 8),  # 16 splits would be two waves of 4 tiles, and more to merge
        (140, 1, 2),  # three waves of 32 tiles instead of two of 64
    ],
)
def test_splits_of_latents_leave_no_wave_half_empty(sequences, residents, expected):
    assert splits(sequences=sequences, keys=4096, tile=64, multiprocessors=132, residents=residents) == expected
