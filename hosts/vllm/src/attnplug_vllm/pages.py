"""
Pages: blocks of a KV cache that hold more than keys and values of one dtype, such as int8 keys and their scales.

vLLM's pool of a layer is then one run of bytes per block. In it each tensor of the block follows the one before. What
vLLM does with blocks, such as prefix caching, swapping and transfers, includes all of them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.weak import WeakIdKeyDictionary

from attnplug.errors import CacheError
from attnplug_vllm import facts, int8

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch import Tensor

    from attnplug import Requirements
    from attnplug.contract import CacheTensor, LoadedBackend

FORM: Final = "split"
"""The form of a KV cache in pages, in the contract's words: keys and values are views for themselves."""

_STATIC: Final[Any] = WeakIdKeyDictionary()
"""A layer's pool -> its tensors that belong to no block, by role."""


def in_pages(requirements: Requirements) -> bool:
    """Whether the KV cache of a layer has more tensors than keys and values of one dtype."""
    return requirements.kv_cache_dtype in int8.DTYPES


def backend_for(spec: Any, layers: Iterable[Any], kv_layout: str) -> LoadedBackend:
    """
    Return the backend of the layers whose pool vLLM describes, bound to a block size that it has.

    Args:
        spec: vLLM's description of a pool.
        layers: The layers that it may be of, with `requirements` and `selection`.
        kv_layout: The layout of all pools.

    Raises:
        CacheError: Layers of one description have pages of different sizes.
    """
    asked = {
        (layer.requirements.evolve(kv_cache_form=FORM, kv_layout=kv_layout), (layer.selection.id,))
        for layer in layers
        if (layer.num_kv_heads, layer.head_size) == (spec.num_kv_heads, spec.head_size)
        # Layers that vLLM leaves unquantized have other pages.
        and (spec.dtype != torch.int8 or in_pages(layer.requirements))
    }
    found = [_loaded(requirements, choice) for requirements, choice in sorted(asked, key=str)]
    if len({(page_bytes(one), one.agreement.block_size) for one in found}) != 1:
        raise CacheError(
            f"layers of {', '.join(sorted(one.id for one in found)) or 'no backend'} have one KV cache in vLLM",
            "their pages are of one size",
            "leave --kv-cache-dtype-skip-layers out, and choose one backend for all layers",
        )
    return found[0]


@lru_cache(maxsize=16)
def _loaded(requirements: Requirements, choice: facts.Choice) -> LoadedBackend:
    selection = facts.select(requirements, choice)
    sizes = selection.agreement.block_sizes
    if "block_size" not in requirements.late or sizes is None:
        return selection.load()
    return selection.bind(block_size=sizes.first()).load()


def page_bytes(backend: LoadedBackend) -> int:
    """Return the bytes of one block, gaps for alignment included."""
    return _layout(backend.cache_tensors(2))[1]


def paged_spec(spec: Any, backend: LoadedBackend) -> Any:
    """
    Return vLLM's description of a layer's pool, with pages as large as the backend's (0.32 and later).

    Args:
        spec: vLLM's, of any block size.
        backend: The layer's, of any block size: pages grow in proportion.
    """
    tokens = backend.agreement.block_size or 1
    per_token = -(-page_bytes(backend) // tokens)
    heads = spec.num_kv_heads if per_token % spec.num_kv_heads == 0 else 1
    return replace(spec, dtype=torch.int8, num_head_slots=heads, state_content_bytes=per_token // heads)


def page_views(pool: Tensor, backend: LoadedBackend) -> dict[str, Tensor]:
    """
    Return the tensors of a layer's KV cache, by role, in a pool of pages.

    A tensor without a block axis, such as static scales, belongs to no page. It is allocated here, once for a pool:
    layers that share one have the same, and graphs go on with it when a pool is bound again.

    Args:
        pool: What vLLM binds to the layer, its first axis the blocks, each of them one run of memory.
        backend: The layer's backend.

    Raises:
        CacheError: Blocks are no runs of memory, are too small, or begin where a tensor cannot.
    """
    blocks, step = pool.shape[0], pool.stride(0) * pool.element_size()
    room = prod(pool.shape[1:]) * pool.element_size()
    specs = backend.cache_tensors(blocks)
    places, needed = _layout(specs)
    start = pool.storage_offset() * pool.element_size()
    unit = max((spec.dtype.itemsize for spec in specs.values() if spec.block_axis is not None), default=1)
    if not _is_dense(pool[:1]) or room < needed or step % unit or pool.data_ptr() % unit:
        raise CacheError(
            f"vLLM's pool has blocks of {room} bytes, {step} bytes apart, of shape {tuple(pool.shape[1:])} and strides "
            f"{pool.stride()[1:]}",
            f"for {backend.id} a block is {needed} bytes or more in one run, and begins at a multiple of {unit} bytes",
            "leave VLLM_KV_CACHE_LAYOUT out, and choose the same backend for all layers",
        )
    memory, static = _bytes_of(pool), _STATIC.setdefault(pool, {})
    for role, spec in specs.items():
        if spec.block_axis is None and role not in static:
            static[role] = spec.allocate(pool.device)
    return {
        role: static[role]
        if spec.block_axis is None
        else _typed(memory, spec.dtype).as_strided(
            spec.shape,
            _strides(spec, step // spec.dtype.itemsize),
            (start + places[role]) // spec.dtype.itemsize,
        )
        for role, spec in specs.items()
    }


def _layout(specs: Mapping[str, CacheTensor]) -> tuple[dict[str, int], int]:
    """Return where each tensor begins in a page, in bytes, and the bytes of a page."""
    places: dict[str, int] = {}
    end, unit = 0, 1
    for role, spec in specs.items():
        if spec.block_axis is None:
            continue
        aligned = max(spec.dtype.itemsize, spec.alignment)
        unit = max(unit, aligned)
        places[role] = -(-end // aligned) * aligned
        elements = prod(size for axis, size in enumerate(spec.shape) if axis != spec.block_axis)
        end = places[role] + elements * spec.dtype.itemsize
    return places, -(-end // unit) * unit  # so that the next page is aligned too


def _strides(spec: CacheTensor, step: int) -> tuple[int, ...]:
    """Return the strides of a tensor whose blocks are `step` elements apart."""
    strides, dense = [0] * len(spec.shape), 1
    for axis in reversed(spec.stride_order):
        if axis == spec.block_axis:
            strides[axis] = step
        else:
            strides[axis] = dense
            dense *= spec.shape[axis]
    return tuple(strides)


def _is_dense(block: Tensor) -> bool:
    """Whether the axes of one block, in some order, are one run of memory."""
    expected = 1
    for stride, size in sorted(zip(block.stride()[1:], block.shape[1:], strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def _bytes_of(pool: Tensor) -> Tensor:
    """Return the whole memory that a pool is in, as bytes."""
    storage = pool.untyped_storage()
    if pool.is_meta:
        return torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
    # Whatever mode the caller is in: tensors of inference mode cannot be written outside of it.
    with torch.inference_mode(mode=False):
        return torch.empty(0, dtype=torch.uint8, device=pool.device).set_(storage, 0, (storage.nbytes(),), (1,))


def _typed(memory: Tensor, dtype: torch.dtype) -> Tensor:
    count = memory.numel() // dtype.itemsize * dtype.itemsize
    return memory[:count].view(dtype)
