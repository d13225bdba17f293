"""Devices, as far as a selection depends on them; and the one that this process would use."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import attrs
from attrs import field, frozen

from attnplug.errors import DeviceError, shown
from attnplug.request.capability import HARDWARE, ComputeCapability, parse_capability
from attnplug.request.domains import MOST, Capability, Integer, Text, Word
from attnplug.request.field import declared, fields_in, with_default
from attnplug.request.torch_values import cuda_index, is_torch_device, refuse_meta

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch


fact = partial(with_default, "device")

_PLAIN_TYPES: Final = frozenset({"cpu", "cuda", "xpu"})  # they need no second look
_DRIVERS = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")  # NVIDIA's, AMD's, and either's under WSL
_HIDDEN = ("", "-1", "NoDevFiles")

# FP32 lanes per multiprocessor, by compute capability (CUDA C++ Programming Guide, table of arithmetic throughput;
# 128 where a newer one is not listed).
_LANES = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}


def _to_capability(value: Any) -> ComputeCapability | None:
    if value is None:
        return None
    try:
        return parse_capability(value)
    except ValueError as error:
        raise DeviceError(
            f"compute capability {shown(value)} was given",
            f"it is {error}",
            "write it as major.minor, such as '9.0', not as a device index",
        ) from None


@frozen(cache_hash=True)
class Device:
    """
    A device, as far as a selection depends on it.

    Attributes:
        type: Device type as torch names it: ``"cpu"``, ``"cuda"``, ``"xpu"``, ...; a `torch.device` gives the rest too.
        vendor: The manufacturer; by default NVIDIA for cuda.
        name: Product name.
        compute_capability: For cuda devices.
        num_multiprocessors: Streaming multiprocessors.
        arch: For AMD devices, the LLVM target, such as ``"gfx942"``.
    """

    type: str = fact(
        Word(), "device type, as torch names it", default="cpu", name="device_type", required=True, neutral=None
    )
    vendor: str | None = field(
        metadata=declared(
            "device",
            Word(),
            "the device's manufacturer; undeclared, a variant for cuda admits NVIDIA only",
            required=False,
            neutral=None,
            neutral_words="nvidia",
        )
    )
    name: str | None = fact(Text(), "the device's product name", name="device_name", open=True)
    compute_capability: ComputeCapability | None = field(
        default=None, converter=_to_capability, metadata=declared("device", Capability(), "CUDA compute capability")
    )
    num_multiprocessors: int | None = fact(Integer(), "streaming multiprocessors", open=True)
    arch: str | None = fact(Word(), "the LLVM target of an AMD device, such as gfx942", open=True)

    @vendor.default
    def _default_vendor(self) -> str | None:
        return default_vendor(self.type) if isinstance(self.type, str) else None  # checked after the defaults

    def __attrs_post_init__(self) -> None:
        if is_torch_device(self.type):
            _fill(self, _from_torch_device(self.type))
        elif hasattr(self.type, "type"):
            raise foreign_device(self.type)
        if not (type(self.type) is str and self.type.isidentifier() and self.type.islower()):
            raise DeviceError(
                f"device type {shown(self.type)} was given",
                "a type is a lower-case word such as 'cpu' or 'cuda'",
                "use torch's name",
            )
        if self.type not in _PLAIN_TYPES:
            _refuse_product(self.type)
        _check_word("vendor", self.vendor, "a lower-case word such as 'nvidia'", is_valid=_is_word)
        _check_word("name", self.name, "a text", is_valid=bool)
        _check_word("arch", self.arch, "an LLVM target such as 'gfx942'", is_valid=_is_word)
        count = self.num_multiprocessors
        if count is not None and (type(count) is not int or not 1 <= count <= MOST):
            raise _wrong("num_multiprocessors", count, f"a whole number from 1 to {MOST}")
        if self.type == "cuda" and self.vendor == "nvidia" and self.compute_capability is None:
            raise DeviceError(
                "a cuda device without a compute capability was given",
                "what an NVIDIA device can run depends on it",
                "use Device.cuda('9.0'), or 'cuda:9.0' on the command line",
            )

    @classmethod
    def cpu(cls) -> Device:
        """Return the CPU."""
        return cls("cpu")

    @classmethod
    def cuda(cls, compute_capability: str | ComputeCapability | tuple[int, int], *, name: str | None = None) -> Device:
        """Return an NVIDIA device as plain data, whatever this machine has."""
        return cls("cuda", name=name, compute_capability=compute_capability)

    @classmethod
    def parse(cls, text: str | torch.device, *, types: Iterable[str] = ()) -> Device:
        """
        Read a text: ``"cpu"``, ``"cuda:9.0"``, ``"sm90"``, ``"rocm:gfx942"``, a product such as ``"h100"``, ``"b200"``,
        ``"rtx4090"`` or ``"mi300x"``, another device type of torch such as ``"xpu"``, or ``"current"``. A
        `torch.device` is what it is in this process.

        Args:
            text: The text, or a `torch.device`.
            types: Other device types that are one, such as those that manifests declare.

        Raises:
            DeviceError: The text has none of these forms; the nearest names are in the message.
        """
        if is_torch_device(text):  # what it is in this process
            return _from_torch_device(text)
        if not isinstance(text, str):
            raise foreign_device(text)
        if text == "current":
            return cls.current()
        from attnplug.request.device_names import read_device  # noqa: PLC0415 - most processes name no device

        return cls(**read_device(text, [each.number for each in HARDWARE], types))

    @classmethod
    def current(cls) -> Device:
        """
        Return the device that this process would use first.

        Honors CUDA_VISIBLE_DEVICES and creates no CUDA context: NVIDIA devices are read through NVML where its bindings
        are installed (``attnplug[nvml]``), and through torch only if the process has already imported it.

        Raises:
            DeviceError: CUDA_VISIBLE_DEVICES names a device that is not there.
        """
        return _from_initialized_torch() or _from_nvml() or _from_torch() or cls.cpu()

    def facts(self) -> dict[str, Any]:
        """Return the device's fields under the names that requirements, manifests and rules use."""
        return {item.name: getattr(self, name) for item, name in FACTS}

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        plain = attrs.asdict(self, recurse=False, filter=lambda _, value: value is not None)
        if self.vendor != default_vendor(self.type):
            plain["vendor"] = self.vendor  # None too, in place of the default
        return {**plain, **({"compute_capability": str(self.compute_capability)} if self.compute_capability else {})}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Device:
        """
        Read what `to_dict` wrote.

        Raises:
            DeviceError: A key is unknown or a value does not parse.
        """
        known = [a.name for a in attrs.fields(cls)]
        if not isinstance(data, Mapping):
            raise DeviceError(
                f"device={shown(data)} was received", "it is what Device.to_dict returned", "send that, as JSON"
            )
        for key in data:
            if key not in known:
                raise DeviceError(
                    f"the device field {shown(key)} was given", f"the fields are {', '.join(known)}", "use one of these"
                )
        if "type" not in data:
            raise DeviceError(
                f"device={shown(data)} was received",
                "a device has a type",
                "send what Device.to_dict returned, as JSON",
            )
        return cls(**data)

    def __repr__(self) -> str:
        follows = {"type": self.type, "vendor": default_vendor(self.type)}
        given = {name: value for name, value in self.to_dict().items() if follows.get(name, ...) != value}
        return f"Device({', '.join([repr(self.type), *(f'{name}={value!r}' for name, value in given.items())])})"

    def __str__(self) -> str:
        capability = f":{self.compute_capability}" if self.compute_capability else ""
        if self.arch and self.vendor == "amd":
            return f"rocm:{self.arch}" + (f" ({self.name})" if self.name else "")
        product = self.name or (self.vendor if self.vendor != default_vendor(self.type) else None)
        return f"{self.type}{capability}" + (f" ({product})" if product else "")


