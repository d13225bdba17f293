"""The dtypes, head sizes and groups that the library has kernels for."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import torch
from packaging.version import Version

from flashinfer.misuse import require

FP8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
_HALF: Final = (torch.float16, torch.bfloat16)
_HEAD_SIZES: Final = (64, 128, 256)
_CUDA_CORE_GROUPS: Final = (1, 2, 3, 4, 8)


def dtype_of(given: Any) -> torch.dtype:
    """
    Return a dtype, given as one or by name.

    Raises:
        TypeError: It is neither.
    """
    if isinstance(given, str):
        return getattr(torch, given)  # type: ignore[no-any-return]
    if isinstance(given, torch.dtype):
        return given
    raise TypeError(f"dtype must be a string or torch.dtype, got {type(given)}")


def resolve(backend: str, kv: torch.dtype) -> str:
    """Return the backend of ``auto`` at compute capability 9.0."""
    if backend != "auto":
        return backend
    return "fa2" if kv in FP8 else "fa3"


def check_backend(backend: str, *allowed: str) -> None:
    """
    Check the name of a backend.

    Raises:
        MisuseError: The fake does not model it.
    """
    require(backend in allowed, f"backend={backend!r} is not one of {allowed}, which the fake models")


def check_heads(num_qo_heads: int, num_kv_heads: int, head_size: int, head_size_v: int, *more: tuple[int, int]) -> None:
    """
    Check the shape of the heads. `more` are sizes of keys and values that a wrapper supports besides equal ones.

    Raises:
        ValueError: The number of query heads is not a multiple of the number of KV heads.
        MisuseError: No kernel supports the head size.
    """
    if num_qo_heads < 1 or num_kv_heads < 1 or num_qo_heads % num_kv_heads:
        raise ValueError(f"num_qo_heads {num_qo_heads} should be divisible by num_kv_heads {num_kv_heads}")
    is_supported = (head_size in _HEAD_SIZES and head_size_v == head_size) or (head_size, head_size_v) in more
    require(is_supported, f"no kernel supports head sizes {head_size}, {head_size_v}")


def check_latents(backend: str, latent: int, rotary: int) -> None:
    """
    Check the sizes of latents.

    Raises:
        MisuseError: No kernel supports them, or it adds to what registers contain, as without rotary elements before
            0.6.18.
    """
    least = import_module("flashinfer").__version__
    require(latent % 128 == 0 and latent + rotary <= 576 and rotary % 64 == 0, f"latents of {latent} and {rotary}")
    require(backend == "fa2" or latent in (128, 256, 512), f"fa3 with latents of {latent}")
    require(rotary or Version(least) >= Version("0.6.18"), f"latents without rotary elements in {least}")


def check_latents_in_fp8(
    backend: str, q: torch.dtype, kv: torch.dtype, sizes: tuple[int, int], scale_mode: str
) -> None:
    """
    Check the dtypes of latents, and whether a plan declares scales.

    Raises:
        MisuseError: No kernel supports them, or the plan declares other scales than its runs need.
    """
    check_dtypes(backend, q, q, q)
    if kv == q:
        require(scale_mode == "default", f"scale_mode={scale_mode!r} without FP8")
        return
    is_newer = Version(import_module("flashinfer").__version__) >= Version("0.7")
    require(is_newer and kv == torch.float8_e4m3fn, f"latents of {kv} with queries of {q}")
    require(q == torch.bfloat16 and sizes in {(512, 0), (512, 64)}, f"latents of {sizes} in FP8 with queries of {q}")
    require(scale_mode == "kv-per-tensor", f"scale_mode={scale_mode!r} with FP8")


def check_dtypes(backend: str, q: torch.dtype, kv: torch.dtype, o: torch.dtype) -> None:
    """
    Check dtypes against the kernels of a backend: ``fa2``, ``fa3`` or ``cuda_cores``.

    Raises:
        MisuseError: No kernel supports them, or its results differ from the documentation.
    """
    require(q in _HALF, f"{backend} kernels support queries of {_HALF}, not {q}")
    require(o == q, f"outputs of {o} for queries of {q} are not modelled")
    caches = (q,) if backend == "fa3" else (q, *FP8)
    require(kv in caches, f"{backend} kernels with queries of {q} support KV caches of {caches}, not {kv}")


def check_group(num_qo_heads: int, num_kv_heads: int) -> None:
    """
    Check the number of query heads per KV head, for CUDA cores.

    Raises:
        RuntimeError: No kernel supports it.
    """
    if num_qo_heads // num_kv_heads not in _CUDA_CORE_GROUPS:
        raise RuntimeError(f"Unsupported group_size: {num_qo_heads // num_kv_heads}")
