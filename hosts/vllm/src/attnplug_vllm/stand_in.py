"""
vLLM's own selection on a device that need not be there. A program: it reads a request as JSON from standard input, and
writes what vLLM picks to standard output. `attnplug_vllm.report` runs it in a process that ends afterwards.

vLLM's platform is its own, with the compute capability of the request. Nothing is computed. What this vLLM cannot load
without a GPU, or lacks since it was built for another device, is replaced by empty modules and named in the answer.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_args

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import ModuleType

_PLATFORMS: Final = "vllm.platforms"
_FLASH_ATTENTION: Final = "vllm.vllm_flash_attn"
_COMPILED: Final = frozenset(
    {
        *("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm._qutlass_C"),
        *(f"{_FLASH_ATTENTION}._vllm_fa2_C", f"{_FLASH_ATTENTION}._vllm_fa3_C"),
    }
)
_FLASHINFER: Final = "flashinfer"
_PLATFORM_OF: Final = {"cpu": "vllm.platforms.cpu.CpuPlatform", "cuda": f"{__name__}.stand_in_platform"}

_capability: tuple[int, int] = (0, 0)


class _Finder:
    """
    Finds the modules of vLLM that are not as they are elsewhere: its platforms, with the requested one as the current,
    and what is compiled, as an empty module where it does not load.
    """

    def __init__(self, platform: str, *, assume_installed: bool) -> None:
        self.platform = platform
        self.assume_installed = assume_installed
        self.replaced: list[str] = []

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: object = None) -> ModuleSpec | None:
        """Return the spec of a module that is found here, or None."""
        del target
        if name == _PLATFORMS:
            return self._of_platforms(PathFinder.find_spec(name, path))
        is_flashinfer = (name == _FLASHINFER and self.assume_installed) or name.partition(".")[0] in self.replaced
        if not (is_flashinfer or name in _COMPILED) or _loads(PathFinder.find_spec(name, path)):
            return None
        self.replaced.append(name)
        return ModuleSpec(name, self, is_package=is_flashinfer)  # type: ignore[arg-type]  # a loader by its methods

    def create_module(self, spec: ModuleSpec) -> None:
        """Leave the module to Python."""

    def exec_module(self, module: ModuleType) -> None:
        """Leave a compiled module empty. Of FlashInfer every name is a class."""
        if module.__name__.partition(".")[0] == _FLASHINFER:
            module.__getattr__ = _class_named  # type: ignore[method-assign]

    def _of_platforms(self, spec: ModuleSpec | None) -> ModuleSpec | None:
        """Let the module, once it is loaded, resolve the requested platform where it would look for devices."""
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def run(module: Any) -> None:
                execute(module)
                module.resolve_current_platform_cls_qualname = lambda: self.platform

            spec.loader.exec_module = run  # type: ignore[method-assign]
        return spec


def _loads(spec: ModuleSpec | None) -> bool:
    if spec is None:
        return False
    try:
        importlib.util.module_from_spec(spec)
    except ImportError:  # a library of CUDA is not there, or another torch than it was compiled for
        return False
    return True


def _class_named(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {"run": lambda _: None})  # vLLM reads the signature of a wrapper's method


def __getattr__(name: str) -> Any:
    """Return the class of the current platform, for vLLM."""
    if name == "stand_in_platform":
        return _cuda_platform()
    raise AttributeError(name)


def _cuda_platform() -> Any:
    from vllm.platforms.cuda import CudaPlatformBase  # noqa: PLC0415 - after the finder is installed
    from vllm.platforms.interface import DeviceCapability  # noqa: PLC0415 - likewise

    class StandIn(CudaPlatformBase):  # type: ignore[misc]  # vLLM is no dependency, and untyped here
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> Any:
            del device_id
            return DeviceCapability(*_capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            del device_id
            return "a stand-in device"

        @classmethod
        def get_device_total_memory(cls, device_id: int = 0) -> int:
            del device_id
            return 80 << 30

        @classmethod
        def is_fully_connected(cls, device_ids: list[int]) -> bool:
            del device_ids
            return True

    return StandIn


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return what vLLM picks.

    Args:
        request: ``device_type``, ``capability`` (two numbers, for CUDA), ``assume_installed``, and ``layers``. Each
            has the fields of vLLM's ``AttentionSelectorConfig`` under ``selector``, and the arguments of its
            ``get_flash_attn_version`` under ``flash_attention``.
    """
    global _capability  # noqa: PLW0603 - vLLM's platforms are classes that it calls without an instance
    _capability = tuple(request.get("capability") or (0, 0))
    is_cuda = request["device_type"] == "cuda"
    finder = _Finder(_PLATFORM_OF[request["device_type"]], assume_installed=is_cuda and request["assume_installed"])
    sys.meta_path.insert(0, finder)
    from vllm import __version__  # noqa: PLC0415 - after the finder is installed
    from vllm.config import VllmConfig, set_current_vllm_config  # noqa: PLC0415 - likewise

    if is_cuda and _suppose_flash_attention_4():
        finder.replaced.append(f"{_FLASH_ATTENTION}.cute")
    with set_current_vllm_config(VllmConfig()):
        choices = [_choice(layer) for layer in request["layers"]]
    return {"version": __version__, "choices": choices, "assumed": list(_assumed(finder))}