FACTS: Final = tuple(
    sorted(zip(fields_in(Device), attrs.fields_dict(Device), strict=True), key=lambda pair: pair[0].open)
)
"""The fields of a device, closed ones first, each with the name of its attribute."""


def _fill(device: Device, found: Device) -> None:
    """Set what a `torch.device` is, and leave what was given beside it."""
    for _, name in FACTS:
        if name == "type" or getattr(device, name) is None:
            object.__setattr__(device, name, getattr(found, name))


def _refuse_product(text: str) -> None:
    """Refuse a device type that `Device.parse` reads as another one; what a manifest declares may be any word."""
    from attnplug.request.device_names import named_type  # noqa: PLC0415 - most processes name no other type

    found = named_type(text, [each.number for each in HARDWARE])
    if found not in {None, text}:
        raise DeviceError(
            f"device type {shown(text)} was given",
            f"a type is torch's name, such as 'cpu' or 'cuda'; {shown(text)} is a device of type {shown(found)}",
            f"use Device.parse({text!r})",
        )


def _is_word(text: str) -> bool:
    return text.isidentifier() and text.islower()


def _check_word(name: str, value: object, expected: str, *, is_valid: Callable[[str], bool]) -> None:
    if value is not None and not (type(value) is str and is_valid(value)):
        raise _wrong(name, value, expected)


def _wrong(name: str, value: object, expected: str) -> DeviceError:
    return DeviceError(
        f"a device with {name}={shown(value)} was given", f"it is {expected}, or None", "correct it, or leave it out"
    )


