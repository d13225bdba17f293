"""Tile sizes, by shared memory and head size, and splits of keys."""

from __future__ import annotations

from typing import Final

from attrs import frozen

MAX_ROWS: Final = 64
"""Rows of short queries in a program: queries times query heads per KV head."""

MAX_SPLITS: Final = 64
"""The most splits of one request."""

DESCRIBED_KEYS: Final = 64
"""Keys of a tile that tensor descriptors load; pages are multiples of it."""

_PROGRAMS: Final = 2
"""Programs per multiprocessor that splits aim for."""

_MIN_TILES: Final = 4
"""The fewest tiles of a split: fewer are not worth a program."""

_LARGE: Final = 227
_SHARED_MEMORY: Final = {(8, 0): 163, (8, 7): 163} | dict.fromkeys(((9, 0), (10, 0), (10, 3), (11, 0)), _LARGE)
"""KiB of shared memory per program (CUDA C++ Programming Guide, Compute Capabilities)."""

_MIN_SHARED_MEMORY: Final = 99
"""KiB on the other compute capabilities from 8.0 on."""

_OPERAND_BYTES: Final = {9: 2, 10: 6, 11: 6}
"""Bytes per element of latents that `wgmma` and `tcgen05` need beside two tiles, as Triton compiles them."""

_RECORD_BYTES: Final = 736
"""Bytes of shared memory for a record of 656 bytes, as Triton compiles its scales."""

_KIB: Final = 1024
_SPARE: Final = 2
"""KiB of shared memory for page numbers and reductions."""


@frozen
class Tiles:
    """
    Tile sizes of a kernel.

    Attributes:
        rows: Query rows of a program.
        keys: Keys of an iteration.
        stages: Pipeline stages; page numbers take the first one.
        warps: Warps of a program.
        joins_diagonal: Whether one loop of a prefill has the tiles of the diagonal too, masked under a branch. With
            `mma.sync` that changes the layout of scores, and warps exchange more.
        descriptors: Whether tensor descriptors load keys and values, where pages are multiples of a tile.
    """

    rows: int
    keys: int
    stages: int
    warps: int
    joins_diagonal: bool = False
    descriptors: bool = False


def shared_memory(capability: tuple[int, int] | None) -> int:
    """Return the KiB of shared memory of a compute capability; None is the interpreter's."""
    return max(_SHARED_MEMORY.values()) if capability is None else _SHARED_MEMORY.get(capability, _MIN_SHARED_MEMORY)


def width_of(size: int) -> int:
    """Return the power of 2 that a head is padded to in a tile, at least the 16 elements of a matrix instruction."""
    return max(16, 1 << max(0, size - 1).bit_length())


def decode_tiles(size: int, size_v: int, *, itemsize: int, rows: int, shared: int) -> Tiles:
    """
    Return the tiles of short queries: as many keys as leave shared memory for two programs with two tiles each.

    Args:
        size: Size of a query and key head.
        size_v: Size of a value head.
        itemsize: Bytes of a cached element.
        rows: Query rows of a request.
        shared: KiB of shared memory.
    """
    key_bytes = (width_of(size) + width_of(size_v)) * itemsize
    keys = _keys_within(128, key_bytes, (shared // 2 - _SPARE) * _KIB)
    return Tiles(rows=width_of(min(rows, MAX_ROWS)), keys=keys, stages=5, warps=4)


def prefill_tiles(size: int, size_v: int, *, shared: int, descriptors: bool = False) -> Tiles:
    """
    Return the tiles of longer queries: two of keys and values, of 16 bits, fit shared memory beside the queries.

    Args:
        size: Size of a query and key head.
        size_v: Size of a value head.
        shared: KiB of shared memory.
        descriptors: Whether tensor descriptors may load keys and values.
    """
    width, width_v = width_of(size), width_of(size_v)
    is_wide = max(width, width_v) > 128
    if descriptors and shared == _LARGE and max(width, width_v) <= 256:  # two programs per multiprocessor up to 128
        return Tiles(
            rows=128 if is_wide else 64,
            keys=DESCRIBED_KEYS,
            stages=2 if is_wide else 3,
            warps=8 if is_wide else 4,
            joins_diagonal=True,
            descriptors=True,
        )
    rows = 128 if shared == _LARGE or (shared > _MIN_SHARED_MEMORY and not is_wide) else 64
    keys = _keys_within(64, (width + width_v) * 2, (shared - _SPARE) * _KIB - rows * width * 2)
    warps = 8 if rows == 128 or is_wide else 4
    return Tiles(rows=rows, keys=keys, stages=3, warps=warps, joins_diagonal=shared == _LARGE)


def latent_tiles(
    size: int, size_v: int, *, itemsize: int | None, rows: int, capability: tuple[int, int] | None
) -> Tiles:
    """
    Return the tiles of latents, for queries of any length: queries are in shared memory too.

    Two tiles of keys are there as well, and more where instructions for 64 rows read them.

    Args:
        size: Rotary elements of a key.
        size_v: Elements of a latent.
        itemsize: Bytes of a cached element; None for records of fp8_ds_mla.
        rows: Query rows of a request.
        capability: The compute capability; None is the interpreter's.
    """
    width, available = width_of(size) + width_of(size_v), (shared_memory(capability) - _SPARE) * _KIB
    key_bytes = _RECORD_BYTES if itemsize is None else width * itemsize
    operand_bytes = _OPERAND_BYTES.get(9 if capability is None else capability[0], 0)

    def fits(rows: int, keys: int) -> bool:
        return (rows * 2 + keys * operand_bytes * (rows == MAX_ROWS)) * width + keys * 2 * key_bytes <= available

    rows, keys = width_of(min(rows, MAX_ROWS)), 64
    while rows > 16 and not fits(rows, 16):
        rows //= 2
    while keys > 16 and not fits(rows, keys):
        keys //= 2
    return Tiles(rows=rows, keys=keys, stages=5, warps=4 if rows == 16 else 8)


def _keys_within(most: int, key_bytes: int, available: int) -> int:
    """Return the keys of a tile, of which two fit the available bytes."""
    keys = most
    while keys > 16 and 2 * keys * key_bytes > available:
        keys //= 2
    return keys


def splits(*, sequences: int, keys: int, tile: int, multiprocessors: int, most: int | None = None) -> int:
    """
    Return the splits of each request.

    Args:
        sequences: Requests times the programs of one split: KV heads, times tiles of rows.
        keys: Keys of the longest request.
        tile: Keys of an iteration.
        multiprocessors: Multiprocessors of the device.
        most: The host's split-KV limit; None for no limit.
    """
    wanted = -(-_PROGRAMS * multiprocessors // max(1, sequences))
    return max(1, min(wanted, keys // (tile * _MIN_TILES), MAX_SPLITS if most is None else min(most, MAX_SPLITS)))


def max_parts(requests: int, programs: int, multiprocessors: int) -> int:
    """Return the most splits of a step's requests, with so many programs for each. A single split has no parts."""
    most = _PROGRAMS * multiprocessors // programs + 1  # from there on a request has one split
    return min(requests * MAX_SPLITS, most + min(requests, most))
