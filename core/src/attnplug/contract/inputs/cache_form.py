"""
The forms of a KV cache: where the values of a block are in memory, seen from its keys.

Keys and values have the logical shape ``(num_blocks, block_size, num_kv_heads, size)`` in every form. Inside a block,
NHD keeps tokens before heads, and HND heads before tokens. After a block there may be memory of something else:
padding, or other layers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

import torch

from attnplug.contract.inputs.kv_cache import CacheSpec, fill_tensor, in_one_storage
from attnplug.errors import CacheError
from attnplug.request.domains import CACHE_FORMS, LATENT

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from attnplug.contract.inputs.kv_cache import CacheTensor

LAYOUTS: Final = ("NHD", "HND")

TENSOR_EACH: Final = frozenset({"split", "independent"})
"""The forms whose keys and values are a tensor each."""

_POOLS: Final = {
    "joint": "(2, num_blocks, {inner}, size)",
    "interleaved": "(num_blocks, 2, {inner}, size)",
    "packed": "(num_blocks, {inner}, head_size + head_size_v)",
    LATENT: "(num_blocks, block_size, head_size)",
}
_INNER: Final = {"NHD": "block_size, num_kv_heads", "HND": "num_kv_heads, block_size"}


def split_kv(
    pool: Tensor, form: str, kv_layout: str, head_size: int, head_size_v: int | None = None
) -> dict[str, Tensor]:
    """
    Return keys and values of a pool that an engine allocated as one tensor, as `LoadedBackend.bind_cache` takes them.

    Args:
        pool: Its axes are in the order of memory. Where NHD has ``block_size, num_kv_heads``, HND has ``num_kv_heads,
            block_size``::

                joint        (2, num_blocks, block_size, num_kv_heads, head_size), keys first
                interleaved  (num_blocks, 2, block_size, num_kv_heads, head_size), each block's keys first
                packed       (num_blocks, block_size, num_kv_heads, head_size + head_size_v), each row's key first
                latent       (num_blocks, block_size, head_size), each row's value the first part of its key;
                             of fp8_ds_mla in bytes: pass 656 and 512 as the sizes

            Strides are any: a slice of a pool of all layers is one of these too.
        form: One of these. A split KV cache is two tensors already, and so is an independent one.
        kv_layout: ``"NHD"`` or ``"HND"``.
        head_size: The size of a key head. Values of another size fit into the last axis of a packed pool only.
        head_size_v: The size of a value, where it is the first part of its key (latent).

    Returns:
        The roles ``"k"`` and ``"v"``, views of logical shape ``(num_blocks, block_size, num_kv_heads, size)``.

    Raises:
        CacheError: The pool does not have the axes of the form.
    """
    if form not in _POOLS or kv_layout not in LAYOUTS:
        raise CacheError(
            f"the views of a KV cache with form={form!r} and kv_layout={kv_layout!r} were requested",
            f"a pool of one tensor is {', '.join(_POOLS)}, and NHD or HND",
            "pass agreement.kv_cache_form and agreement.kv_layout; bind two tensors (split, independent) themselves",
        )
    if form == LATENT:
        if pool.ndim != 3 or pool.shape[2] != head_size or not 1 <= (head_size_v or head_size) <= head_size:
            _refuse_pool(pool, form, kv_layout, head_size)
        keys = pool.unsqueeze(2)
        return {"k": keys, "v": keys[..., :head_size_v]}
    if form == "packed":
        if pool.ndim != 4 or pool.shape[3] <= head_size:
            _refuse_pool(pool, form, kv_layout, head_size)
        keys, values = pool[..., :head_size], pool[..., head_size:]
    else:
        axis = 0 if form == "joint" else 1
        if pool.ndim != 5 or pool.shape[axis] != 2 or pool.shape[4] != head_size:
            _refuse_pool(pool, form, kv_layout, head_size)
        keys, values = pool.unbind(axis)
    heads_first = kv_layout == "HND"
    return {role: one.transpose(1, 2) if heads_first else one for role, one in (("k", keys), ("v", values))}


def _refuse_pool(pool: Tensor, form: str, kv_layout: str, head_size: int) -> NoReturn:
    raise CacheError(
        f"a pool of shape {tuple(pool.shape)} was given for a KV cache with form={form!r}, head_size={head_size}",
        f"with kv_layout={kv_layout!r} it is {_POOLS[form].format(inner=_INNER[kv_layout])}",
        "pass one layer's part of the pool, its axes in the order of memory",
    )


# --- machinery ---


def allocate_kv(spec: CacheSpec, num_blocks: int, device: torch.device) -> dict[str, Tensor]:
    """Return fresh keys and values of so many blocks, in the form of the spec, filled as its tensors say."""
    specs = [spec.tensors[role] for role in ("k", "v")]
    steps = [_strides(one, spec) for one in specs]
    sizes = [(num_blocks * step[0] * one.dtype.itemsize) for one, step in zip(specs, steps, strict=True)]
    first = specs[0].dtype.itemsize * specs[0].shape[3]
    if spec.form in TENSOR_EACH:
        memory = [_bytes(size, device) for size in sizes]
    else:
        # Values begin behind all keys, behind the keys of the first block, behind the first key, or with it.
        behind = -(-sizes[0] // _ALIGNMENT) * _ALIGNMENT
        block = _dense(specs[0]) * specs[0].dtype.itemsize
        start = {"joint": behind, "interleaved": block, "packed": first, LATENT: 0}[spec.form]
        whole = _bytes(behind + sizes[1] if spec.form == "joint" else sizes[0], device)
        memory = [whole, whole[start:]]
    views = {}
    for role, one, step, part in zip(("k", "v"), specs, steps, memory, strict=True):
        shape = (num_blocks, *one.shape[1:])
        count = part.numel() // one.dtype.itemsize * one.dtype.itemsize
        views[role] = part[:count].view(one.dtype).as_strided(shape, step)
        fill_tensor(views[role], one.fill)
    return views


IN_ONE_BLOCK: Final = ("interleaved", "packed", LATENT)
"""The forms whose blocks hold keys and values, of one dtype."""

_ALIGNMENT: Final = 256
"""Bytes: what allocators of devices align to, so that values begin as keys do."""


def _bytes(count: int, device: torch.device) -> Tensor:
    return torch.zeros(count, dtype=torch.uint8, device=device)


def _dense(one: CacheTensor) -> int:
    """Return the elements of one block of keys, or of values."""
    _, size, heads, width = one.shape
    return size * heads * width


def _strides(one: CacheTensor, spec: CacheSpec) -> tuple[int, int, int, int]:
    """Return the strides of keys or values in a form, with nothing between blocks."""
    _, size, heads, width = one.shape
    both = [spec.tensors[role] for role in ("k", "v")]
    if spec.form == "packed":
        width = sum(each.shape[3] for each in both)
    elif spec.form == LATENT:
        width = both[0].shape[3]
    inner = (heads * width, width) if spec.kv_layout == "NHD" else (width, size * width)
    if spec.form == LATENT:
        block = _dense(both[0])
    else:
        block = sum(map(_dense, both)) if spec.form in IN_ONE_BLOCK else _dense(one)
    return (block, *inner, 1)


def normal_strides(tensor: Tensor, one: CacheTensor, spec: CacheSpec) -> Tensor:
    """Return a view in which axes of one element have the strides of the form: what they are changes nothing."""
    expected = _strides(one, spec)
    sizes = zip(tensor.shape, tensor.stride(), expected, strict=True)
    strides = tuple(wanted if size == 1 else stride for size, stride, wanted in sizes)
    return tensor if strides == tensor.stride() else tensor.as_strided(tensor.shape, strides)


def misfits(spec: CacheSpec, keys: Tensor, values: Tensor) -> Iterator[str]:
    """Yield what keeps keys and values of the right shapes from being a KV cache in the form of a spec."""
    for role, tensor in (("k", keys), ("v", values)):
        one = spec.tensors[role]
        found, expected = normal_strides(tensor, one, spec).stride(), _strides(one, spec)
        if found[0] < expected[0] or found[1:] != expected[1:]:
            yield f"the strides of {role!r} are ({expected[0]} or more, {', '.join(map(str, expected[1:]))})"
    yield from _unequal(spec, keys, values)
    if spec.form not in TENSOR_EACH and not keys.is_meta:
        yield from _misplaced(spec, keys, values)


def _unequal(spec: CacheSpec, keys: Tensor, values: Tensor) -> Iterator[str]:
    """Yield where keys and values differ in strides that one set of them describes."""
    if spec.form == "independent":
        return
    key_one, value_one = spec.tensors["k"], spec.tensors["v"]
    steps = (normal_strides(keys, key_one, spec).stride(), normal_strides(values, value_one, spec).stride())
    if (key_one.shape, key_one.dtype) == (value_one.shape, value_one.dtype):
        if steps[0] != steps[1]:
            yield f"the strides of 'k' and of 'v' are equal, {max(steps)} for both, say"
    elif spec.form in IN_ONE_BLOCK and steps[0][0] != steps[1][0]:
        yield "the first strides of 'k' and of 'v' are equal: a block has both"


def _misplaced(spec: CacheSpec, keys: Tensor, values: Tensor) -> Iterator[str]:
    """Yield where values are to be, seen from their keys, if they are not there."""
    offset = values.data_ptr() - keys.data_ptr()
    of_keys, of_values = (_dense(spec.tensors[role]) * one.itemsize for role, one in (("k", keys), ("v", values)))
    step = keys.stride(0) * keys.itemsize
    first, last, where = {
        "joint": ((keys.shape[0] - 1) * step + of_keys, offset, "behind all keys"),
        "interleaved": (of_keys, step - of_values, "behind the keys of their block, before the next block"),
        "packed": (keys.shape[3] * keys.itemsize,) * 2 + ("right behind their key",),
        LATENT: (0, 0, "where their key begins"),
    }[spec.form]
    if not first <= offset <= last or not in_one_storage(keys, values):
        yield f"values are in the memory of the keys, {where}"


def forms_of(spec: CacheSpec, keys: Tensor, values: Tensor) -> list[tuple[str, str]]:
    """Return the forms and layouts of which keys and values of the right shapes are a KV cache, but for latents."""
    pairs = ((form, layout) for form in CACHE_FORMS for layout in LAYOUTS)
    return [pair for pair in pairs if not any(misfits(CacheSpec(*pair, spec.tensors), keys, values))]
