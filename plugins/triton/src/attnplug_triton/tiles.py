"""Tile sizes, as measured (``tiles.json``) or by shared memory and head size; and splits of keys."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnplug import Device

TABLE: Final = Path(__file__).with_name("tiles.json")
"""The measured tile sizes: rows that `benchmarks/tiles.py` writes."""

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
_SHARED_MEMORY: Final = {"8.0": 163, "8.7": 163, "gfx950": 160} | dict.fromkeys(("9.0", "10.0", "10.3", "11.0"), _LARGE)
"""KiB of shared memory per program (CUDA C++ Programming Guide, Compute Capabilities; AMD GPU specifications, LDS)."""

_MIN_SHARED_MEMORY: Final = 99
"""KiB on the other compute capabilities from 8.0 on."""

_AMD_SHARED_MEMORY: Final = 64
"""KiB on the other AMD GPUs, whose programs do not share those of two compute units."""

_OPERAND_BYTES: Final = {"9": 2, "10": 6, "11": 6}
"""Bytes per element of latents that `wgmma` and `tcgen05` need beside two tiles, as Triton compiles them."""

_RECORD_BYTES: Final = 736
"""Bytes of shared memory for a record of 656 bytes, as Triton compiles its scales."""

_HUGE_ROWS: Final = 32
"""The most rows of a tile of heads above 256 elements: more of them spill registers, and exceed 99 KiB."""

_FP8_REGISTERS: Final = 128
"""Registers of a thread beside an FP8 KV cache: four programs of four warps fit a multiprocessor."""

_AMD: Final = "gfx"
_SMALL_WAVES: Final = ("gfx11", "gfx12")
"""Architectures of AMD with 32 lanes per wave, and 256 registers per lane."""

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
        registers: The most registers of a thread on NVIDIA GPUs, so that one more program fits a multiprocessor; None
            leaves them to the compiler.
    """

    rows: int
    keys: int
    stages: int
    warps: int
    joins_diagonal: bool = False
    descriptors: bool = False
    registers: int | None = None

    @property
    def launch_options(self) -> dict[str, int]:
        """Options of a launch."""
        return {"num_warps": self.warps} | ({} if self.registers is None else {"maxnreg": self.registers})


@frozen
class TileKey:
    """
    What measured tile sizes depend on.

    Attributes:
        arch: The architecture, see `architecture`.
        phase: ``"decode"``, ``"prefill"``, ``"latent decode"``, ``"latent prefill"``, or ``"selected"`` for `topk`.
        size: Size of a query and key head; of latents the rotary elements.
        size_v: Size of a value head; of latents the other elements.
        dtype: The KV cache dtype; ``"bfloat16"`` for float16 too.
        page: The largest power of 2, at most 128, that the tokens of a page are a multiple of.
        request_rows: Query rows of a request, as a tile has them; 0 where these are any.
    """

    arch: str | None
    phase: str
    size: int
    size_v: int
    dtype: str
    page: int
    request_rows: int = 0


def page_class(block_size: int) -> int:
    """Return the largest power of 2, at most 128, that divides a block size."""
    return min(128, block_size & -block_size)


@cache
def measured_tiles() -> Mapping[TileKey, Tiles]:
    """Read the table."""
    rows = json.loads(TABLE.read_text(encoding="utf-8"))["rows"]
    return {TileKey(**row["key"]): Tiles(**row["tiles"]) for row in rows}


def architecture(device: Device) -> str | None:
    """Return a compute capability, as ``"9.0"``, or an LLVM target, as ``"gfx942"``; None for the interpreter."""
    if device.vendor == "amd":
        return device.arch or _AMD
    capability = device.compute_capability
    return None if capability is None else f"{capability.major}.{capability.minor}"


def shared_memory(arch: str | None) -> int:
    """Return the KiB of shared memory of an architecture."""
    if arch is None:
        return _LARGE
    return _SHARED_MEMORY.get(arch, _AMD_SHARED_MEMORY if arch.startswith(_AMD) else _MIN_SHARED_MEMORY)


def has_e4m3(arch: str | None) -> bool:
    """Whether Triton converts e4m3 to 16 bits on an architecture, in all releases from 3.4 on."""
    if arch is None or arch.startswith(_AMD):
        return arch is None or arch == "gfx950" or arch.startswith("gfx12")
    major, minor = map(int, arch.split("."))
    return (major, minor) >= (8, 9)


def width_of(size: int) -> int:
    """Return the power of 2 that a head is padded to in a tile, at least the 16 elements of a matrix instruction."""
    return max(16, 1 << max(0, size - 1).bit_length())


def value_width_of(size: int) -> int:
    """
    Return the columns of values in a tile.

    They are 64 at least: of 16 and 32 columns ptxas 12.8, that of Triton 3.6, makes some descriptors of ``wgmma`` from
    a register that was never written. Outputs were wrong on an H200, and right with ptxas 13.0.
    """
    return max(64, width_of(size))


