"""Tile sizes and pipeline depths of the Triton kernels."""

from __future__ import annotations

from typing import Final

from attrs import frozen

MAX_SPLITS: Final = 64
"""The most splits of one sequence."""

_MIN_TILES: Final = 4
"""The fewest tiles of a split: fewer are not worth a program."""


@frozen
class PrefillTiles:
    """
    Tile sizes of a prefill.

    Attributes:
        rows: Query rows of a program.
        keys: Keys of an iteration, a divisor of 128.
        stages: Pipeline stages, the page lookup included.
        warps: Warps of a program.
    """

    rows: int = 64
    keys: int = 128
    stages: int = 3
    warps: int = 4

    @classmethod
    def of(cls, head_size: int) -> PrefillTiles:
        """Return tiles tuned on an H200 at head size 128 (int8-kernels.md), or tiles that fit larger heads."""
        return cls(keys=64, warps=8) if head_size > 128 else cls()


@frozen
class DecodeTiles:
    """
    Tile sizes of decodes.

    Attributes:
        keys: Keys of an iteration.
        stages: Pipeline stages: 2 n + 1 of them prefetch n tiles of keys and values.
        warps: Warps of a program.
        programs: Programs per multiprocessor that splits aim for.
    """

    keys: int = 64
    stages: int = 5
    warps: int = 2
    programs: int = 3

    @classmethod
    def of(cls, head_size: int) -> DecodeTiles:
        """Return tiles tuned on an H200 at head size 128 (int8-kernels.md), or tiles that fit larger heads."""
        return cls(keys=32, warps=4) if head_size > 128 else cls()

    def splits(self, *, sequences: int, keys: int, multiprocessors: int, most: int | None = None) -> int:
        """
        Return the number of splits of each sequence.

        Args:
            sequences: Requests times KV heads.
            keys: Keys of the longest sequence.
            multiprocessors: Multiprocessors of the device.
            most: The host's split-KV limit; None for no limit.
        """
        wanted = -(-self.programs * multiprocessors // max(1, sequences))
        worth = keys // (self.keys * _MIN_TILES)
        return max(1, min(wanted, worth, MAX_SPLITS if most is None else min(most, MAX_SPLITS)))

    def max_parts(self, *, requests: int, kv_heads: int, multiprocessors: int) -> int:
        """Return the most splits that all sequences of a step have together, for each KV head."""
        return min(requests * MAX_SPLITS, self.programs * multiprocessors // kv_heads + 1 + requests)
