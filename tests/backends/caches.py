"""KV caches of random numbers, and copies of them, for the tests of plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from attnplug.contract import KVCache, LoadedBackend


def random_cache(backend: LoadedBackend, num_blocks: int, seed: int = 1) -> KVCache:
    """Return a KV cache of random numbers, the same for each seed."""
    cache, generator = backend.make_cache(num_blocks), torch.Generator().manual_seed(seed)
    for tensor in (cache.k, cache.v):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return cache


def copy_of(backend: LoadedBackend, cache: KVCache) -> KVCache:
    """Return another KV cache with the same numbers."""
    copy = backend.make_cache(cache.num_blocks, cache.device)
    for role, tensor in cache.tensors.items():
        copy[role].copy_(tensor)
    return copy


def same(cache: KVCache, other: KVCache) -> bool:
    """Whether two KV caches hold the same numbers."""
    return all(torch.equal(tensor, other[role]) for role, tensor in cache.tensors.items())


def is_clear(cache: KVCache) -> bool:
    """Whether a KV cache holds zeros alone."""
    return not any(tensor.any() for tensor in cache.tensors.values())
