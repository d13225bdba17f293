"""vLLM's CUDA platform of any compute capability, on a machine without a GPU. Only compiled modules are stubbed."""

from __future__ import annotations

import sys
import types
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

_COMPILED = (
    *("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm._qutlass_C"),
    *("vllm.vllm_flash_attn._vllm_fa2_C", "vllm.vllm_flash_attn._vllm_fa3_C"),
)


def stub_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what is compiled for CUDA be empty modules, where it has not been imported."""
    for name in _COMPILED:
        if name not in sys.modules:
            stub = types.ModuleType(name)
            stub.__spec__ = ModuleSpec(name, None)
            monkeypatch.setitem(sys.modules, name, stub)


def use_cuda(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> Any:
    """Make vLLM's current platform a CUDA device of this compute capability, and return the platform."""
    import vllm.platforms  # noqa: PLC0415 - where vLLM is installed

    stub_compiled(monkeypatch)
    from vllm.platforms.cuda import CudaPlatformBase  # noqa: PLC0415 - what it imports is stubbed above
    from vllm.platforms.interface import DeviceCapability  # noqa: PLC0415 - see above

    class Cuda(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            return DeviceCapability(*capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "A stubbed device"

    platform = Cuda()
    monkeypatch.setattr(vllm.platforms, "_current_platform", platform)
    return platform
