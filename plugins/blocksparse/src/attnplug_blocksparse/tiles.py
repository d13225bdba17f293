"""Tile sizes and pipeline depths of the kernels."""

from __future__ import annotations

from typing import Any, Final

from attrs import frozen

_MIN_BLOCKS: Final = 4
"""The fewest sparse blocks of a split: fewer are not worth a program."""

HOPPER_SHARED_MEMORY: Final = 227 * 1024
"""Bytes of shared memory per program on compute capability 9.0."""

MAX_SPLITS: Final = 64
"""The most splits of one sequence."""


@frozen
class PrefillTiles:
    """
    Tile sizes of a prefill.

    Attributes:
        rows: Query rows of a program.
        keys: Keys of an iteration.
        stages: Pipeline stages.
        warps: Warps of a program.
        registers: The limit of registers per thread, so that more programs fit a multiprocessor; None for no limit.
    """

    rows: int = 64
    keys: int = 64
    stages: int = 3
    warps: int = 4
    registers: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The options of Triton's launch."""
        return {"num_warps": self.warps} | ({} if self.registers is None else {"maxnreg": self.registers})

    def shared_bytes(self, head_size: int) -> int:
        """Return the shared memory of a program: its rows, and keys and values of each stage, 2 bytes each."""
        return 2 * (1 << (head_size - 1).bit_length()) * (self.rows + 2 * self.stages * self.keys)

    @classmethod
    def of(cls, head_size: int, *, paged: bool = False, shared_memory: int = HOPPER_SHARED_MEMORY) -> PrefillTiles:
        """
        Return the fastest tiles on an H200 (blocksparse-kernels.md in docs/reference/evidence), or the next that fit.

        Args:
            head_size: The head size.
            paged: Whether K/V are paged. Otherwise they are contiguous.
            shared_memory: Bytes of shared memory per program.
        """
        if head_size > 128:
            tuned = (cls(128, 64, 2, 8), cls(64, 32, 2))
        elif paged:
            tuned = (cls(128, 64, 3 if head_size <= 64 else 2, 8, 128), cls(64, 64, 2))
        else:
            tuned = (cls(), cls(64, 64, 2))
        return next((tiles for tiles in tuned if tiles.shared_bytes(head_size) <= shared_memory), tuned[-1])


@frozen
class HopperTiles:
    """
    The warp-specialized prefill kernel: tiles are 64 rows for each of two warpgroups, by 64 keys.

    Attributes:
        programs: Programs of a launch, one per multiprocessor: shared memory has no room for a second.
        stages: Pipeline stages of keys and of values.
    """

    programs: int
    stages: int = 4


@frozen
class DecodeTiles:
    """
    Tile sizes of decodes.

    Attributes:
        keys: Keys of an iteration.
        stages: Pipeline stages, the lookup of block and page included.
        warps: Warps of a program.
        programs: Programs per multiprocessor that splits aim for.
    """

    keys: int = 64
    stages: int = 5
    warps: int = 4
    programs: int = 16

    @classmethod
    def of(cls, head_size: int) -> DecodeTiles:
        """Return the tiles that fit the shared memory and the registers of an H100 or H200."""
        return cls(keys=32) if head_size > 128 else cls()

    def max_parts(self, sequences: int, kv_heads: int, multiprocessors: int) -> int:
        """Return the most splits that all sequences of a step have together, for each KV head."""
        return min(sequences * MAX_SPLITS, self.programs * multiprocessors // kv_heads + sequences)

    def splits(self, *, sequences: int, blocks: int, multiprocessors: int) -> int:
        """
        Return the number of splits of each sequence.

        Args:
            sequences: Requests times KV heads.
            blocks: An upper bound of the sparse blocks of the longest sequence.
            multiprocessors: Multiprocessors of the device.
        """
        wanted = -(-self.programs * multiprocessors // max(1, sequences))
        return max(1, min(wanted, blocks // _MIN_BLOCKS, MAX_SPLITS))
