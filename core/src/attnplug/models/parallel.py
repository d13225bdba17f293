"""Tensor parallelism of a layer: the heads per device, and the bytes of its KV cache there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal

from attrs import frozen

from attnplug.errors import RequirementsError
from attnplug.request.domains import FP8_DS_MLA, FP8_DS_MLA_BYTES, PER_TOKEN_HEAD

if TYPE_CHECKING:
    from attnplug.request.requirements import Requirements

_BITS: Final = {
    "float64": 64,
    "float32": 32,
    "bfloat16": 16,
    "float16": 16,
    "fp8_e4m3": 8,
    "fp8_e5m2": 8,
    **dict.fromkeys(PER_TOKEN_HEAD, 8),
    "int8": 8,
    "int4": 4,
    "nvfp4": 4,
}
"""Bits of one value, without scales."""

_SCALE_BYTES: Final = 8
"""Bytes of the float32 scales of a key and a value, where each token and KV head has its own."""

Sharing = Literal["whole", "split", "replicated"]


@frozen
class Shard:
    """
    A layer on a device of a tensor-parallel group.

    Attributes:
        requirements: What the layer requests there.
        sharing: What becomes of its KV heads: *whole* on a single device, *split* over the devices, or *replicated*,
            where there are more devices than heads.
        copies: The devices that hold the same KV head; 1 unless they are replicated.
    """

    requirements: Requirements
    sharing: Sharing
    copies: int


def shard(requirements: Requirements, size: int) -> Shard:
    """
    Return a layer on each of the devices of a tensor-parallel group.

    Query heads are split. KV heads are split where there are as many as devices or more, and replicated otherwise, as
    vLLM and SGLang do.

    Args:
        requirements: The layer of the whole model.
        size: The devices.

    Raises:
        RequirementsError: `size` is no such number, or does not divide the heads.
    """
    if type(size) is not int or size < 1:
        raise RequirementsError(
            f"tensor parallelism over {size!r} devices was requested",
            "it is a whole number, at least 1",
            "pass 1, 2, 4 or 8",
        )
    queries, keys = requirements.num_q_heads, requirements.num_kv_heads
    if size == 1:
        return Shard(requirements, "whole", 1)
    divides = queries % size == 0 and (keys % size == 0 or size % keys == 0)
    if not divides:
        sizes = [n for n in range(1, queries + 1) if queries % n == 0 and (keys % n == 0 or n % keys == 0)]
        raise RequirementsError(
            f"tensor parallelism over {size} devices was requested for {queries} query heads and {keys} KV heads",
            "each device has the same number of query heads, and whole KV heads or a copy of one",
            f"request {', '.join(map(str, sizes))} devices",
        )
    own = requirements.evolve(num_q_heads=queries // size, num_kv_heads=max(1, keys // size))
    return Shard(own, "split" if keys >= size else "replicated", max(1, size // keys))


def cache_bytes(requirements: Requirements) -> int | None:
    """
    Return the bytes of a token in a layer's KV cache: keys and values, and the scales of each token and KV head
    if the dtype says so; without those that a plugin keeps besides. The values of latents are parts of their keys.

    0 for a layer that has no KV cache of its own: it has contiguous K/V, or reads that of an earlier layer. None for a
    dtype whose layout is the plugin's.

    Args:
        requirements: The layer on one device; its head counts are bound.
    """
    if not requirements.paged or requirements.kv_sharing:
        return 0
    if requirements.kv_cache_dtype == FP8_DS_MLA:
        return FP8_DS_MLA_BYTES
    bits = _BITS.get(requirements.kv_cache_dtype)
    if bits is None:
        return None
    size_v = 0 if requirements.latent else requirements.head_size_v or requirements.head_size
    scales = _SCALE_BYTES if requirements.kv_cache_dtype in PER_TOKEN_HEAD else 0
    return requirements.num_kv_heads * ((requirements.head_size + size_v) * bits // 8 + scales)


def kept_tokens(requirements: Requirements) -> int | None:
    """Return the most recent tokens that a layer can ever read, None where it may read all of them."""
    bounds = [bound for bound in (requirements.sliding_window, requirements.attention_chunk) if bound is not None]
    return min(bounds) if bounds else None
