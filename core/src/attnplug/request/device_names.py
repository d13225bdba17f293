"""
The texts that name a device: ``cpu``, ``cuda:9.0``, ``sm90``, ``rocm:gfx942``, and products such as ``h100``.

A product is a name for what its kernels depend on: a compute capability, or the LLVM target of an AMD GPU. Sources are
the vendors' own tables, each beside its products.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from attnplug.errors import DeviceError, shown

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

CUDA_GPUS: Final = "https://developer.nvidia.com/cuda-gpus"
"""NVIDIA, "CUDA GPU Compute Capability"."""

LEGACY_CUDA_GPUS: Final = "https://developer.nvidia.com/cuda-legacy-gpus"
"""NVIDIA, "Legacy CUDA GPU Compute Capability"."""

ROCM_GPUS: Final = "https://rocm.docs.amd.com/en/latest/reference/gpu-specs.html"
"""AMD, "AMD GPU specifications": names with their LLVM targets."""


@frozen
class Product:
    """
    A device by the name of its product.

    Attributes:
        name: The name that is parsed: small letters and digits.
        product: The product's name.
        vendor: ``nvidia`` or ``amd``.
        capability: The compute capability of an NVIDIA GPU, as ``9.0``.
        arch: The LLVM target of an AMD GPU, as ``gfx942``.
        source: The page that says so.
    """

    name: str
    product: str
    vendor: str
    capability: str | None
    arch: str | None
    source: str

    @property
    def device(self) -> str:
        """The same device without its product, as a text that is parsed: ``cuda:9.0``, ``rocm:gfx942``."""
        return f"rocm:{self.arch}" if self.arch else f"cuda:{self.capability}"


_NVIDIA: Final = {
    "12.1": ("NVIDIA GB10",),
    "12.0": (
        "NVIDIA RTX PRO 6000 Blackwell",
        "NVIDIA RTX PRO 5000 Blackwell",
        "NVIDIA GeForce RTX 5090",
        "NVIDIA GeForce RTX 5080",
        "NVIDIA GeForce RTX 5070",
        "NVIDIA GeForce RTX 5060",
    ),
    "11.0": ("Jetson T5000", "Jetson T4000"),
    "10.3": ("NVIDIA B300", "NVIDIA GB300"),
    "10.0": ("NVIDIA B200", "NVIDIA GB200"),
    "9.0": ("NVIDIA H100", "NVIDIA H200", "NVIDIA GH200"),
    "8.9": (
        "NVIDIA L4",
        "NVIDIA L40",
        "NVIDIA L40S",
        "NVIDIA RTX 6000 Ada",
        "NVIDIA GeForce RTX 4090",
        "NVIDIA GeForce RTX 4080",
        "NVIDIA GeForce RTX 4070",
        "NVIDIA GeForce RTX 4060",
    ),
    "8.7": ("Jetson AGX Orin",),
    "8.6": (
        "NVIDIA A10",
        "NVIDIA A16",
        "NVIDIA A2",
        "NVIDIA A40",
        "NVIDIA RTX A6000",
        "NVIDIA RTX A5000",
        "NVIDIA GeForce RTX 3090",
        "NVIDIA GeForce RTX 3080",
        "NVIDIA GeForce RTX 3070",
        "NVIDIA GeForce RTX 3060",
    ),
    "8.0": ("NVIDIA A100", "NVIDIA A30"),
    "7.5": ("NVIDIA T4", "NVIDIA GeForce RTX 2080", "Quadro RTX 8000", "Quadro RTX 6000"),
}
_NVIDIA_LEGACY: Final = {"7.2": ("Jetson AGX Xavier",), "7.0": ("NVIDIA V100", "NVIDIA TITAN V")}
_AMD: Final = {
    "gfx950": ("AMD Instinct MI355X", "AMD Instinct MI350X"),
    "gfx942": ("AMD Instinct MI325X", "AMD Instinct MI300X", "AMD Instinct MI300A"),
    "gfx90a": ("AMD Instinct MI250X", "AMD Instinct MI250", "AMD Instinct MI210"),
    "gfx908": ("AMD Instinct MI100",),
    "gfx1201": ("AMD Radeon RX 9070 XT", "AMD Radeon RX 9070"),
    "gfx1200": ("AMD Radeon RX 9060 XT",),
    "gfx1102": ("AMD Radeon RX 7600",),
    "gfx1101": ("AMD Radeon RX 7800 XT", "AMD Radeon RX 7700 XT"),
    "gfx1100": ("AMD Radeon RX 7900 XTX", "AMD Radeon RX 7900 XT"),
}

# What a product's name has before what people call it, and what is written between its parts.
_MAKERS: Final = ("nvidia", "geforce", "quadro", "jetson", "agx", "amd", "instinct", "radeon", "blackwell")
_BETWEEN: Final = re.compile(r"[\s_-]+")

TYPES: Final = ("cpu", "cuda", "hpu", "ipu", "maia", "mps", "mtia", "vulkan", "xla", "xpu", "mlu", "musa", "npu")
"""
Device types: those of torch that compute (`torch.device`), and the names that vendors give torch's private one
(torch_mlu, torch_musa, torch_npu). A manifest may declare another.
"""

_VENDORS: Final = ("amd", "iluvatar")  # whose devices torch calls cuda, too
_SM: Final = re.compile(r"sm_?([0-9]{1,2})([0-9])([af]?)")
_GFX: Final = re.compile(r"gfx[0-9]{1,3}[0-9a-f]{2}")
_CAPABILITY: Final = re.compile(r"([0-9]{1,3})\.([0-9])[af]?")

# Beside what is supported: hardware of the two pages above, and targets of the CUDA compiler, that people name.
_OTHERS: Final = ((5, 0), (5, 2), (5, 3), (6, 0), (6, 1), (6, 2), (8, 8), (10, 1))


def plain(text: str) -> str:
    """Return a product's name as it is compared: ``NVIDIA GeForce RTX 4090`` and ``rtx-4090`` are ``rtx4090``."""
    words = _BETWEEN.split(text.strip().lower())
    return "".join(word for word in words if word not in _MAKERS) or text


