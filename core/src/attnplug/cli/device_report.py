"""The device of this machine, how it was found, and whether one may have been overlooked."""

from __future__ import annotations

import os
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from attrs import frozen

from attnplug.request.device import Device

_DRIVER: Final = Path("/proc/driver/nvidia/version")
_OVERLOOKED: Final = (
    "an NVIDIA driver is installed, and only torch or NVML's Python bindings can read the device from it",
    "pip install 'attnplug[nvml]', or name the device: --device cuda:9.0",
)
_AMD_DRIVER: Final = Path("/dev/kfd")
_AMD_OVERLOOKED: Final = (
    "an AMD driver is installed, and only torch can read the device from it, which this command does not import",
    "name the device: --device mi300x, or --device rocm:gfx942",
)


@frozen
class DeviceReport:
    """
    The device that a selection is for where none is named.

    Attributes:
        device: The device.
        how: How it was found.
        overlooked: What may have been overlooked; empty where nothing was.
        fix: How to find it.
    """

    device: Device
    how: str
    overlooked: str = ""
    fix: str = ""


def report_device() -> DeviceReport:
    """
    Find the device as `Device.current` does. No CUDA context is created, and torch is not imported.

    Raises:
        DeviceError: CUDA_VISIBLE_DEVICES names a device that is not there.
    """
    device = Device.current()
    if device.type != "cpu":
        return DeviceReport(device, "torch" if _is_from_torch() else "NVML")
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1", "NoDevFiles"):
        return DeviceReport(device, "CUDA_VISIBLE_DEVICES hides every NVIDIA device")
    if "torch" in sys.modules:
        return DeviceReport(device, "torch finds no accelerator")
    if find_spec("pynvml") is not None:
        return DeviceReport(device, "NVML finds no NVIDIA device", *(_AMD_OVERLOOKED if _AMD_DRIVER.exists() else ()))
    how = "no NVIDIA device was looked for: NVML's Python bindings are not installed"
    if _has_driver():
        return DeviceReport(device, how, *_OVERLOOKED)
    return DeviceReport(device, how, *(_AMD_OVERLOOKED if _AMD_DRIVER.exists() else ()))


def _is_from_torch() -> bool:
    return "torch" in sys.modules and find_spec("pynvml") is None


def _has_driver() -> bool:
    return _DRIVER.exists() or shutil.which("nvidia-smi") is not None
