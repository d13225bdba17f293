"""How large the tiles of a kernel are, and how many of them are loaded ahead."""

from __future__ import annotations

from typing import Any, Final

from attrs import frozen

_LEAST_BLOCKS: Final = 4
"""Sparse blocks that are worth a program."""

HOPPER_SHARED_MEMORY: Final = 227 * 1024
"""Bytes that a program may have on compute capability 9.0."""

MOST_SPLITS: Final = 64
"""Parts of one sequence, at most."""


@frozen
class PrefillTiles:
    """
    Tiles of a prompt.

    Attributes:
        rows: Query rows of a program.
        keys: Keys of a step.
        stages: Steps that are in flight.
        warps: Warps of a program.
        registers: Registers of a thread, at most, so that a multiprocessor has room for more programs; None for all.
    """

    rows: int = 64
    keys: int = 64
    stages: int = 3
    warps: int = 4
    registers: int | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What Triton is told beside the constants."""
        return {"num_warps": self.warps} | ({} if self.registers is None else {"maxnreg": self.registers})

    def shared_bytes(self, head_size: int) -> int:
        """Return what a program holds in shared memory: its rows, and the keys and values in flight, in 16 bits."""
        return 2 * (1 << (head_size - 1).bit_length()) * (self.rows + 2 * self.stages * self.keys)

    @classmethod
    def of(cls, head_size: int, *, paged: bool = False, shared_memory: int = HOPPER_SHARED_MEMORY) -> PrefillTiles:
        """
        Return what was fastest on an H200 (docs/explanation/blocksparse.md), or else the next that fits.

        Args:
            head_size: Size of a head.
            paged: Whether keys are in pages. Otherwise they are rows, by descriptors or not.
            shared_memory: Bytes that a program may have.
        """
        if head_size > 128:
            known = (cls(128, 64, 2, 8), cls(64, 32, 2))
        elif paged:
            known = (cls(128, 64, 3 if head_size <= 64 else 2, 8, 128), cls(64, 64, 2))
        else:
            known = (cls(), cls(64, 64, 2))
        return next((tiles for tiles in known if tiles.shared_bytes(head_size) <= shared_memory), known[-1])


@frozen
class HopperTiles:
    """
    Tiles of a long prompt whose kernel has warps with roles: 64 rows for each of two warpgroups, by 64 keys.

    Attributes:
        programs: Programs of a launch, one for each multiprocessor: shared memory has no room for a second.
        stages: Tiles of keys and of values that are in flight.
    """

    programs: int
    stages: int = 4


@frozen
class DecodeTiles:
    """
    Tiles of decodes.

    Attributes:
        keys: Keys of a step.
        stages: Steps that are in flight, the look-up of block and page included.
        warps: Warps of a program.
        programs: Programs that are wanted per multiprocessor: sequences are split until there are as many.
    """

    keys: int = 64
    stages: int = 5
    warps: int = 4
    programs: int = 16

    @classmethod
    def of(cls, head_size: int) -> DecodeTiles:
        """Return what fits the shared memory and the registers of an H100 or H200."""
        return cls(keys=32) if head_size > 128 else cls()

    def most_parts(self, sequences: int, kv_heads: int, multiprocessors: int) -> int:
        """Return how many parts all sequences of a step may have together, for each KV head."""
        return min(sequences * MOST_SPLITS, self.programs * multiprocessors // kv_heads + sequences)

    def splits(self, *, sequences: int, blocks: int, multiprocessors: int) -> int:
        """
        Return into how many parts the keys of each sequence are split.

        Args:
            sequences: Requests times KV heads.
            blocks: Sparse blocks that the longest of them has, at most.
            multiprocessors: Of the device.
        """
        wanted = -(-self.programs * multiprocessors // max(1, sequences))
        return max(1, min(wanted, blocks // _LEAST_BLOCKS, MOST_SPLITS))
