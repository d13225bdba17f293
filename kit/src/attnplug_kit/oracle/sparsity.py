"""
What the parameters of a block-sparse pattern mean, written to be checked by reading: one head at a time.

The pattern is that of Phi-3-small: local blocks, and vertical ones at a stride that slides from head to head.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

NEEDED: Final = ("max_seqlen", "block_size", "local_blocks", "vert_stride")
"""Tokens of the longest sequence; tokens per block; blocks of local attention; one vertical block out of so many."""

OPTIONAL: Final = ("homo_head", "homo_head_group")
"""All heads have one pattern; the query heads of a KV head have one pattern. The first wins over the second."""

EVERYTHING: Final[Mapping[str, Any]] = MappingProxyType(
    {"max_seqlen": 4096, "block_size": 16, "local_blocks": 0, "vert_stride": 1}
)
"""A pattern that leaves nothing out: every block is vertical."""


def is_known(pattern: Mapping[str, Any]) -> bool:
    """Whether a pattern has the names that the oracle knows."""
    return set(NEEDED) <= set(pattern) <= {*NEEDED, *OPTIONAL}


def seen_by(
    head: int, pattern: Mapping[str, Any], *, num_q_heads: int, num_kv_heads: int, queries: Tensor, keys: Tensor
) -> Tensor:
    """
    Return ``(queries, keys)`` bool: what a head may attend for the pattern's sake. Causality comes on top.

    Args:
        head: A query head of the model, all tensor-parallel ranks counted.
        pattern: The parameters.
        num_q_heads: Query heads of the model.
        num_kv_heads: KV heads of the model.
        queries: ``(queries,)`` positions; a negative one attends nothing.
        keys: ``(keys,)`` positions.
    """
    size, stride = pattern["block_size"], pattern["vert_stride"]
    if pattern.get("homo_head"):
        slide = 0
    elif pattern.get("homo_head_group"):
        slide = head // (num_q_heads // num_kv_heads) * max(1, stride // num_kv_heads)
    else:
        slide = head * max(1, stride // num_q_heads)
    mine = torch.div(queries, size, rounding_mode="floor")[:, None]
    other = (keys // size)[None, :]
    is_local = mine - other < pattern["local_blocks"]
    is_vertical = (other + slide + 1) % stride == 0
    seen: Tensor = (other <= mine) & (is_local | is_vertical)
    return seen
