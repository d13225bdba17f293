"""A kernel with what it was compiled for: a later call with like arguments goes straight to the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from attnplug.ops import Launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Kernel:
    """
    A function of `triton.jit`, whose arguments are tensors, strides, numbers and constants, in this order.

    Args:
        function: The function. Its numbers are not specialized; its strides are, on 1 and on multiples of 16.
    """

    def __init__(self, function: Any) -> None:
        self._function = function
        self._launches: dict[tuple[object, ...], Launch] = {}

    def run(
        self,
        programs: int,
        tensors: Sequence[Tensor],
        strides: Sequence[int],
        numbers: Sequence[float],
        constants: tuple[Any, ...],
        *,
        warps: int,
    ) -> None:
        """
        Run it.

        Args:
            programs: Programs of the grid; without any, nothing is run.
            tensors: All on one device.
            strides: Whole numbers that are fixed for tensors of a kind.
            numbers: Whole ones and others, of any value.
            constants: Compiled in.
            warps: Warps of a program.
        """
        if not programs:
            return
        device = tensors[0].device
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._run(programs, tensors, strides, numbers, constants, warps)
        else:
            self._run(programs, tensors, strides, numbers, constants, warps)

    def _run(
        self,
        programs: int,
        tensors: Sequence[Tensor],
        strides: Sequence[int],
        numbers: Sequence[float],
        constants: tuple[Any, ...],
        warps: int,
    ) -> None:
        places = [tensor.data_ptr() for tensor in tensors]
        likeness = (*((one.dtype, at % 16) for one, at in zip(tensors, places, strict=True)), *_kinds(strides))
        form = (tensors[0].device, warps, constants, likeness)
        launch = self._launches.get(form)
        if launch is None:
            launch = self._launches[form] = Launch(self._function, constants, num_warps=warps)
        if launch.is_compiled:
            launch.again((programs, 1, 1), *places, *strides, *numbers)  # type: ignore[arg-type] # floats are passed on
        else:
            launch.first((programs,), *tensors, *strides, *numbers)


def _kinds(strides: Sequence[int]) -> list[object]:
    return [1 if stride == 1 else stride % 16 == 0 for stride in strides]
