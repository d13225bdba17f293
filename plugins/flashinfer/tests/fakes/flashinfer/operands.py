"""The tensors of a run: queries, KV cache, outputs and LSE."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashinfer.misuse import require


def check_query(query: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    """
    Check the queries.

    Raises:
        ValueError: They have another dtype than the plan, or another number of rows.
        MisuseError: They have another shape or device, or their heads are not contiguous.
    """
    if query.dtype != dtype:
        raise ValueError(f"The dtype of q {query.dtype} does not match the q_data_type {dtype} specified in plan")
    if query.shape[:1] != shape[:1]:
        raise ValueError(f"q.shape[0] ({query.shape[0]}) does not match the {shape[0]} rows of the plan")
    check_rows("q", query, shape, device)


def check_rows(name: str, tensor: Tensor, shape: tuple[int, ...], device: torch.device) -> None:
    """
    Check a tensor that kernels read by its strides, in steps of 16 bytes.

    Raises:
        MisuseError: They would read other memory.
    """
    require(tuple(tensor.shape) == shape, f"{name} has shape {tuple(tensor.shape)}, and the plan requires {shape}")
    require(tensor.device == device, f"{name} is on {tensor.device}, and the wrapper on {device}")
    require(tensor.stride(-1) == 1, f"the last axis of {name} is not contiguous: strides {tensor.stride()}")
    steps = [step * tensor.itemsize for step in tensor.stride()[:-1]]
    require(all(step % 16 == 0 for step in steps), f"{name} has strides of {steps} bytes, which 16 does not divide")


def pages_of(
    cache: Any, layout: str, shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> tuple[Tensor, Tensor]:
    """
    Return the key and value pages of a KV cache, ``(pages, page_size, num_kv_heads, head_size)`` each.

    Args:
        cache: One tensor of 5 axes, or a tuple of two of 4 axes, in the layout.
        layout: ``"NHD"`` or ``"HND"``.
        shape: The page size, heads and head size of the plan.
        dtype: The dtype of the plan.
        device: The device of the wrapper.

    Raises:
        KeyError: The KV cache has another type.
        ValueError: It has another dtype than the plan.
        MisuseError: It has another shape or device, or strides that the kernels cannot follow.
    """
    keys, values = _halves(cache)
    wanted = shape if layout == "NHD" else (shape[1], shape[0], shape[2])
    for name, half in (("key", keys), ("value", values)):
        if half.dtype != dtype:
            raise ValueError(f"The dtype of the {name} cache {half.dtype} does not match the kv_data_type {dtype}")
        check_rows(f"the {name} cache", half, (half.shape[0], *wanted), device)
    require(keys.stride() == values.stride(), f"strides differ: keys {keys.stride()}, values {values.stride()}")
    require(keys.shape[0] == values.shape[0], "keys and values have different numbers of pages")
    return (keys, values) if layout == "NHD" else (keys.transpose(1, 2), values.transpose(1, 2))


def _halves(cache: Any) -> tuple[Tensor, Tensor]:
    if isinstance(cache, tuple):
        keys, values = cache
        require(keys.ndim == values.ndim == 4, "a tuple of caches has 4 axes each")
        return keys, values
    if isinstance(cache, torch.Tensor):
        require(
            cache.ndim == 5 and cache.shape[1] == 2,
            f"a KV cache of shape {tuple(cache.shape)}: keys and values are [:, 0:2]",
        )
        return cache[:, 0], cache[:, 1]
    raise KeyError(f"Unrecognized paged_kv_cache type {type(cache)}, expect a single tensor or a tuple of tensor.")


def output_for(
    query: Tensor, out: Tensor | None, dtype: torch.dtype, *, like_empty: bool = True, size: int | None = None
) -> Tensor:
    """
    Return `out`, or a new tensor.

    Args:
        query: The queries.
        out: The tensor for outputs; None for a new one.
        dtype: The dtype of the plan.
        like_empty: Whether a new tensor has undefined values; the paged prefill wrapper fills it with zeros.
        size: The size of values, where it is not that of queries.

    Raises:
        ValueError: The given tensor has another shape, dtype or device.
        MisuseError: It is not contiguous, and the kernels ignore strides.
    """
    shape = (*query.shape[:2], query.shape[2] if size is None else size)
    if out is None:
        return torch.full(shape, torch.nan if like_empty else 0.0, dtype=dtype, device=query.device)
    _check_result("out", out, shape, dtype, query.device)
    return out


def lse_for(query: Tensor, lse: Tensor | None, *, return_lse: bool) -> Tensor | None:
    """
    Return `lse`, a new tensor, or None if no LSE is requested.

    Raises:
        ValueError: The given tensor has another shape, dtype or device.
        MisuseError: It is not contiguous, or given without return_lse, so that the library does not check it.
    """
    shape = tuple(query.shape[:2])
    if not return_lse:
        require(lse is None, "lse without return_lse=True is not checked, and possibly not written")
        return None
    if lse is None:
        return torch.full(shape, torch.nan, dtype=torch.float32, device=query.device)
    _check_result("lse", lse, shape, torch.float32, query.device)
    return lse


def _check_result(name: str, x: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
    if tuple(x.shape) != shape:
        raise ValueError(f"Invalid shape of {name}: expected {shape}, got {tuple(x.shape)}")
    if x.dtype != dtype:
        raise ValueError(f"Invalid dtype of {name}: expected {dtype}, got {x.dtype}")
    if x.device != device:
        raise ValueError(f"Invalid device of {name}: expected {device}, got {x.device}")
    require(x.is_contiguous(), f"{name} is not contiguous, and is written as if it were: strides {x.stride()}")
