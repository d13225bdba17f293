"""The two halves of a layer's cache."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from attnplug.errors import CacheError

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract.kv_cache import Cache


def key_and_value_pages(cache: Cache) -> tuple[Tensor, Tensor]:
    """
    Return the pages of keys and of values of one layer, as views: what is written into them is in the cache.

    Args:
        cache: What `Backend.make_cache` returned: a tensor ``(2, num_blocks, block_size, num_kv_heads, head_size)``,
            keys first, alone or as the role ``"kv"`` of a mapping; or a mapping with the roles ``"k"`` and ``"v"``,
            each without the leading axis. The order in memory is any.

    Returns:
        Two tensors ``(num_blocks, block_size, num_kv_heads, size)``, of the cache's strides.

    Raises:
        CacheError: It has neither form.
    """
    both = cache.get("kv") if isinstance(cache, Mapping) else cache
    if both is not None and both.ndim == 5 and both.shape[0] == 2:
        return both[0], both[1]
    if isinstance(cache, Mapping) and "k" in cache and "v" in cache:
        return cache["k"], cache["v"]
    raise CacheError(
        f"keys and values were looked for in a cache {_form(cache)}",
        "it is one tensor (2, num_blocks, block_size, num_kv_heads, head_size), or has the roles 'k' and 'v'",
        "return one of these forms from Backend.cache_tensors; stride_order says how kernels want it in memory",
    )


def _form(cache: Cache) -> str:
    if isinstance(cache, Mapping):
        return f"with the roles {', '.join(map(repr, cache)) or 'none'}"
    return f"of shape {tuple(cache.shape)}"
