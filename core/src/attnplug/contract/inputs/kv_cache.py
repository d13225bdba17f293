"""KV caches: dtypes, the tensors that a backend describes, and a layer's KV cache as implementations get it."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

import torch
from attrs import field, frozen
from torch import Tensor

from attnplug.errors import CacheError, PluginContractError
from attnplug.request.domains import FP8_DS_MLA, LATENT
from attnplug.request.tables import read_only

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
        "float64": torch.float64,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        FP8_DS_MLA: torch.uint8,
        "int8_per_token_head": torch.int8,
        "fp8_per_token_head": torch.float8_e4m3fn,
        "int8": torch.int8,
    }
)
"""
Every canonical name that is one torch dtype; records (``fp8_ds_mla``) are bytes. For others (``int8_k``) the plugin
lays out its own cache.
"""


def torch_dtype(name: str) -> torch.dtype:
    """
    Return the torch dtype of a canonical dtype name.

    Raises:
        PluginContractError: The name means more than one tensor format.
    """
    if name not in TORCH_DTYPES:
        raise PluginContractError(
            f"the dtype {name!r} was agreed on, and no torch dtype has that name",
            f"the names that are one torch dtype are {', '.join(TORCH_DTYPES)}",
            "override Backend.cache_tensors (for a cache) or AttentionImpl.output_dtype (for an output)",
        )
    return TORCH_DTYPES[name]


@frozen
class CacheTensor:
    """
    One tensor of a layer's KV cache.

    The logical shape is the same whatever the order in memory: HND is NHD with another stride order, and kernels and
    tests index both alike. Of keys and values, the agreed form says where each block is (`attnplug.contract.split_kv`).

    Attributes:
        shape: Logical shape.
        dtype: Its dtype.
        block_axis: The axis that counts blocks; None for tensors that belong to no block (static scales).
        stride_order: Logical axes from the slowest to the fastest in memory; default the axes in order.
        fill: The value of a fresh tensor.
        block_padding: Elements left unused after each block, for hosts that need equal page sizes across groups.
        alignment: Bytes of which the address and every stride but the last are multiples, for kernels that load several
            elements at once.
        contiguous_blocks: Whether each block begins where the one before it ends, for kernels that compute its place
            from its number. Otherwise a host may leave any room between them.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    block_axis: int | None
    stride_order: tuple[int, ...] = field()
    fill: float = 0.0
    block_padding: int = 0
    alignment: int = 1
    contiguous_blocks: bool = False

    @stride_order.default
    def _in_order(self) -> tuple[int, ...]:
        return tuple(range(len(self.shape)))

    def __attrs_post_init__(self) -> None:
        axes = len(self.shape)
        _check_order("stride_order", self.stride_order, axes)
        if self.block_axis is not None and not 0 <= self.block_axis < axes:
            raise PluginContractError(
                f"block_axis={self.block_axis} was given for a cache tensor of {axes} axes",
                f"it is an axis from 0 to {axes - 1}, or None",
                "name the axis of shape that counts blocks",
            )
        if self.block_padding < 0 or (self.block_padding and self.block_axis in (None, self.stride_order[-1])):
            raise PluginContractError(
                f"block_padding={self.block_padding} was given with block_axis={self.block_axis}",
                "padding is a number of elements after each block, which is contiguous in memory",
                "leave it 0 for a tensor without a block axis, or whose block axis is the fastest",
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, padding included."""
        return self._physical()[1] * self.dtype.itemsize

    def allocate(self, device: torch.device | str) -> Tensor:
        """Return a fresh tensor of the logical shape, laid out in `stride_order` and filled with `fill`."""
        strides, elements = self._physical()
        storage = torch.zeros(elements * self.dtype.itemsize, dtype=torch.uint8, device=device)
        tensor = storage.view(self.dtype).as_strided(self.shape, strides)
        fill_tensor(tensor, self.fill)
        return tensor

    def view(self, storage: Tensor) -> Tensor:
        """
        Return the tensor over memory that an engine owns, laid out in `stride_order`. It has the memory's values.

        Args:
            storage: ``(nbytes or more,)`` uint8, contiguous, at an address that suits the dtype.

        Raises:
            CacheError: It is something else.
        """
        strides, elements = self._physical()
        if storage.dtype != torch.uint8 or storage.ndim != 1 or storage.stride(0) != 1 or storage.numel() < self.nbytes:
            raise CacheError(
                f"memory of shape {tuple(storage.shape)} and {storage.dtype} was given for a cache tensor",
                f"it is ({self.nbytes} or more,) uint8, contiguous",
                "pass a slice of raw memory: torch.empty(nbytes, dtype=torch.uint8)",
            )
        return storage[: elements * self.dtype.itemsize].view(self.dtype).as_strided(self.shape, strides)

    def is_ordered(self, tensor: Tensor) -> bool:
        """Whether a tensor of this shape is laid out in memory as described, whatever is between its blocks."""
        return _is_descending(tensor, self.stride_order)

    def is_aligned(self, tensor: Tensor) -> bool:
        """Whether the address and the strides of a tensor are multiples of `alignment` bytes."""
        places = [tensor.data_ptr()]
        places += [
            stride * tensor.itemsize
            for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
            if size > 1 and stride > 1
        ]
        return not any(place % self.alignment for place in places)

    def _physical(self) -> tuple[tuple[int, ...], int]:
        """Strides of the logical axes, and the elements of the storage."""
        strides = [0] * len(self.shape)
        step = 1
        for axis in reversed(self.stride_order):
            if axis == self.block_axis:
                step += self.block_padding
            strides[axis] = step
            step *= self.shape[axis]
        return tuple(strides), step


def is_narrow_float(dtype: torch.dtype) -> bool:
    """Whether a dtype is an 8-bit float: not every device fills or indexes those, so they are handled as bytes."""
    return dtype.is_floating_point and dtype.itemsize == 1


def fill_tensor(tensor: Tensor, fill: float) -> None:
    """Fill a fresh tensor of zeros."""
    if fill == 0.0:
        return
    value = torch.tensor(fill).to(tensor.dtype)
    if is_narrow_float(tensor.dtype):
        tensor.view(torch.uint8).fill_(int(value.view(torch.uint8)))
    else:
        tensor.fill_(value.item())


@frozen
class CacheSpec:
    """
    What the KV caches of an agreement are: one that was checked against an equal spec fits.

    Attributes:
        form: The agreed form.
        kv_layout: The agreed layout.
        tensors: The tensors by role, of 2 blocks.
    """

    form: str
    kv_layout: str
    tensors: dict[str, CacheTensor]

    @property
    def stored(self) -> dict[str, CacheTensor]:
        """The tensors without those that are part of another: the values of latents are in their keys."""
        return {role: one for role, one in self.tensors.items() if role != "v" or self.form != LATENT}


def _read_only(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return read_only(tensors)


@frozen(eq=False, repr=False)
class KVCache:
    """
    One layer's KV cache: views of memory that an engine owns, checked once (`bind_cache`, `make_cache`).

    Attributes:
        tensors: The views by role: ``"k"``, ``"v"``, and what else the backend describes.
        num_blocks: Blocks, the null block 0 included.
        spec: What they were checked against.
        k: The keys, ``(num_blocks, block_size, num_kv_heads, head_size)``, with the strides of the host's memory. Of
            fp8_ds_mla the last axis is the 656 bytes of a record, uint8.
        v: The values, likewise; of fp8_ds_mla the 512 codes at the beginning of each record.
        device: Where all of them are.
        storages: Each memory that a tensor is in, once, as bytes: what compiled graphs are given.
        places: Where these memories are.
        spans: The first address of each, and the first behind it.
        handle: The number by which graphs name it, as long as it lives.
        is_inference: Whether a tensor was made in inference mode.
        requires_grad: Whether a tensor requires a gradient.
    """

    tensors: Mapping[str, Tensor] = field(converter=_read_only)
    num_blocks: int
    spec: CacheSpec
    k: Tensor = field(init=False)
    v: Tensor = field(init=False)
    device: torch.device = field(init=False)
    storages: tuple[Tensor, ...] = field(init=False)
    places: tuple[int, ...] = field(init=False)
    spans: tuple[tuple[int, int], ...] = field(init=False)
    handle: int = field(init=False)
    is_inference: bool = field(init=False)
    requires_grad: bool = field(init=False)

    def __attrs_post_init__(self) -> None:
        put, tensors = object.__setattr__, tuple(self.tensors.values())  # of a frozen class
        put(self, "k", self.tensors["k"])
        put(self, "v", self.tensors["v"])
        put(self, "device", self.k.device)
        put(self, "storages", tuple({id(one): one for one in map(storage_of, tensors)}.values()))
        put(self, "places", tuple(one.data_ptr() for one in self.storages))
        put(
            self,
            "spans",
            tuple((start, start + one.nbytes) for start, one in zip(self.places, self.storages, strict=True)),
        )
        put(self, "handle", next(_handles))
        put(self, "is_inference", any(tensor.is_inference() for tensor in tensors))
        put(self, "requires_grad", any(tensor.requires_grad for tensor in tensors))
        _caches[self.handle] = self

    def __repr__(self) -> str:
        roles = ", ".join(self.tensors)
        return f"KVCache({self.num_blocks} blocks, {self.spec.form} {self.spec.kv_layout}, {roles} on {self.device})"

    def __getitem__(self, role: str) -> Tensor:
        return self.tensors[role]

    def __contains__(self, role: object) -> bool:
        return role in self.tensors

    @property
    def form(self) -> str:
        """The agreed form: a member of `attnplug.request.domains.CACHE_FORMS`, or ``"latent"``."""
        return self.spec.form

    def over(self, storages: Sequence[Tensor]) -> KVCache:
        """
        Return the KV cache in the given memories, in place of its own.

        Functionalization may clone what a graph writes, and copy it back later: an op writes what it was given.
        """
        if all(new.data_ptr() == place for new, place in zip(storages, self.places, strict=True)):
            return self
        moved = {id(old): new for old, new in zip(self.storages, storages, strict=True)}
        views = {
            role: moved[id(storage_of(tensor))]
            .view(tensor.dtype)
            .as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            for role, tensor in self.tensors.items()
        }
        return KVCache(views, self.num_blocks, self.spec)


_handles: Final = count(1)
_caches: Final[WeakValueDictionary[int, KVCache]] = WeakValueDictionary()
# Layers of one pool name one tensor: a graph would take two of the same memory for tensors that alias.
_storages: Final[WeakValueDictionary[tuple[int, int, torch.device], Tensor]] = WeakValueDictionary()


def cache_of(handle: int, storages: Sequence[Tensor]) -> KVCache:
    """
    Return the KV cache that a compiled graph names, in the memories that it was given.

    Raises:
        CacheError: It was garbage-collected.
    """
    cache = _caches.get(handle)
    if cache is None:
        raise CacheError(
            f"KV cache number {handle} was used by a compiled graph",
            "it has been garbage-collected",
            "keep the KV caches as long as the graphs, and compile again for new ones",
        )
    return cache.over(storages)


def storage_of(tensor: Tensor) -> Tensor:
    """Return the whole memory that a tensor is in, ``(bytes,)`` uint8: one object for all tensors in it."""
    storage = tensor.untyped_storage()
    key = (storage.data_ptr(), storage.nbytes(), tensor.device)
    known = _storages.get(key) if key[0] else None
    if known is None:
        with outside_inference_mode():
            known = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            known.set_(storage, 0, (storage.nbytes(),), (1,))
        if key[0]:
            _storages[key] = known
    return known


# --- machinery ---


@contextmanager
def outside_inference_mode() -> Iterator[None]:
    """
    Make plain tensors inside this context, whatever mode the caller is in.

    Tensors that are made under `torch.inference_mode` cannot be written outside of it: a host that captures under it
    could not build a replay without it.
    """
    with torch.inference_mode(mode=False), torch.no_grad():
        yield


def autocast_type_of(device: torch.device) -> str:
    """Return the device type whose ``torch.autocast`` applies to a device; the CPU's for types that have none."""
    return device.type if torch.amp.is_autocast_available(device.type) else "cpu"


def outside_autocast(device: torch.device) -> torch.autocast:
    """Keep the dtype of tensors inside this context, which autocast would round for products."""
    return torch.autocast(autocast_type_of(device), enabled=False)


def in_one_storage(one: Tensor, other: Tensor) -> bool:
    """Whether the memory that two tensors are parts of is the same somewhere. Tensors of the device meta have none."""
    storage, other_storage = one.untyped_storage(), other.untyped_storage()
    start, other_start = storage.data_ptr(), other_storage.data_ptr()
    if not (start and other_start):
        return False
    return start < other_start + other_storage.nbytes() and other_start < start + storage.nbytes()


def _check_order(name: str, order: tuple[int, ...], axes: int) -> None:
    if sorted(order) != list(range(axes)):
        raise PluginContractError(
            f"{name}={order} was given",
            f"it names each of the {axes} axes once",
            f"{tuple(range(axes))} keeps them in order",
        )


def _is_descending(tensor: Tensor, order: tuple[int, ...]) -> bool:
    """Whether the axes follow each other in memory in this order without overlap, the last one dense."""
    needed = 1
    for place, axis in enumerate(reversed(order)):
        size, stride = tensor.shape[axis], tensor.stride(axis)
        if size == 1:
            continue
        if stride < needed or (place == 0 and stride != 1):
            return False
        needed = stride * size
    return True
