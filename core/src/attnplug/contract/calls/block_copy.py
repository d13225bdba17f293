"""Moving whole blocks inside a cache, between caches and between devices."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from operator import index
from typing import TYPE_CHECKING, NoReturn

import torch

from attnplug.contract.guards._format import describe, duplicate_of
from attnplug.contract.guards.cache import refuse_cache
from attnplug.contract.inputs.kv_cache import CacheTensor, KVCache, is_narrow_float
from attnplug.errors import CacheError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from attnplug.contract.inputs.kv_cache import CacheSpec
    from attnplug.negotiation.agreement import Agreement


def copy_between(spec: CacheTensor, src: Tensor, dst: Tensor, pairs: Tensor) -> None:
    """
    Copy whole blocks of one tensor.

    All sources are read before a block is written, so that overlapping pairs mean what they say.

    Args:
        spec: The tensor's description; without a block axis nothing moves.
        src: The tensor that is read.
        dst: The tensor that is written, on any device; may be `src`.
        pairs: ``(n, 2)`` int64 on the CPU, source and destination block.
    """
    if spec.block_axis is None or not pairs.shape[0]:
        return
    if is_narrow_float(spec.dtype):
        src, dst = src.view(torch.uint8), dst.view(torch.uint8)
    blocks = src.index_select(spec.block_axis, pairs[:, 0].to(src.device))
    dst.index_copy_(spec.block_axis, pairs[:, 1].to(dst.device), blocks.to(dst.device))


def check_movable(name: str, cache: object, agreement: Agreement, spec: CacheSpec | None) -> None:
    """
    Check that blocks of an agreement fit into a KV cache, whatever its form and layout.

    Raises:
        CacheError: It is no KV cache, or its blocks hold something else.
    """
    if not isinstance(cache, KVCache) or spec is None:
        refuse_cache(f"of {agreement.id}", agreement, spec, cache)
    if _contents(cache.spec) != _contents(spec):
        raise CacheError(
            f"the {name} was given with blocks of {_contents(cache.spec)}",
            f"for {agreement.id} they are {_contents(spec)}",
            "move blocks between caches of one block size, one dtype and the same heads",
        )


def _contents(spec: CacheSpec) -> dict[str, tuple[object, ...]]:
    """Return all that a block holds, but not its order in memory: the specs are of 2 blocks."""
    return {role: (one.shape, one.dtype, one.block_axis) for role, one in spec.tensors.items()}


def to_pairs(pairs: Mapping[int, Sequence[int]] | Tensor | Sequence[tuple[int, int]]) -> Tensor:
    """
    Return ``(n, 2)`` int64 pairs of source and destination block on the CPU.

    Args:
        pairs: Such pairs, or the destinations of each source.

    Raises:
        CacheError: They are not pairs of whole numbers, or a block is the destination of two sources.
    """
    tensor = pairs if isinstance(pairs, torch.Tensor) else _listed(pairs)
    if tensor.ndim != 2 or tensor.shape[1] != 2 or tensor.dtype not in (torch.int32, torch.int64):
        _refuse(f"block pairs of {describe(tensor)}")
    tensor = tensor.to("cpu", torch.int64)
    twice = duplicate_of(tensor[:, 1])
    if twice is not None:
        raise CacheError(
            f"block {twice} was given as the destination of several sources",
            "a block holds one block's values",
            "give each destination one source",
        )
    return tensor


def _listed(pairs: Mapping[int, Sequence[int]] | Sequence[tuple[int, int]]) -> Tensor:
    """Return pairs of Python numbers as a tensor. Nothing is reshaped, and nothing rounded, into pairs."""
    try:
        rows = _each_destination(pairs) if isinstance(pairs, Mapping) else pairs
        numbers = [(index(source), index(destination)) for source, destination in rows]
        return torch.tensor(numbers, dtype=torch.int64).reshape(-1, 2)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a number beyond int64
        _refuse(f"the block pairs {reprlib.repr(pairs)}")


def _each_destination(several: Mapping[int, Sequence[int]]) -> list[tuple[int, int]]:
    return [(source, destination) for source, destinations in several.items() for destination in destinations]


def _refuse(given: str) -> NoReturn:
    raise CacheError(
        f"{given} were given",
        "they are (n, 2) int64: source and destination block",
        "pass [(source, destination), ...]",
    ) from None


def check_blocks(name: str, blocks: Tensor, first: int, count: int) -> None:
    """
    Check block numbers against a cache.

    Raises:
        CacheError: One is below `first`, or not below `count`.
    """
    wrong = blocks[(blocks < first) | (blocks >= count)]
    if wrong.numel():
        raise CacheError(
            f"{name} block {int(wrong[0])} was given",
            f"the cache has the blocks {first} to {count - 1}" + (" to copy; block 0 is a null block" if first else ""),
            "pass blocks of the cache that was given",
        )
