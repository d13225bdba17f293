"""Whether tensors that a call writes may be written, and share no memory with what it reads: addresses alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

import torch

from attnplug.contract.guards._format import describe
from attnplug.errors import TensorError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from attnplug.contract.inputs.kv_cache import Cache


def extent(tensor: Tensor) -> int:
    """Return the bytes from the first element of a tensor to its last, both included."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def in_one_storage(one: Tensor, other: Tensor) -> bool:
    """Whether the memory that two tensors are parts of is the same somewhere. Tensors of the device meta have none."""
    storage, other_storage = one.untyped_storage(), other.untyped_storage()
    start, other_start = storage.data_ptr(), other_storage.data_ptr()
    if not (start and other_start):
        return False
    return start < other_start + other_storage.nbytes() and other_start < start + storage.nbytes()


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
    """Whether no element of a matrix is at the place of another."""
    (rows, columns), (down, across) = tensor.shape, tensor.stride()
    if rows <= 1 or columns <= 1:
        return (rows <= 1 or down > 0) and (columns <= 1 or across > 0)
    return down >= across * columns > 0 or across >= down * rows > 0


def tensors_in(kv_cache: Cache | None) -> tuple[Tensor, ...]:
    """Return the tensors of a cache."""
    if kv_cache is None:
        return ()
    return (kv_cache,) if isinstance(kv_cache, torch.Tensor) else tuple(kv_cache.values())


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


def _refuse_shared(layer: str, written: str, read: str) -> NoReturn:
    """Raise for a tensor that is written over another one."""
    raise TensorError(
        f"layer {layer!r} was given {written} and {read} that share memory",
        f"{written} is written while {read} is in use",
        f"pass {written} with memory for itself: torch.empty",
    )


def places_of(kv_cache: Cache | None) -> tuple[int, ...]:
    """Return where the storages of a cache are."""
    return tuple(tensor.untyped_storage().data_ptr() for tensor in tensors_in(kv_cache))


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
