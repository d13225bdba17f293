"""KV caches in memory that the host owns: the second layer of a pool whose blocks hold two layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from attnplug.contract import CacheTensor, KVCache, LoadedBackend

_LAYERS: Final = 2
_WHOLE_NUMBERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POISON: Final = 0xFF
"""Every float of these bytes is NaN: who reads past a block without its stride shows it."""


def bind_pool(backend: LoadedBackend, num_blocks: int, device: torch.device | str) -> KVCache:
    """
    Return a KV cache of a backend over a fresh pool, in the form and the layout of the agreement.

    The first layer of the pool belongs to nobody: it holds NaN, and `untouched` says whether it still does. Kernels
    whose blocks have to follow each other get memory without another layer.
    """
    specs = backend.cache_tensors(num_blocks)
    if any(spec.contiguous_blocks for spec in specs.values()):
        return backend.make_cache(num_blocks, device)
    pool = {role: _further(spec, num_blocks, device) for role, spec in specs.items() if role not in ("k", "v")}
    keys, values = specs["k"], specs["v"]
    make = {
        "joint": _apart,
        "split": _apart,
        "interleaved": _interleaved,
        "packed": _packed,
        "independent": _independent,
        "latent": _latent,
    }
    form, heads_first = backend.agreement.kv_cache_form or "joint", backend.agreement.kv_layout == "HND"
    pair = make[form](keys, values, device, in_one=form == "joint", heads_first=heads_first)
    views = (one.transpose(1, 2) if heads_first else one for one in pair)
    cache = backend.bind_cache({**dict(zip(("k", "v"), views, strict=True)), **pool})
    for role, spec in specs.items():  # as in a fresh KV cache
        _as_bytes(cache[role]).copy_(_as_bytes(spec.allocate(device)))
    return cache


def untouched(cache: KVCache) -> bool:
    """Whether the memory between the blocks of a KV cache of `bind_pool` holds what it held at first."""
    masks = [torch.zeros_like(memory) for memory in cache.storages]
    for tensor in cache.over(masks).tensors.values():
        tensor.view(_WHOLE_NUMBERS[tensor.itemsize]).fill_(-1)
    return all(bool((memory[mask == 0] == _POISON).all()) for memory, mask in zip(cache.storages, masks, strict=True))


def _memory(count: int, device: torch.device | str) -> Tensor:
    return torch.full((count,), _POISON, dtype=torch.uint8, device=device)


def _inner(spec: CacheTensor, *, heads_first: bool) -> tuple[int, int, int]:
    """Return the axes of a block in the order of memory."""
    _, size, heads, width = spec.shape
    return (heads, size, width) if heads_first else (size, heads, width)


def _further(spec: CacheTensor, num_blocks: int, device: torch.device | str) -> Tensor:
    if spec.block_axis != 0 or spec.stride_order != tuple(range(len(spec.shape))):
        return spec.allocate(device)
    memory = _memory(_LAYERS * spec.nbytes, device).view(spec.dtype)
    return memory.view(num_blocks, _LAYERS, *spec.shape[1:])[:, 1]


def _apart(
    keys: CacheTensor, values: CacheTensor, device: torch.device | str, *, in_one: bool, heads_first: bool
) -> list[Tensor]:
    """Return keys and values ``(num_blocks, *inner)``, in one memory or in two."""
    sizes = [_LAYERS * spec.nbytes for spec in (keys, values)]
    parts = torch.split(_memory(sum(sizes), device), sizes) if in_one else [_memory(size, device) for size in sizes]
    return [
        part.view(spec.dtype).view(spec.shape[0], _LAYERS, *_inner(spec, heads_first=heads_first))[:, 1]
        for spec, part in zip((keys, values), parts, strict=True)
    ]


def _independent(
    keys: CacheTensor, values: CacheTensor, device: torch.device | str, *, in_one: bool, heads_first: bool
) -> list[Tensor]:
    """Return keys with another layer between their blocks, and dense values."""
    spaced, _ = _apart(keys, values, device, in_one=in_one, heads_first=heads_first)
    dense = _memory(values.nbytes, device).view(values.dtype)
    return [spaced, dense.view(values.shape[0], *_inner(values, heads_first=heads_first))]


def _interleaved(
    keys: CacheTensor, values: CacheTensor, device: torch.device | str, *, in_one: bool, heads_first: bool
) -> list[Tensor]:
    del in_one
    memory = _memory(_LAYERS * (keys.nbytes + values.nbytes), device).view(keys.dtype)
    blocks, sizes = keys.shape[0], [spec.nbytes // spec.dtype.itemsize // spec.shape[0] for spec in (keys, values)]
    parts = torch.split(memory.view(blocks, _LAYERS, sum(sizes))[:, 1], sizes, dim=1)
    inner = [_inner(spec, heads_first=heads_first) for spec in (keys, values)]
    return [torch.unflatten(part, 1, axes) for part, axes in zip(parts, inner, strict=True)]


def _packed(
    keys: CacheTensor, values: CacheTensor, device: torch.device | str, *, in_one: bool, heads_first: bool
) -> list[Tensor]:
    del in_one
    memory = _memory(_LAYERS * (keys.nbytes + values.nbytes), device).view(keys.dtype)
    outer, widths = _inner(keys, heads_first=heads_first)[:2], [keys.shape[3], values.shape[3]]
    return list(torch.split(memory.view(keys.shape[0], _LAYERS, *outer, sum(widths))[:, 1], widths, dim=-1))


def _latent(
    keys: CacheTensor, values: CacheTensor, device: torch.device | str, *, in_one: bool, heads_first: bool
) -> list[Tensor]:
    del in_one
    memory = _memory(_LAYERS * keys.nbytes, device).view(keys.dtype)
    latents = memory.view(keys.shape[0], _LAYERS, *_inner(keys, heads_first=heads_first))[:, 1]
    return [latents, latents[..., : values.shape[3]]]


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor
