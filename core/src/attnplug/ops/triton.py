"""
Launches Triton kernels with little host time.

Modules that define kernels import Triton, and are imported by `triton_function` only: without Triton, everything runs
on plain torch.
"""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import torch

from attnplug._foreign import ForeignCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

_log: Final = logging.getLogger("attnplug")

_STABLE: Final = (3, 6)
"""From this release on, a compiled kernel takes the arguments of its source, constants included."""

_NAMES_FUSION: Final = (3, 9)
"""From this release on, a kernel should name whether products are fused with sums: it warns, and 3.10 fuses none."""


@cache
def triton_works() -> bool:
    """Whether kernels can be compiled for the devices of this process: checked once, and False without a driver."""
    if find_spec("triton") is None:
        return False
    with ForeignCode("Triton is installed and does not work here:") as code:
        import_module("triton").runtime.driver.active.get_current_target()
    if code.error is not None:  # a compiler or a driver is missing: torch takes over
        _log.warning("%s; KV-cache writes take several launches", code.problem)
    return code.error is None


@cache
def triton_function(module: str, name: str) -> Callable[..., Any] | None:
    """Return a function of a module that defines kernels, which is imported here; None where Triton does not work."""
    return getattr(import_module(module), name) if triton_works() else None


class Launch:
    """
    A kernel with its constants.

    The first launch goes through Triton, which inspects every argument and compiles. Later launches go straight to the
    driver: the caller guarantees that their arguments have the same types, and pointers and numbers the same
    divisibility. On AMD GPUs every launch goes through Triton: it compiles 32-bit offsets where a tensor's memory
    allows them.
    """

    __slots__ = ("_compiled", "_constants", "_kernel", "_options")

    def __init__(self, kernel: Any, constants: tuple[Any, ...], **options: Any) -> None:
        self._kernel, self._constants, self._options = kernel, constants, options
        self._compiled: Any = None

    @property
    def is_compiled(self) -> bool:
        """Whether `again` may be called: after `first`, if the release of Triton allows it."""
        return self._compiled is not None

    def first(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Compile and run. Arguments are tensors and numbers."""
        compiled = self._kernel[grid](*arguments, *self._constants, **self._options, **_fusion())
        if _is_stable():
            self._compiled = compiled

    def again(self, grid: tuple[int, int, int], *arguments: Any) -> None:
        """
        Run the compiled kernel on the current stream of the current device.

        Tensors are passed as addresses, tensor descriptors as they are.
        """
        self._compiled[grid](*arguments, *self._constants)


class Kernel:
    """
    A function of `triton.jit`, compiled once per kind of arguments; later launches go straight to the driver.

    Its arguments are tensor descriptors, tensors, strides, numbers and constants, in this order. Strides and numbers
    are annotated with their types; numbers are not specialized.

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
        Run it on the current stream of the device of its tensors.

        Args:
            programs: Programs of the grid; nothing is launched for 0.
            tensors: Tensors on one device.
            strides: Integers on which Triton specializes: 1, and multiples of 16.
            numbers: Integers and floats of any value.
            constants: Constants that are compiled in.
            descriptors: Tensor descriptors of Triton or Gluon, on the same device.
            options: Options of the launch, such as `num_warps`.
        """
        if not programs:
            return
        device = tensors[0].get_device()
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                self.run(programs, tensors, strides, numbers, constants, descriptors=descriptors, **options)
            return
        places = [tensor.data_ptr() for tensor in tensors]
        # Tuples of lists: generators would take a tenth more host time.
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
    return _release() >= _STABLE and torch.version.hip is None


@cache
def _fusion() -> dict[str, bool]:
    return {"enable_fp_fusion": True} if _release() >= _NAMES_FUSION else {}


def _release() -> tuple[int, ...]:
    version = str(import_module("triton").__version__)
    return tuple(int(part) for part in version.split(".")[:2])