def is_unseen() -> bool:
    """
    Whether a GPU is likely here that nothing in this process can see: its driver's files are there, NVML's bindings are
    not, and torch is not imported. `Device.current` returns the CPU then.
    """
    return (
        "torch" not in sys.modules
        and os.environ.get("CUDA_VISIBLE_DEVICES") not in _HIDDEN
        and any(os.path.exists(path) for path in _DRIVERS)  # noqa: PTH110 - pathlib costs more, and every request of such a process checks this
        and find_spec("pynvml") is None
    )


def foreign_device(device: object) -> DeviceError:
    """Return the error for an object that is no device, such as torch's, with the text to write for it."""
    kind = getattr(device, "type", None)
    kind = kind if isinstance(kind, str) else None
    text = f"{kind}:9.0" if kind == "cuda" else kind
    other = ", or describe another with Device.cuda('9.0')"
    write = f", or write {text!r}{', with its own compute capability' if kind == 'cuda' else ''}" if kind else other
    return DeviceError(
        f"device={shown(device)} was given",
        "a device is an attnplug.Device, or its text such as 'cpu' or 'cuda:9.0'",
        f"leave it out for this process's own{write}",
    )


def default_vendor(device_type: str) -> str | None:
    """Return the vendor that a device type implies."""
    return "nvidia" if device_type == "cuda" else None


def multiprocessors(cores: int, capability: tuple[int, int]) -> int:
    """Return the number of multiprocessors of a device with so many FP32 lanes."""
    return cores // _LANES.get(capability, 128)


def _from_initialized_torch() -> Device | None:
    """Read the device of a process that has a CUDA context: that respects visible devices and their order."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():  # is_available would start CUDA's driver: 150 ms
        return None
    return _from_torch_cuda(torch)


def _from_torch() -> Device | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if torch.cuda.is_available():
        return _from_torch_cuda(torch)
    kind = (
        torch.accelerator.current_accelerator()
        if hasattr(torch, "accelerator") and torch.accelerator.is_available()
        else None
    )
    return Device(kind.type) if kind is not None else None


def _from_torch_device(device: Any) -> Device:
    refuse_meta(device)
    return _from_torch_cuda(sys.modules["torch"], device) if device.type == "cuda" else Device(device.type)


def _from_torch_cuda(torch: Any, device: torch.device | None = None) -> Device:
    facts = torch.cuda.get_device_properties(cuda_index(torch, device))
    # Builds of torch for AMD and Iluvatar devices name these cuda, too, with capabilities of other instruction sets.
    amd, iluvatar = bool(getattr(torch.version, "hip", None)), facts.name.startswith("Iluvatar")
    vendor = "amd" if amd else "iluvatar" if iluvatar else "nvidia"
    return Device(
        "cuda",
        vendor=vendor,
        name=facts.name,
        compute_capability=(facts.major, facts.minor) if vendor == "nvidia" else None,
        num_multiprocessors=facts.multi_processor_count,
        arch=_target(facts) if amd else None,
    )


def _target(facts: Any) -> str | None:
    """Return the LLVM target of an AMD device, without its modes: torch writes ``gfx942:sramecc+:xnack-``."""
    target = str(getattr(facts, "gcnArchName", "")).partition(":")[0]
    return target if _is_word(target) else None


def _from_nvml() -> Device | None:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    first = None if visible is None else visible.split(",")[0].strip()
    if first is not None and first in _HIDDEN:
        return Device.cpu()  # every NVIDIA device is hidden; NVML would list them all the same
    try:
        import pynvml  # noqa: PLC0415 - optional, and only worth its import when a device is looked for
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None  # no NVIDIA driver: not an error, only no NVIDIA device
    try:
        return _read_nvml(pynvml, first)
    finally:
        pynvml.nvmlShutdown()


def _read_nvml(nvml: Any, first: str | None) -> Device | None:
    if nvml.nvmlDeviceGetCount() == 0:
        return None
    try:
        by_index = first is None or (first.isascii() and first.isdigit())
        handle = nvml.nvmlDeviceGetHandleByIndex(int(first or 0)) if by_index else nvml.nvmlDeviceGetHandleByUUID(first)
    except nvml.NVMLError as error:
        raise DeviceError(
            f"CUDA_VISIBLE_DEVICES={first!r} was set",
            f"NVML finds no such device ({error})",
            "unset it, or name a device of nvidia-smi -L",
        ) from error
    capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
    name = nvml.nvmlDeviceGetName(handle)
    cores = _cores(nvml, handle)
    return Device(
        "cuda",
        name=name if isinstance(name, str) else name.decode(),
        compute_capability=capability,
        num_multiprocessors=None if cores is None else multiprocessors(cores, (capability[0], capability[1])),
    )


def _cores(nvml: Any, handle: Any) -> int | None:
    try:
        return int(nvml.nvmlDeviceGetNumGpuCores(handle))
    except (nvml.NVMLError, AttributeError):
        return None  # old drivers and MIG slices do not say; the count is optional
