"""Whether tensors that a call writes may be written, and share no memory with what it reads: addresses alone."""

from __future__ import annotations

from operator import mul
from typing import TYPE_CHECKING, NoReturn

import torch

from attnplug.contract.guards._format import describe
from attnplug.contract.inputs.kv_cache import in_one_storage
from attnplug.errors import TensorError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from attnplug.contract.inputs.kv_cache import KVCache


def extent(tensor: Tensor) -> int:
    """Return the bytes from the first element of a tensor to its last, both included."""
    strides = tensor.stride()
    last = sum(map(mul, tensor.shape, strides)) - sum(strides)  # of each axis the size less 1, times the stride
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def share_memory(one: Tensor, other: Tensor) -> bool:
    """
    Whether two tensors share an element.

    Rows of equal distance that take turns, as the parts of one fused tensor do, share none. Of other tensors of which
    one begins before the other ends, the answer is yes.
    """
    start, other_start = one.data_ptr(), other.data_ptr()
    if start + extent(one) <= other_start or other_start + extent(other) <= start:
        return False
    step, other_step = (tensor.stride(0) * tensor.element_size() for tensor in (one, other))
    width, other_width = extent(one[:1]), extent(other[:1])
    if step != other_step or width > step or other_width > step:
        return True
    gap = (other_start - start) % step
    return gap < width or step - gap < other_width


def has_apart_rows(tensor: Tensor) -> bool:
    """Whether no two elements of a 2-D view overlap in memory."""
    (rows, columns), (down, across) = tensor.shape, tensor.stride()
    if rows <= 1 or columns <= 1:
        return (rows <= 1 or down > 0) and (columns <= 1 or across > 0)
    return down >= across * columns > 0 or across >= down * rows > 0


def check_writable(layer: str, name: str, tensor: Tensor) -> None:
    """
    Check that this thread may write a tensor in place.

    Raises:
        TensorError: It requires a gradient, or is an inference tensor outside of inference mode.
    """
    if tensor.requires_grad and torch.is_grad_enabled():
        raise TensorError(
            f"layer {layer!r} was given {name} that requires a gradient",
            f"{name} is written in place, and attention has no backward pass here",
            "call it under torch.inference_mode() or torch.no_grad()",
        )
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        raise TensorError(
            f"layer {layer!r} was given {name} of {describe(tensor)}, made in inference mode",
            "torch writes inference tensors in inference mode only, and it is off",
            f"call it under torch.inference_mode(), or make {name} outside of it",
        )


def check_cache_writable(layer: str, kv_cache: KVCache) -> None:
    """
    Check that this thread may write a KV cache in place.

    Raises:
        TensorError: As `check_writable` says.
    """
    for tensor in kv_cache.tensors.values() if kv_cache.is_inference or kv_cache.requires_grad else ():
        check_writable(layer, "a KV cache", tensor)


def _refuse_shared(layer: str, written: str, read: str) -> NoReturn:
    """Raise for a tensor that is written over another one."""
    raise TensorError(
        f"layer {layer!r} was given {written} and {read} that share memory",
        f"{written} is written while {read} is in use",
        f"pass {written} with memory for itself: torch.empty",
    )


def overlaps(span: tuple[int, int], others: Iterable[tuple[int, int]]) -> bool:
    """Whether a span of addresses has one in common with another."""
    start, end = span
    return True in [start < other_end and other_start < end for other_start, other_end in others]


def are_apart(layer: str, pairs: Iterable[tuple[str, Tensor, str, Tensor]]) -> bool:
    """
    Whether the storages of each pair are apart.

    Raises:
        TensorError: The tensors themselves are not: the first one is written.
    """
    apart = True
    for written, one, read, other in pairs:
        if in_one_storage(one, other):
            apart = False
            if share_memory(one, other):
                _refuse_shared(layer, written, read)
    return apart
