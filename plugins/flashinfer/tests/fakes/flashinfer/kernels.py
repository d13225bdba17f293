"""What the library has kernels for."""

from __future__ import annotations

from typing import Any, Final

import torch

from flashinfer.misuse import require

FP8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
_HALF: Final = (torch.float16, torch.bfloat16)
_HEAD_SIZES: Final = (64, 128, 256)
_CUDA_CORE_GROUPS: Final = (1, 2, 3, 4, 8)


def dtype_of(given: Any) -> torch.dtype:
    """
    Return a dtype that was given by itself or by name.

    Raises:
        TypeError: It is neither.
    """
    if isinstance(given, str):
        return getattr(torch, given)  # type: ignore[no-any-return]
    if isinstance(given, torch.dtype):
        return given
    raise TypeError(f"dtype must be a string or torch.dtype, got {type(given)}")


def resolve(backend: str, kv: torch.dtype) -> str:
    """Return the backend that ``auto`` means on a device of compute capability 9.0."""
    if backend != "auto":
        return backend
    return "fa2" if kv in FP8 else "fa3"


def check_backend(backend: str, *allowed: str) -> None:
    """
    Check the name of a backend.

    Raises:
        MisuseError: The fake does not model it.
    """
    require(backend in allowed, f"backend={backend!r} is not one of {allowed}, which are all that the fake knows")


def check_heads(num_qo_heads: int, num_kv_heads: int, head_size: int, head_size_v: int) -> None:
    """
    Check the shape of the heads.

    Raises:
        ValueError: The query heads are no multiple of the others.
        MisuseError: There is no kernel of that head size.
    """
    if num_qo_heads < 1 or num_kv_heads < 1 or num_qo_heads % num_kv_heads:
        raise ValueError(f"num_qo_heads {num_qo_heads} should be divisible by num_kv_heads {num_kv_heads}")
    require(head_size in _HEAD_SIZES and head_size_v == head_size, f"no kernel has heads of {head_size}, {head_size_v}")


def check_dtypes(backend: str, q: torch.dtype, kv: torch.dtype, o: torch.dtype) -> None:
    """
    Check dtypes against the kernels of a backend: ``fa2``, ``fa3`` or ``cuda_cores``.

    Raises:
        MisuseError: There is no kernel for them, or one that does not what one expects.
    """
    require(q in _HALF, f"{backend} kernels read queries of {_HALF}, and these are {q}")
    require(o == q, f"outputs of {o} for queries of {q} are not modelled")
    caches = (q,) if backend == "fa3" else (q, *FP8)
    require(kv in caches, f"{backend} kernels with queries of {q} read caches of {caches}, and this one is {kv}")


def check_group(num_qo_heads: int, num_kv_heads: int) -> None:
    """
    Check the number of query heads that share a key head, for CUDA cores.

    Raises:
        RuntimeError: There is no such kernel.
    """
    if num_qo_heads // num_kv_heads not in _CUDA_CORE_GROUPS:
        raise RuntimeError(f"Unsupported group_size: {num_qo_heads // num_kv_heads}")
