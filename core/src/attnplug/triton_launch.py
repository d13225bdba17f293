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
from typing import Any, Final

_log: Final = logging.getLogger("attnplug")

_STABLE: Final = (3, 6)
"""The Triton since which a compiled kernel takes the arguments of its source, constants included."""


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
        compiled = self._kernel[grid](*arguments, *self._constants, **self._options)
        if _is_stable():
            self._compiled = compiled

    def again(self, grid: tuple[int, int, int], *arguments: int) -> None:
        """Run what is compiled, on the current stream of the current device. Tensors are given by their addresses."""
        self._compiled[grid](*arguments, *self._constants)


@cache
def _is_stable() -> bool:
    version = str(import_module("triton").__version__)
    return tuple(int(part) for part in version.split(".")[:2]) >= _STABLE
