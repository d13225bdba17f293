"""The tensors of a layer's KV cache: their logical shape, their order in memory, and moving whole blocks."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Union

import torch
from attrs import evolve, field, frozen
from torch import Tensor

if TYPE_CHECKING:
    from typing_extensions import TypeAlias

Cache: TypeAlias = Union[Tensor, Mapping[str, Tensor]]
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

    shape: tuple[int, ...] = field(converter=tuple)
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