def _choice(layer: Mapping[str, Any]) -> dict[str, Any]:
    import torch  # noqa: PLC0415 - with vLLM
    from vllm.platforms import current_platform  # noqa: PLC0415 - after the finder is installed
    from vllm.v1.attention.selector import AttentionSelectorConfig  # noqa: PLC0415 - likewise

    fields = dict(layer["selector"])
    ignored = [name for name, value in fields.items() if value and name not in AttentionSelectorConfig._fields]
    if not _is_cache_dtype(fields["kv_cache_dtype"]):
        return {"reason": f"vLLM has no KV-cache dtype {fields['kv_cache_dtype']!r}", "ignored": ignored}
    known = {name: value for name, value in fields.items() if name in AttentionSelectorConfig._fields}
    config = AttentionSelectorConfig(**{**known, "dtype": getattr(torch, fields["dtype"])})
    backends = list(_backends(config, layer)) if current_platform.is_cuda() else []
    try:
        path = current_platform.get_attn_backend_cls(None, config, num_heads=layer["num_heads"])
    except (ValueError, NotImplementedError) as error:  # without a backend
        return {"backends": backends, "ignored": ignored, "reason": "" if backends else str(error)}
    chosen = _name_of(path)
    return {"chosen": chosen, "backends": backends or [{"name": chosen, "reasons": []}], "ignored": ignored}


def _backends(config: Any, layer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield every backend that vLLM considers, in its order, with vLLM's reasons."""
    from vllm.platforms import current_platform  # noqa: PLC0415 - after the finder is installed

    capability = current_platform.get_device_capability()
    valid, invalid = current_platform.get_valid_backends(capability, config, layer["num_heads"])
    found: list[tuple[int, str, list[str]]] = [(each.priority, each.backend.name, []) for each in valid]
    found += [(priority, backend.name, reasons) for backend, (priority, reasons) in invalid.items()]
    for _, name, reasons in sorted(found):
        yield {"name": name, "reasons": reasons, "kernels": "" if reasons else _kernels(name, layer)}


def _kernels(name: str, layer: Mapping[str, Any]) -> str:
    """Return which kernels one of its backends runs for a layer; empty where its name says it."""
    if name == "FLASH_ATTN":
        from vllm.v1.attention.backends.fa_utils import get_flash_attn_version  # noqa: PLC0415 - as above

        known = inspect.signature(get_flash_attn_version).parameters
        version = get_flash_attn_version(**{k: v for k, v in layer["flash_attention"].items() if k in known})
        return f"FlashAttention {version}" if version else ""
    if name == "FLASHINFER":
        from vllm.utils.flashinfer import can_use_trtllm_attention  # noqa: PLC0415 - as above

        heads = layer["num_heads"] or 1, layer["num_kv_heads"] or 1
        if can_use_trtllm_attention(*heads, is_prefill=True):
            return "TensorRT-LLM kernels of FlashInfer"
        return "FlashInfer, TensorRT-LLM for decodes" if can_use_trtllm_attention(*heads) else "FlashInfer"
    return {"FLEX_ATTENTION": "FlexAttention"}.get(name, "")


def _suppose_flash_attention_4() -> bool:
    """Suppose that a vLLM of another device, built without any FlashAttention, has version 4 for CUDA; say so."""
    from vllm.vllm_flash_attn import flash_attn_interface  # noqa: PLC0415 - after the finder is installed

    folder = Path(flash_attn_interface.__file__).parent
    if flash_attn_interface.FA4_AVAILABLE or any(folder.glob("_vllm_fa*")):
        return False
    flash_attn_interface.FA4_AVAILABLE = True
    return True


def _is_cache_dtype(name: str) -> bool:
    from vllm.config import cache  # noqa: PLC0415 - as above

    return name in get_args(cache.CacheDType)


def _name_of(path: str) -> str:
    """Return the name of vLLM's enum for the path of a class."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: PLC0415 - as above

    for name, member in AttentionBackendEnum.__members__.items():
        with contextlib.suppress(ValueError):  # a slot without a class
            if member.get_path() == path:
                return str(name)
    return path.rpartition(".")[2]


def _assumed(finder: _Finder) -> Iterator[str]:
    """Yield what the answer supposes."""
    compiled = sorted({name.rpartition(".")[2] for name in finder.replaced if name.startswith("vllm.")})
    if compiled:
        yield f"the parts of vLLM for CUDA that do not load here: {', '.join(compiled)}"
    if _FLASHINFER in finder.replaced:
        yield "FlashInfer, which is not installed here"
    if _FLASHINFER in sys.modules:
        yield "the compiled kernels of FlashInfer (flashinfer-cubin)"


def answering(answer_of: Callable[[Any], Mapping[str, Any]]) -> None:
    """Answer the request on standard input. What vLLM prints meanwhile goes to standard error."""
    output = os.dup(1)
    os.dup2(2, 1)
    found = answer_of(json.load(sys.stdin))
    with os.fdopen(output, "w", encoding="utf-8") as stream:
        json.dump(found, stream)


if __name__ == "__main__":
    answering(answer)
