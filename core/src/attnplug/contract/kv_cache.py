"""The tensors of a layer's KV cache: their logical shape, their order in memory, and moving whole blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from attrs import field, frozen
from torch import Tensor

from attnplug.contract.guards.wording import describe
from attnplug.errors import CacheError, PluginContractError

Cache: TypeAlias = Tensor | Mapping[str, Tensor]
"""A layer's cache: the tensor, or a mapping of roles to tensors where there are several."""


@frozen
class CacheTensor:
    """
    One tensor of a layer's cache.

    The logical shape is the same whatever the order in memory: HND is NHD with another stride order, and kernels and tests index both alike.

    Attributes:
        shape: Logical shape.
        dtype: Its dtype.
        block_axis: The axis that counts blocks; None for tensors that belong to no block (static scales).
        stride_order: Logical axes from the slowest to the fastest in memory; default the axes in order.
        fill: The value of a fresh tensor.
        layer_stride_order: The order with a leading layer axis (axis 0 is the layer), for hosts that keep all layers in one tensor; default layers slowest.
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
        if self.block_padding < 0 or (self.block_padding and self.block_axis is None):
            raise PluginContractError(
                f"block_padding={self.block_padding} was given with block_axis={self.block_axis}",
                "padding is a number of elements after each block",
                "leave it 0 for a tensor that has no blocks",
            )

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor, padding included."""
        return self._physical()[1] * self.dtype.itemsize

    def allocate(self, device: torch.device | str) -> Tensor:
        """Return a fresh tensor of the logical shape, laid out in `stride_order` and filled with `fill`."""
        strides, elements = self._physical()
        storage = (
            torch.full((elements,), self.fill, dtype=torch.float32, device=device).to(self.dtype)
            if _is_narrow(self.dtype)
            else None
        )
        if storage is None:
            storage = torch.full((elements,), self.fill, dtype=self.dtype, device=device)
        return storage.as_strided(self.shape, strides)

    def with_layers(self, num_layers: int) -> CacheTensor:
        """Return the tensor that holds this one for every layer, the layer axis first; ``tensor[layer]`` is a layer's cache."""
        return CacheTensor(
            (num_layers, *self.shape),
            self.dtype,
            None if self.block_axis is None else self.block_axis + 1,
            self.layer_stride_order,
            self.fill,
            block_padding=self.block_padding,
        )

    def is_ordered(self, tensor: Tensor) -> bool:
        """Whether a tensor of this shape lies in memory as described, alone or as one layer of `with_layers`."""
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
    if _is_narrow(spec.dtype):  # moved as bytes: not every device indexes 8-bit floats
        src, dst = src.view(torch.uint8), dst.view(torch.uint8)
    blocks = src.index_select(spec.block_axis, pairs[:, 0].to(src.device))
    dst.index_copy_(spec.block_axis, pairs[:, 1].to(dst.device), blocks.to(dst.device))


def to_pairs(pairs: Mapping[int, Sequence[int]] | Tensor | Sequence[tuple[int, int]]) -> Tensor:
    """
    Return ``(n, 2)`` int64 pairs of source and destination block on the CPU.

    Args:
        pairs: Such pairs, or the destinations of each source.

    Raises:
        CacheError: They are not pairs of whole numbers, or a block is the destination of two sources.
    """
    if isinstance(pairs, Mapping):
        pairs = [(source, destination) for source, several in pairs.items() for destination in several]
    tensor = pairs if isinstance(pairs, Tensor) else torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2)
    if tensor.ndim != 2 or tensor.shape[1] != 2 or tensor.dtype not in (torch.int32, torch.int64):
        raise CacheError(
            f"block pairs of {describe(tensor)} were given",
            "they are (n, 2) int64: source and destination block",
            "pass [(source, destination), ...]",
        )
    tensor = tensor.to("cpu", torch.int64)
    targets = tensor[:, 1].sort().values
    twice = targets[1:][targets.diff() == 0]
    if twice.numel():
        raise CacheError(
            f"block {int(twice[0])} was given as the destination of several sources",
            "a block holds one block's values",
            "give each destination one source",
        )
    return tensor


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


def _check_order(name: str, order: tuple[int, ...], axes: int) -> None:
    if sorted(order) != list(range(axes)):
        raise PluginContractError(
            f"{name}={order} was given",
            f"it names each of the {axes} axes once",
            f"{tuple(range(axes))} keeps them in order",
        )


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize == 1


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
