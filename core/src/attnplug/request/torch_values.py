"""
Objects of torch in a request: a `torch.dtype` counts as its name, a `torch.device` as the device that it is here.

Nothing imports torch for it: a caller that has such an object has imported torch, and a process without it has none.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from attnplug.errors import DeviceError, shown

if TYPE_CHECKING:
    from typing import TypeAlias

    import torch

    from attnplug.request.device import Device

    DeviceLike: TypeAlias = Device | str | torch.device


def dtype_text(value: str | torch.dtype) -> str:
    """Return a `torch.dtype` as its text, such as ``"torch.bfloat16"``; anything else as it is, to be checked later."""
    return str(value) if _is(value, "dtype") else value  # type: ignore[return-value] # what is no text is refused with its field


def is_torch_device(value: object) -> bool:
    """Whether `value` is a `torch.device`."""
    return _is(value, "device")


def cuda_index(module: Any, device: torch.device | None = None) -> int:
    """
    Return the number of a CUDA device of torch: of the one that this process uses first, where none is named.

    Raises:
        DeviceError: torch sees no such device in this process.
    """
    if device is None:
        return int(module.cuda.current_device()) if module.cuda.is_initialized() else 0
    count = module.cuda.device_count() if module.cuda.is_available() else 0
    index = cuda_index(module) if device.index is None and count else device.index or 0
    if index < count:
        return int(index)
    raise DeviceError(
        f"device={shown(device)} was given",
        f"torch sees {count or 'no'} CUDA device{'s' * (count != 1)} in this process",
        "describe the device with its compute capability, such as 'cuda:9.0'",
    )


def refuse_meta(device: torch.device) -> None:
    """
    Refuse the device type of tensors without data.

    Raises:
        DeviceError: It is this one.
    """
    if device.type == "meta":
        raise DeviceError(
            f"device={shown(device)} was given",
            "nothing runs on tensors without data",
            "pass the device that the model runs on",
        )


def _is(value: object, kind: str) -> bool:
    # The exact type, and no isinstance: an object may claim any class, and both types of torch are final.
    return type(value) is getattr(sys.modules.get("torch"), kind, None)