def decode_tiles(size: int, size_v: int, *, itemsize: int, rows: int, arch: str | None) -> Tiles:
    """
    Return the tiles of short queries: as many keys as leave shared memory for two programs with two tiles each.

    Args:
        size: Size of a query and key head.
        size_v: Size of a value head.
        itemsize: Bytes of a cached element.
        rows: Query rows of a request.
        arch: The architecture.
    """
    width, width_v = width_of(size), value_width_of(size_v)
    key_bytes = (width + width_v) * itemsize
    shared, is_huge = shared_memory(arch), max(width, width_v) > 256
    rows = width_of(min(rows, _HUGE_ROWS if is_huge else MAX_ROWS))
    keys, stages, registers = _keys_within(128, key_bytes, (shared // 2 - _SPARE) * _KIB), 3, None
    if itemsize == 1 and rows == 16 and max(width, width_v) <= 128:
        # Conversions take registers, so that fewer programs fit a multiprocessor: 197 us instead of 296 us on an H200.
        is_amd = arch is not None and arch.startswith(_AMD)
        keys, stages, registers = min(keys, 64), 2, None if is_amd else _FP8_REGISTERS
    warps = _warps(8 if is_huge and rows > 16 else 4, arch)
    return Tiles(rows=rows, keys=keys, stages=stages, warps=warps, registers=registers)


def prefill_tiles(size: int, size_v: int, *, arch: str | None, descriptors: bool = False) -> Tiles:
    """
    Return the tiles of longer queries: two of keys and values, of 16 bits, fit shared memory beside the queries.

    Args:
        size: Size of a query and key head.
        size_v: Size of a value head.
        arch: The architecture.
        descriptors: Whether tensor descriptors may load keys and values.
    """
    width, width_v, shared = width_of(size), value_width_of(size_v), shared_memory(arch)
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
    if max(width, width_v) > 256:
        rows = _HUGE_ROWS
    most = 16 if _has_small_waves(arch) else 64  # more keys spill registers there
    keys = _keys_within(most, (width + width_v) * 2, (shared - _SPARE) * _KIB - rows * width * 2)
    warps, joins_diagonal = _warps(8 if rows == 128 or is_wide else 4, arch), shared == _LARGE and rows >= 64
    return Tiles(rows=rows, keys=keys, stages=3, warps=warps, joins_diagonal=joins_diagonal)


def latent_tiles(size: int, size_v: int, *, itemsize: int | None, rows: int, arch: str | None) -> Tiles:
    """
    Return the tiles of latents, for queries of any length: queries are in shared memory too.

    Two tiles of keys are there as well, and more where instructions for 64 rows read them.

    Args:
        size: Rotary elements of a key.
        size_v: Elements of a latent.
        itemsize: Bytes of a cached element; None for records of fp8_ds_mla.
        rows: Query rows of a request.
        arch: The architecture.
    """
    width, available = width_of(size) + value_width_of(size_v), (shared_memory(arch) - _SPARE) * _KIB
    key_bytes = _RECORD_BYTES if itemsize is None else width * itemsize
    operand_bytes = _OPERAND_BYTES.get("9" if arch is None else arch.partition(".")[0], 0)

    def fits(rows: int, keys: int) -> bool:
        return (rows * 2 + keys * operand_bytes * (rows == MAX_ROWS)) * width + keys * 2 * key_bytes <= available

    rows, keys = width_of(min(rows, MAX_ROWS)), 64
    while rows > 16 and not fits(rows, 16):
        rows //= 2
    while keys > 16 and not fits(rows, keys):
        keys //= 2
    # Few rows wait for memory, and more programs fit a multiprocessor; many wait for the products.
    return Tiles(rows=rows, keys=keys, stages=3 if rows == 16 else 5, warps=_warps(4 if rows == 16 else 8, arch))


def latent_residents(tiles: Tiles) -> int:
    """Return the programs of short queries of latents that a multiprocessor has at a time, by their registers."""
    return 2 if tiles.rows == 16 else 1


def _warps(warps: int, arch: str | None) -> int:
    """Return the warps of a program: twice as many where waves have half the registers of those of 64 lanes."""
    return warps * 2 if _has_small_waves(arch) else warps


def _has_small_waves(arch: str | None) -> bool:
    return arch is not None and arch.startswith(_SMALL_WAVES)


def _keys_within(most: int, key_bytes: int, available: int) -> int:
    """Return the keys of a tile, of which two fit the available bytes."""
    keys = most
    while keys > 16 and 2 * keys * key_bytes > available:
        keys //= 2
    return keys


def splits(
    *, sequences: int, keys: int, tile: int, multiprocessors: int, most: int | None = None, residents: int | None = None
) -> int:
    """
    Return the splits of each request.

    Args:
        sequences: Requests times the programs of one split: KV heads, times tiles of rows.
        keys: Keys of the longest request.
        tile: Keys of an iteration.
        multiprocessors: Multiprocessors of the device.
        most: The host's split-KV limit; None for no limit.
        residents: Programs that a multiprocessor has at a time, so that others wait for their end; None for more than
            splits aim for.
    """
    wanted = -(-_PROGRAMS * multiprocessors // max(1, sequences))
    limit = max(1, min(wanted, keys // (tile * _MIN_TILES), MAX_SPLITS if most is None else min(most, MAX_SPLITS)))
    if residents is None:
        return limit

    sequences, slots = max(1, sequences), residents * multiprocessors

    def iterations(count: int) -> int:
        return -(-sequences * count // slots) * -(-keys // (tile * count))

    whole_waves = (max(1, min(waves * slots // sequences, limit)) for waves in (1, 2, 3))
    return min(sorted({1, *whole_waves}), key=iterations)  # the fewest of equal ones


def max_parts(requests: int, programs: int, multiprocessors: int) -> int:
    """Return the most splits of a step's requests, with so many programs for each. A single split has no parts."""
    most = _PROGRAMS * multiprocessors // programs + 1  # from there on a request has one split
    return min(requests * MAX_SPLITS, most + min(requests, most))
