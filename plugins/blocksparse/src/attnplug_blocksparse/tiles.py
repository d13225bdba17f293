"""How large the tiles of a kernel are, and how many of them are loaded ahead."""

from __future__ import annotations

from typing import Final

from attrs import frozen

_LEAST_BLOCKS: Final = 4
"""Sparse blocks that are worth a program."""

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

    rows: int = 128
    keys: int = 128
    stages: int = 2
    warps: int = 8
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """What Triton is told beside the constants."""
        return {"num_warps": self.warps} | ({} if self.registers is None else {"maxnreg": self.registers})

    @classmethod
    def of(cls, head_size: int, *, has_much_shared_memory: bool = True) -> PrefillTiles:
        """
        Return what fits the shared memory and the registers.

        Args:
            head_size: Size of a head.
            has_much_shared_memory: Whether a program may have 160 KiB, as on an A100 or H200. Others have 99.
        """
        if not has_much_shared_memory:
            return cls(rows=64, keys=32, warps=4)
        return cls(keys=64) if head_size > 128 else cls()

    @classmethod
    def by_descriptors(cls, head_size: int) -> PrefillTiles:
        """Return the same for tiles that are loaded by descriptors."""
        return cls(keys=64) if head_size > 128 else cls()


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
