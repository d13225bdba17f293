"""What all guards use: how they describe tensors, and the form and range of index tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NoReturn

import torch

from attnplug.errors import BatchError, CacheError, NotNegotiatedError, TensorError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def shape_text(shape: Iterable[object]) -> str:
    """Return ``"(2, 3)"``, whatever kind of sequence holds the numbers."""
    return str(tuple(shape))


def describe(tensor: Tensor) -> str:
    """Return a tensor's shape, dtype and device: ``"(2, 3) bfloat16 on cuda:0"``."""
    return f"{shape_text(tensor.shape)} {dtype_name(tensor.dtype)} on {tensor.device}"


def layers_text(names: Sequence[str]) -> str:
    """Return ``"layer 'a'"``, or ``"32 layers from 'a' to 'z'"``."""
    first, last = names[0], names[-1]
    return f"layer {first!r}" if len(names) == 1 else f"{len(names)} layers from {first!r} to {last!r}"


def check_index(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device_type: str) -> None:
    """
    Check one index tensor.

    Raises:
        TensorError: Its shape, dtype or device differ.
    """
    if (
        tensor.shape != shape
        or tensor.dtype is not dtype
        # The name of a device is made for each call, and a batch has many tensors.
        or not (
            tensor.is_cpu
            if device_type == "cpu"
            else tensor.is_cuda
            if device_type == "cuda"
            else tensor.device.type == device_type
        )
    ):
        raise TensorError(
            f"{name} of {describe(tensor)} was given",
            f"it is {shape} {dtype_name(dtype)} on {device_type}",
            "pass a tensor of that shape, dtype and device; Batch.from_lengths makes one",
        )


_ABSENT: Final = {
    "seq_lens": "; or select with seq_lens_cpu_kind='absent'",
    "query_start_loc": "; or select with query_lens_cpu_kind='absent'",
}


def check_mirror(name: str, tensor: Tensor, host: Tensor | None, *, exact: bool = True) -> Tensor:
    """
    Return the CPU copy of a tensor, which the guards read in its place.

    Raises:
        BatchError: There is none, or it contradicts a tensor that is on the CPU itself.
        TensorError: It has another shape or dtype, or is not on the CPU.
    """
    if host is None:
        raise BatchError(
            f"no {name}_cpu was given, and {name} is on {tensor.device}",
            "build reads CPU copies alone, so that it never waits for the device",
            f"pass {name}_cpu=..., the values that the host computed {name} from" + _ABSENT.get(name, ""),
        )
    if host is tensor and host.is_cpu:
        return host
    check_index(f"{name}_cpu", host, tuple(tensor.shape), tensor.dtype, "cpu")
    if tensor.is_cpu and not (torch.equal(tensor, host) if exact else bool((tensor <= host).all())):
        raise BatchError(
            f"{name} and {name}_cpu were given with different values",
            f"{name}_cpu is the CPU copy of {name}" + ("" if exact else ", or an upper bound of it"),
            f"leave {name}_cpu out where {name} is on the CPU",
        )
    return host


def duplicate_of(values: Tensor) -> int | None:
    """Return an element of a one-dimensional tensor that occurs twice, or None."""
    ordered = values.sort().values
    twice = ordered[1:][ordered.diff() == 0]
    return int(twice[0]) if twice.numel() else None


def refuse_slot_of_two(slot: int) -> NoReturn:
    """Raise for a slot that two tokens have."""
    raise CacheError(
        f"slot {slot} was given to two tokens",
        "each slot holds the K/V of one token",
        "pass a separate slot for every token",
    )


def refuse_unrequested(given: str, expected: str, wanted: str) -> NoReturn:
    """Raise for what a batch has without its requirement."""
    raise NotNegotiatedError(
        f"{given} was given", expected, f"select again with {wanted} in the requirements, or leave it out of the batch"
    )
