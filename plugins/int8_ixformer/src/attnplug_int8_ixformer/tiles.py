"""How large the tiles of a kernel are, and how many of them are loaded ahead."""

from __future__ import annotations

from typing import Final

from attrs import frozen

MOST_SPLITS: Final = 64
"""Parts of one sequence, at most."""

_LEAST_TILES: Final = 4
"""Tiles that are worth a program."""


@frozen
class PrefillTiles:
    """
    Tiles of a prompt.

    Attributes:
        rows: Query rows of a program.
        keys: Keys of a step; 128 is a multiple of it.
        stages: Loads that are in flight, the look-up of a page included.
        warps: Warps of a program.
    """

    rows: int = 64
    keys: int = 128
    stages: int = 3
    warps: int = 4

    @classmethod
    def of(cls, head_size: int) -> PrefillTiles:
        """Return what was fastest on an H200 for heads of 128 (docs/explanation/int8.md), and fits larger ones."""
        return cls(keys=64, warps=8) if head_size > 128 else cls()


@frozen
class DecodeTiles:
    """
    Tiles of decodes.

    Attributes:
        keys: Keys of a step.
        stages: As of prompts: an odd number 2 n + 1 keeps n tiles of keys and values in flight.
        warps: Warps of a program.
        programs: Programs that are wanted per multiprocessor: sequences are split until there are as many.
    """

    keys: int = 64
    stages: int = 5
    warps: int = 2
    programs: int = 3

    @classmethod
    def of(cls, head_size: int) -> DecodeTiles:
        """Return what was fastest on an H200 for heads of 128 (docs/explanation/int8.md), and fits larger ones."""
        return cls(keys=32, warps=4) if head_size > 128 else cls()

    def splits(self, *, sequences: int, keys: int, multiprocessors: int, most: int | None = None) -> int:
        """
        Return into how many parts the keys of each sequence are split.

        Args:
            sequences: Requests times KV heads.
            keys: Of the longest of them.
            multiprocessors: Of the device.
            most: What the host allows; None for any number.
        """
        wanted = -(-self.programs * multiprocessors // max(1, sequences))
        worth = keys // (self.keys * _LEAST_TILES)
        return max(1, min(wanted, worth, MOST_SPLITS if most is None else min(most, MOST_SPLITS)))

    def most_parts(self, *, requests: int, kv_heads: int, multiprocessors: int) -> int:
        """Return how many parts all sequences of a step may have together, for each KV head."""
        return min(requests * MOST_SPLITS, self.programs * multiprocessors // kv_heads + 1 + requests)
