"""A kernel with what it was compiled for: a later call with like arguments goes straight to the driver."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

import torch

from attnplug.ops import Launch

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

_AS_IT_IS: Final = nullcontext()


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
        places = [tensor.data_ptr() for tensor in tensors]
        likeness = tuple((tensor.dtype, at % 16 == 0) for tensor, at in zip(tensors, places, strict=True))
        form = (tensors[0].device, warps, constants, likeness, *_kinds(strides))
        launch = self._launches.get(form)
        if launch is None:
            launch = self._launches[form] = Launch(self._function, constants, num_warps=warps)
        with _current(tensors[0].device):
            if launch.is_compiled:
                launch.again((programs, 1, 1), *places, *strides, *numbers)  # type: ignore[arg-type] # floats are passed on
            else:
                launch.first((programs,), *tensors, *strides, *numbers)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Launches go to the current device: another one is made current meanwhile."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _AS_IT_IS
    return torch.cuda.device(device)


def _kinds(strides: Sequence[int]) -> list[tuple[bool, bool]]:
    """What Triton looks at in a whole number: whether it is 1, and whether it is a multiple of 16."""
    return [(stride == 1, stride % 16 == 0) for stride in strides]
