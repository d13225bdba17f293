"""KV caches: dtypes, the tensors of a layer's cache, and views that a layer derives from them."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, TypeAlias, TypeVar
from weakref import ref

import torch
from attrs import field, frozen
from torch import Tensor

from attnplug.errors import CacheError, PluginContractError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = MappingProxyType(
    {
        "float64": torch.float64,
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "fp8_e4m3": torch.float8_e4m3fn,
        "fp8_e5m2": torch.float8_e5m2,
        "int8": torch.int8,
    }
)
"""Every canonical name that is one torch dtype. For others (``int8_k``) the plugin lays out its own cache."""


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


Cache: TypeAlias = Tensor | Mapping[str, Tensor]
"""A layer's cache: the tensor, or a mapping of roles to tensors where there are several."""


@frozen
class CacheTensor:
    """
    One tensor of a layer's cache.

    The logical shape is the same whatever the order in memory: HND is NHD with another stride order, and kernels and
    tests index both alike.

    Attributes:
        shape: Logical shape.
        dtype: Its dtype.
        block_axis: The axis that counts blocks; None for tensors that belong to no block (static scales).
        stride_order: Logical axes from the slowest to the fastest in memory; default the axes in order.
        fill: The value of a fresh tensor.
        layer_stride_order: The order with a leading layer axis (axis 0 is the layer), for hosts that keep all layers in
            one tensor; default layers slowest.
        block_padding: Elements left unused after each block, for hosts that need equal page sizes across groups.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    block_axis: int | None
    stride_order: tuple[int, ...] = field()
    fill: float = 0.0
    layer_stride_order: tuple[int, ...] = field()
    block_padding: int = 0

    @stride_order.default
    def _in_order(self) -> tuple[int, ...]:
        return tuple(range(len(self.shape)))

    @layer_stride_order.default
    def _layers_slowest(self) -> tuple[int, ...]:
        return (0, *(axis + 1 for axis in self.stride_order))

    def __attrs_post_init__(self) -> None:
        axes = len(self.shape)
        _check_order("stride_order", self.stride_order, axes)
        _check_order("layer_stride_order", self.layer_stride_order, axes + 1)
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
        fill = torch.tensor(self.fill).to(self.dtype)
        if is_narrow_float(self.dtype):
            storage = torch.full((elements,), int(fill.view(torch.uint8)), dtype=torch.uint8, device=device)
        else:
            storage = torch.full((elements,), fill.item(), dtype=self.dtype, device=device)
        storage = storage.view(self.dtype)
        return storage.as_strided(self.shape, strides)

    def view(self, storage: Tensor) -> Tensor:
        """
        Return the tensor over memory that a host owns, laid out in `stride_order`. Its values are those of the memory.

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

    def with_layers(self, num_layers: int) -> CacheTensor:
        """Return the tensor that holds this one for every layer: ``tensor[layer]`` is a layer's cache."""
        return CacheTensor(
            (num_layers, *self.shape),
            self.dtype,
            None if self.block_axis is None else self.block_axis + 1,
            self.layer_stride_order,
            self.fill,
            block_padding=self.block_padding,
        )

    def is_ordered(self, tensor: Tensor) -> bool:
        """Whether a tensor of this shape is laid out in memory as described, alone or as one layer of `with_layers`."""
        layered = tuple(axis - 1 for axis in self.layer_stride_order if axis > 0)
        return any(_is_descending(tensor, order) for order in {self.stride_order, layered})

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


_V = TypeVar("_V")


class CacheViews(Generic[_V]):
    """
    Keeps what a layer derives from its cache tensor: each view takes a microsecond of the host, call after call.

    What is kept is made anew for another tensor, and for the same one at another address, or in another form. It
    keeps no memory: when the tensor goes, it goes too. Only where the memory of a tensor that stays is exchanged
    (`Tensor.set_`, ``tensor.data = ...``) is the old memory held, until the next call.

    Threads may call a layer at once, each with its own cache. A copy, or what was pickled, starts with nothing kept.

    Args:
        make: Returns views of a cache tensor, and holds on to nothing else of it. It gets an alias, not the tensor
            itself, which views would keep alive.
    """

    def __init__(self, make: Callable[[Tensor], _V]) -> None:
        self._make = make
        # One object, as another thread may come in between two: views of one cache are never found with another's form.
        self._kept: tuple[ref[Tensor], tuple[object, ...], _V] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """Views that are copied deeply are memory of their own, which no layer of the cache would read."""
        return type(self), (self._make,)

    def of(self, kv_cache: Tensor) -> _V:
        """
        Return the views of a cache.

        Args:
            kv_cache: A tensor of `Backend.make_cache`, checked, as `AttentionImpl.run` gets it.
        """
        form, kept = (kv_cache.data_ptr(), kv_cache.shape, kv_cache.stride()), self._kept
        if kept is not None and kept[0]() is kv_cache and form == kept[1]:
            return kept[2]
        with outside_inference_mode():
            views = self._make(kv_cache.detach())
        self._kept = ref(kv_cache, self._forget), form, views
        return views

    def _forget(self, gone: ref[Tensor]) -> None:
        kept = self._kept
        if kept is not None and kept[0] is gone:
            self._kept = None


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


def device_of(cache: Cache) -> torch.device | None:
    """Return where a cache is; None for an empty mapping."""
    if isinstance(cache, Tensor):
        return cache.device
    return next((tensor.device for tensor in cache.values()), None)


def tensor_of(cache: Cache, role: str) -> Tensor:
    """Return the tensor of a role; a cache of one role is that tensor itself."""
    return cache if isinstance(cache, Tensor) else cache[role]


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
