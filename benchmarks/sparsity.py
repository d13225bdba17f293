"""What a block-sparse pattern needs, counted from its parameters: for the benchmark, and for numbers in the pages."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from attrs import asdict, frozen

if TYPE_CHECKING:
    from attnplug_blocksparse.params import BlocksparseParams

_BYTES = 2
"""Of an element."""


@frozen(kw_only=True)
class Need:
    """
    What one pass over some rows needs.

    Attributes:
        density: What is attended of what causal attention attends: for prompts by a head, pairs of tokens; for decodes
            by a KV group, the union of its heads.
        bytes: Keys and values that are read: for prompts by each head and block of queries, whatever a cache of the GPU
            spares; for decodes from memory, once for each KV group.
        flop: Operations of both products.
    """

    density: float
    bytes: int
    flop: int

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return asdict(self)


def of_prompt(params: BlocksparseParams | None, heads: int, size: int, tokens: int, rows: int, block: int) -> Need:
    """
    Return what the last rows of a sequence need.

    Args:
        params: The pattern; None is dense attention.
        heads: Query heads.
        size: Size of a head.
        tokens: Tokens of the sequence, whole blocks.
        rows: Query rows, whole blocks.
        block: Tokens of a block.
    """
    pairs = blocks = 0
    residues = Counter(None if params is None else params.residue(head) for head in range(heads))
    for residue, alike in residues.items():
        for i in range((tokens - rows) // block, tokens // block):
            before = i if params is None else sum(_is_attended(params, (residue,), i, j) for j in range(i))
            own = params is None or _is_attended(params, (residue,), i, i)
            pairs += alike * (before * block**2 + own * block * (block + 1) // 2)
            blocks += alike * (before + own)
    whole = heads * (rows * (tokens - rows) + rows * (rows + 1) // 2)
    return Need(density=pairs / whole, bytes=2 * _BYTES * size * block * blocks, flop=4 * size * pairs)


def of_decodes(params: BlocksparseParams | None, heads: tuple[int, int], size: int, length: int, block: int) -> Need:
    """
    Return what the last token of one sequence needs.

    Args:
        params: The pattern; None is dense attention.
        heads: Query and KV heads.
        size: Size of a head.
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
    return Need(density=blocks / (kv_heads * count), bytes=2 * _BYTES * size * block * blocks, flop=4 * size * pairs)


def _is_attended(params: BlocksparseParams, residues: tuple[int | None, ...], i: int, j: int) -> bool:
    return i - j < params.local_blocks or j % params.vert_stride in residues
