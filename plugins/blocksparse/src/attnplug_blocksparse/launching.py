"""Launches that are kept by what they are compiled for: a later one with like arguments goes straight to the driver."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
import triton

from attnplug.ops import Launch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

INTERPRETED: Final = bool(triton.knobs.runtime.interpret)
"""Whether kernels are run by Triton's interpreter, on any device."""

_launches: dict[tuple[object, ...], Launch] = {}


def launch(
    kernel: Any,
    programs: int,
    tensors: Sequence[Tensor],
    strides: Sequence[int],
    numbers: Sequence[float],
    constants: tuple[Any, ...],
    **options: Any,
) -> None:
    """
    Run a kernel whose arguments are tensors, strides, numbers and constants, in this order.

    Args:
        kernel: A function of `triton.jit`. Its numbers are not specialized.
        programs: Programs of the grid.
        tensors: All on one device, the first one's.
        strides: Triton specializes on 1 and on multiples of 16.
        numbers: Whole ones and others.
        constants: Compiled in.
        options: As `num_warps`.
    """
    device = tensors[0].get_device()
    if device >= 0 and device != torch.cuda.current_device():
        with torch.cuda.device(device):
            return launch(kernel, programs, tensors, strides, numbers, constants, **options)
    places = [tensor.data_ptr() for tensor in tensors]
    form = (
        kernel,
        device,
        constants,
        tuple(tensor.dtype for tensor in tensors),
        tuple(place % 16 == 0 for place in places),
        tuple("one" if stride == 1 else stride % 16 == 0 for stride in strides),
        tuple(options.items()),
    )
    found = _launches.get(form)
    if found is None:
        found = _launches[form] = Launch(kernel, constants, **options)
    if found.is_compiled:
        found.again((programs, 1, 1), *places, *strides, *numbers)
    else:
        found.first((programs,), *tensors, *strides, *numbers)
    return None
