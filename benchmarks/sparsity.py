"""The cost of block-sparse attention, counted from a pattern's parameters: density, bytes and operations."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from attrs import asdict, frozen

if TYPE_CHECKING:
    from attnplug_blocksparse.pattern import BlocksparseParams

_BYTES = 2
"""Bytes of an element."""


@frozen(kw_only=True)
class Cost:
    """
    The cost of attention for some query rows.

    Attributes:
        density: The attended fraction of causal attention: for prefill of the pairs of tokens of a head, for decode of
            the keys of a KV group, the union of its heads.
        bytes: Keys and values that are read: for prefill by each head and query block, whatever the L2 cache saves;
            for decode from memory, once for each KV group.
        flop: Operations of the QK and PV matmuls.
    """

    density: float
    bytes: int
    flop: int

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)


def prefill_cost(params: BlocksparseParams | None, heads: int, size: int, tokens: int, rows: int, block: int) -> Cost:
    """
    Return the cost of the last rows of a sequence.

    Args:
        params: The pattern; None is dense attention.
        heads: Query heads.
        size: The head size.
        tokens: Tokens of the sequence, whole blocks.
        rows: Query rows, whole blocks.
        block: Tokens of a block.
    """
    pairs = blocks = 0
    residues = Counter(None if params is None else params.residue(head) for head in range(heads))
    for residue, count in residues.items():
        for i in range((tokens - rows) // block, tokens // block):
            before = i if params is None else sum(_is_attended(params, (residue,), i, j) for j in range(i))
            own = params is None or _is_attended(params, (residue,), i, i)
            pairs += count * (before * block**2 + own * block * (block + 1) // 2)
            blocks += count * (before + own)
    whole = heads * (rows * (tokens - rows) + rows * (rows + 1) // 2)
    return Cost(density=pairs / whole, bytes=2 * _BYTES * size * block * blocks, flop=4 * size * pairs)


def decode_cost(params: BlocksparseParams | None, heads: tuple[int, int], size: int, length: int, block: int) -> Cost:
    """
    Return the cost of a decode of one sequence.

    Args:
        params: The pattern; None is dense attention.
        heads: Query and KV heads.
        size: The head size.
        length: Tokens of the sequence, whole blocks.
        block: Tokens of a block.
    """
    count, (query_heads, kv_heads) = length // block, heads
    last, blocks, pairs = count - 1, kv_heads * count, query_heads * length
    if params is not None:
        unions = [params.residues(head) for head in range(kv_heads)]
        blocks = sum(_is_attended(params, residues, last, j) for residues in unions for j in range(count))
        own = [(params.residue(head),) for head in range(query_heads)]
        pairs = block * sum(_is_attended(params, residue, last, j) for residue in own for j in range(count))
    return Cost(density=blocks / (kv_heads * count), bytes=2 * _BYTES * size * block * blocks, flop=4 * size * pairs)


def _is_attended(params: BlocksparseParams, residues: tuple[int | None, ...], i: int, j: int) -> bool:
    return i - j < params.local_blocks or j % params.vert_stride in residues
