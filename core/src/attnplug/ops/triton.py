"""
Runs Triton kernels where there is Triton, and costs the host as little as that can cost.

Modules that define kernels import Triton, and are themselves imported in functions alone, once `triton_works` says so:
on a machine without it everything runs on plain torch.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

_log: Final = logging.getLogger("attnplug")

_STABLE: Final = (3, 6)
"""The Triton since which a compiled kernel takes the arguments of its source, constants included."""

_ASKS: Final = (3, 9)
"""The Triton since which a kernel should say whether products are fused with sums: it warns, and 3.10 fuses none."""


@cache
def triton_works() -> bool:
    """Whether kernels can be compiled for the devices of this process. Asked once; without a driver it is False."""
    if find_spec("triton") is None:
        return False
    try:
        import_module("triton").runtime.driver.active.get_current_target()
    except Exception as problem:  # noqa: BLE001 - a compiler or a driver may be missing in many ways, and none matters
        _log.warning("Triton is installed and does not work here (%s): cache writes take several launches", problem)
        return False
    return True


class Launch:
    """
    One kernel with its constants.

    The first launch goes through Triton, which looks at every argument and compiles. What it compiled is kept, and
    later launches go straight to the driver: whoever keeps a `Launch` sees to it that these have arguments of the same
    types, and pointers and numbers that are as divisible.
    """

    __slots__ = ("_compiled", "_constants", "_kernel", "_options")

    def __init__(self, kernel: Any, constants: tuple[Any, ...], **options: Any) -> None:
        self._kernel, self._constants, self._options = kernel, constants, options
        self._compiled: Any = None

    @property
    def is_compiled(self) -> bool:
        """Whether `again` may be called."""
        return self._compiled is not None

    def first(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Compile and run. The arguments are tensors and numbers."""
        compiled = self._kernel[grid](*arguments, *self._constants, **self._options, **_fusion())
        if _is_stable():
            self._compiled = compiled

    def again(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """
        Run what is compiled, on the current stream of the current device.

        Tensors are given by their addresses, descriptors as they are.
        """
        self._compiled[grid](*arguments, *self._constants)


class Kernel:
    """
    A function of `triton.jit`, compiled once for arguments that are alike; later launches go straight to the driver.

    Its arguments are tensor descriptors, tensors, strides, numbers and constants, in this order. Strides and numbers
    have annotations that say their types; numbers are not specialized.

    Args:
        function: The function.
    """

    def __init__(self, function: Any) -> None:
        self.function = function
        self._launches: dict[tuple[object, ...], Launch] = {}

    def run(
        self,
        programs: int,
        tensors: Sequence[Tensor],
        strides: Sequence[int],
        numbers: Sequence[float],
        constants: tuple[Any, ...],
        *,
        descriptors: Sequence[Any] = (),
        **options: Any,
    ) -> None:
        """
        Run it, on the current stream of the device of its tensors.

        Args:
            programs: Programs of the grid; without any, nothing is run.
            tensors: All on one device.
            strides: Whole numbers that are fixed for tensors of a kind; Triton specializes on 1 and on multiples of 16.
            numbers: Whole ones and others, of any value.
            constants: Compiled in.
            descriptors: Of Triton or of Gluon, each of a tensor on that device.
            options: As `num_warps`.
        """
        if not programs:
            return
        device = tensors[0].get_device()
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.run(programs, tensors, strides, numbers, constants, descriptors=descriptors, **options)
            return
        places = [tensor.data_ptr() for tensor in tensors]
        # Lists in tuples: with generators this would take the host a tenth longer.
        form = (
            device,
            constants,
            tuple([(described.base.dtype, *described.block_shape) for described in descriptors]),
            tuple([tensor.dtype for tensor in tensors]),
            tuple([place % 16 == 0 for place in places]),
            tuple(["one" if stride == 1 else stride % 16 == 0 for stride in strides]),
            tuple(options.items()),
        )
        launch = self._launches.get(form)
        if launch is None:
            launch = self._launches[form] = Launch(self.function, constants, **options)
        if launch.is_compiled:
            launch.again((programs, 1, 1), *descriptors, *places, *strides, *numbers)
        else:
            launch.first((programs,), *descriptors, *tensors, *strides, *numbers)


@cache
def _is_stable() -> bool:
    return _release() >= _STABLE


@cache
def _fusion() -> dict[str, bool]:
    return {"enable_fp_fusion": True} if _release() >= _ASKS else {}


def _release() -> tuple[int, ...]:
    version = str(import_module("triton").__version__)
    return tuple(int(part) for part in version.split(".")[:2])
