"""Tile sizes, by shared memory and head size, and splits of keys."""

from __future__ import annotations

from typing import Final

from attrs import frozen

MAX_ROWS: Final = 64
"""Rows of short queries in a program: queries times query heads per KV head."""

MAX_SPLITS: Final = 64
"""The most splits of one request."""

_PROGRAMS: Final = 2
"""Programs per multiprocessor that splits aim for."""

_MIN_TILES: Final = 4
"""The fewest tiles of a split: fewer are not worth a program."""

_SHARED_MEMORY: Final = {
    (7, 5): 64,
    (8, 0): 163,
    (8, 7): 163,
    (9, 0): 227,
    (10, 0): 227,
    (10, 1): 227,
    (10, 3): 227,
    (11, 0): 227,
}
"""KiB of shared memory per program (CUDA C++ Programming Guide, Compute Capabilities)."""

_MIN_SHARED_MEMORY: Final = 99
"""KiB on the other compute capabilities from 8.0 on."""


@frozen
class Tiles:
    """
    Tile sizes of a kernel.

    Attributes:
        rows: Query rows of a program.
        keys: Keys of an iteration.
        stages: Pipeline stages; page numbers take the first one.
        warps: Warps of a program.
    """

    rows: int
    keys: int
    stages: int
    warps: int


def shared_memory(capability: tuple[int, int] | None) -> int:
    """Return the KiB of shared memory of a compute capability; None is the interpreter's."""
    return max(_SHARED_MEMORY.values()) if capability is None else _SHARED_MEMORY.get(capability, _MIN_SHARED_MEMORY)


def decode_tiles(size: int, size_v: int, *, rows: int, shared: int) -> Tiles:
    """
    Return the tiles of short queries.

    Args:
        size: Size of a query and key head.
        size_v: Size of a value head.
        rows: Query rows of a request.
        shared: KiB of shared memory.
    """
    del size, size_v, shared
    return Tiles(rows=max(16, 1 << (min(rows, MAX_ROWS) - 1).bit_length()), keys=64, stages=3, warps=4)


def prefill_tiles(size: int, size_v: int, *, shared: int) -> Tiles:
    """Return the tiles of longer queries. Arguments as for `decode_tiles`."""
    del size, size_v, shared
    return Tiles(rows=128, keys=64, stages=3, warps=8)


def splits(*, sequences: int, keys: int, tile: int, multiprocessors: int, most: int | None = None) -> int:
    """
    Return the splits of each request.

    Args:
        sequences: Requests times KV heads.
        keys: Keys of the longest request.
        tile: Keys of an iteration.
        multiprocessors: Multiprocessors of the device.
        most: The host's split-KV limit; None for no limit.
    """
    wanted = -(-_PROGRAMS * multiprocessors // max(1, sequences))
    return max(1, min(wanted, keys // (tile * _MIN_TILES), MAX_SPLITS if most is None else min(most, MAX_SPLITS)))


def max_parts(requests: int, kv_heads: int, multiprocessors: int) -> int:
    """Return the most splits that the requests of a step have together."""
    return min(requests * MAX_SPLITS, _PROGRAMS * multiprocessors // kv_heads + 1 + requests)
