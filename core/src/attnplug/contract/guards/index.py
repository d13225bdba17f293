"""Shapes, dtypes and devices of the index tensors of a batch, and their host copies."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnplug.contract.guards.wording import describe, dtype_name
from attnplug.errors import BatchError, TensorError

if TYPE_CHECKING:
    from torch import Tensor


def check_index(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype, device_type: str) -> None:
    """
    Check one index tensor.

    Raises:
        TensorError: Its shape, dtype or device differ.
    """
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device.type != device_type:
        raise TensorError(
            f"{name} of {describe(tensor)} was given",
            f"it is {shape} {dtype_name(dtype)} on {device_type}",
            "pass a tensor of that shape, dtype and device; Batch.from_lengths makes one",
        )


def check_mirror(name: str, tensor: Tensor, host: Tensor | None, *, exact: bool = True) -> Tensor:
    """
    Return the host copy of a tensor, which the guards read in its place.

    Raises:
        BatchError: There is none, or it contradicts a tensor that is on the CPU itself.
        TensorError: It has another shape or dtype, or is not on the CPU.
    """
    if host is None:
        raise BatchError(
            f"no {name}_cpu was given, and {name} is on {tensor.device}",
            "build reads host copies alone, so that it never waits for the device",
            f"pass {name}_cpu=..., the values that the host computed {name} from"
            + ("; or select with host_lengths='absent'" if name == "seq_lens" else ""),
        )
    if host is tensor:
        return host
    check_index(f"{name}_cpu", host, tuple(tensor.shape), tensor.dtype, "cpu")
    if tensor.is_cpu and not (torch.equal(tensor, host) if exact else bool((tensor <= host).all())):
        raise BatchError(
            f"{name} and {name}_cpu were given with different values",
            f"{name}_cpu is the host copy of {name}" + ("" if exact else ", or an upper bound of it"),
            f"leave {name}_cpu out where {name} is on the CPU",
        )
    return host