def _products() -> Iterator[Product]:
    for table, source in ((_NVIDIA, CUDA_GPUS), (_NVIDIA_LEGACY, LEGACY_CUDA_GPUS)):
        for capability, names in table.items():
            yield from (Product(plain(name), name, "nvidia", capability, None, source) for name in names)
    for arch, names in _AMD.items():
        yield from (Product(plain(name), name, "amd", None, arch, ROCM_GPUS) for name in names)


PRODUCTS: Final = {product.name: product for product in _products()}
"""Products by the name that is parsed."""


def read_device(text: str, hardware: Collection[tuple[int, int]], types: Iterable[str] = ()) -> dict[str, Any]:
    """
    Return the fields of the device that a text names.

    Args:
        text: The text.
        hardware: The compute capabilities that exist.
        types: Other device types than `TYPES`, such as those that manifests declare.

    Raises:
        DeviceError: It names none; the nearest names are in the message.
    """
    types = (*TYPES, *types)
    kind, colon, rest = text.partition(":")
    if text in types:
        return {"type": text}
    if kind == "cuda" and colon:
        if rest in _VENDORS:
            return {"type": "cuda", "vendor": rest}
        if not _CAPABILITY.fullmatch(rest) or _is_hardware(rest, hardware):
            return {"type": "cuda", "compute_capability": rest}  # the device says what is wrong with another form
    target = rest if kind == "rocm" and colon else text
    if text == "rocm" or _GFX.fullmatch(target):
        return {"type": "cuda", "vendor": "amd", "arch": None if text == "rocm" else target}
    match = _SM.fullmatch(text.lower())
    if match is not None and _is_hardware(f"{match[1]}.{match[2]}", hardware):
        return {"type": "cuda", "compute_capability": f"{match[1]}.{match[2]}{match[3]}"}
    found = PRODUCTS.get(plain(text))
    if found is not None:
        of_vendor = {"vendor": found.vendor, "arch": found.arch} if found.arch else {}
        return {"type": "cuda", "name": found.product, "compute_capability": found.capability, **of_vendor}
    raise _unknown(text, hardware, types)


def named_type(text: str, hardware: Collection[tuple[int, int]]) -> str | None:
    """Return the type of the product, or of the compute capability or LLVM target, that a text names; None for none."""
    if text == "rocm":
        return None  # a vendor may name its own type so
    try:
        return str(read_device(text, hardware)["type"])
    except DeviceError:
        return None


def _is_hardware(capability: str, hardware: Collection[tuple[int, int]]) -> bool:
    """Whether a compute capability exists, or is newer than all that is known here."""
    match = _CAPABILITY.fullmatch(capability)
    number = (int(match[1]), int(match[2])) if match else (0, 0)
    newest = max(hardware)
    return number in hardware or number in _OTHERS or newest < number < (newest[0] + 8, 0)


def _unknown(text: str, hardware: Collection[tuple[int, int]], types: Iterable[str]) -> DeviceError:
    matches = _near(text, hardware, types)
    listed = " or ".join(filter(None, (", ".join(matches[:-1]), *matches[-1:])))
    return DeviceError(
        f"the device {shown(text)} was given{f'; did you mean {listed}?' if listed else ''}",
        "a device is current (this machine's), cpu, cuda:9.0 or sm90, rocm:gfx942, a product such as h100, b200, "
        "rtx4090 or mi300x, or another device type of torch, such as xpu",
        f"write {matches[0]}" if matches else "write one of these; the command line's reference lists every product",
    )


def _near(text: str, hardware: Collection[tuple[int, int]], types: Iterable[str]) -> list[str]:
    """Return up to three texts that name a device and are close to this one."""
    from difflib import get_close_matches  # noqa: PLC0415 - only a wrong device needs it

    if len(text) > 50:
        return []  # comparing takes time that grows with the square of the length
    cuda = [f"cuda:{major}.{minor}" for major, minor in hardware]
    sm = [f"sm{major}{minor}" for major, minor in hardware]
    rocm = [f"rocm:{arch}" for arch in _AMD]
    names = ["current", *types, *cuda, *sm, *rocm, *PRODUCTS]
    written = (text.lower(), plain(text))
    return next(filter(None, (get_close_matches(each, names, n=3, cutoff=0.6) for each in written)), [])
