"""The entry point, imported to probe this backend, or once it is chosen. It imports neither torch nor the library."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnplug.contract import hookimpl
from attnplug.negotiation import Reason, missing_cuda, torch_build

if TYPE_CHECKING:
    from attnplug import Agreement, Device
    from attnplug.contract import Backend

LIBRARY: Final = "sgl-flash-mla"
CALLS: Final = ("flash_mla_with_kvcache", "flash_mla_sparse_fwd", "get_mla_decoding_metadata")
"""The library's functions that the plugin calls, with ``use_legacy=True``."""

_CUDA: Final = 13
"""The major version of CUDA that the library is linked with (``libcudart.so.13``)."""


@hookimpl
def attnplug_backend(variant: str, agreement: Agreement) -> type[Backend]:
    """Return the backend class."""
    del variant, agreement
    from attnplug_flashmla.backend import FlashMLABackend  # noqa: PLC0415 - the probe runs without torch

    return FlashMLABackend


@hookimpl
def attnplug_probe(variant: str, agreement: Agreement, device: Device) -> Reason | None:
    """Return what is missing here to run the kernels; None where nothing is."""
    del variant, agreement
    return probe(device)


def probe(device: Device) -> Reason | None:
    """Return the first thing that is missing, with the fix. A missing or unsupported release is the manifest's."""
    if device.type != "cuda":
        return None  # the manifest refuses it, unless a test declares another device
    return missing_cuda() or _cuda_version() or _files()


def _cuda_version() -> Reason | None:
    build = torch_build()
    if build is None or build.cuda is None or build.cuda[0] == _CUDA:
        return None
    built_for = ".".join(map(str, build.cuda))
    found = f"torch {build.version} is built for CUDA {built_for}, and {LIBRARY} is linked with CUDA {_CUDA}"
    return Reason("broken", "torch", None, found, f"install a torch for CUDA {_CUDA}")


def _files() -> Reason | None:
    """Check the package: DeepSeek's own distribution has the same import name, and has no kernels for Hopper now."""
    try:
        installed, spec = version(LIBRARY), find_spec("flash_mla")
    except PackageNotFoundError:
        return None
    if spec is None or spec.origin is None:
        return _broken(f"{LIBRARY} {installed} is installed, and the package flash_mla is missing")
    folder = Path(spec.origin).parent
    if not any(folder.glob("_C_legacy.*so")):
        return _broken(f"{folder} has no _C_legacy library, which has the kernels for Hopper of {LIBRARY} {installed}")
    interface = folder / "flash_mla_interface.py"
    text = interface.read_text("utf-8") if interface.is_file() else ""
    missing = [name for name in CALLS if f"def {name}(" not in text] + ["use_legacy"] * ("use_legacy" not in text)
    return _broken(f"{interface} has no {', '.join(missing)}") if missing else None


def _broken(problem: str) -> Reason:
    fix = f"uninstall flash-mla where it is installed, then pip install --no-deps --force-reinstall {LIBRARY}"
    return Reason("broken", LIBRARY, None, problem, fix)
