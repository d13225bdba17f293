"""What ranks say to each other, through torch.distributed: the one place that knows its backends and its releases."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from attnplug.errors import LimitsError

if TYPE_CHECKING:
    from attnplug.contract import Parallel

_WITHOUT_REDUCE_SCATTER: Final = frozenset({"gloo", "mpi"})
"""Backends that do not reduce and scatter in every torch this plugin allows, or do it as a whole reduction."""

_THROUGH_THE_HOST: Final = frozenset({"gloo", "mpi"})
"""Backends that bring a device's tensors to the host, and let the host wait for the device."""


class Ranks:
    """
    The ranks that share each sequence. Every rank has to make the same calls in the same order.

    Args:
        parallel: Sizes, and the process group.
        device: Where the tensors of all calls live.

    Raises:
        LimitsError: There is no group, it is another one than the sizes say, or it does not serve the device.

    Attributes:
        size: Ranks.
        rank: This one.
    """

    def __init__(self, parallel: Parallel, device: torch.device) -> None:
        self.size, self.rank = parallel.dcp_size, parallel.dcp_rank
        self._group = _checked(parallel)
        backend = _backend_of(self._group, device.type)
        self._reduces = backend not in _WITHOUT_REDUCE_SCATTER

    def all_gather(self, tensor: Tensor) -> Tensor:
        """
        Return the tensors of all ranks, ``(size, *shape)``.

        Args:
            tensor: Of one shape and dtype on all ranks. Any dtype: bytes are moved.
        """
        mine = tensor.contiguous().view(-1).view(torch.uint8)
        found = mine.new_empty(self.size * mine.shape[0])
        _call("all_gather_single", "all_gather_into_tensor")(found, mine, group=self._group)
        return found.view(tensor.dtype).view(self.size, *tensor.shape)

    def reduce_scatter(self, parts: Tensor, *, in_order: bool = False) -> Tensor:
        """
        Return the sum over all ranks of what they have for this one, ``(...)``.

        Args:
            parts: ``(size, ...)`` contiguous: what this rank has for each.
            in_order: Whether the ranks' parts are added in the order of the ranks, whatever else is in the tensor.
                Libraries choose the order by the size of the message.
        """
        if in_order or not self._reduces:
            return self._exchange(parts)
        found = torch.empty_like(parts[0])
        _call("reduce_scatter_single", "reduce_scatter_tensor")(found.view(-1), parts.view(-1), group=self._group)
        return found

    def _exchange(self, parts: Tensor) -> Tensor:
        """Send each rank its part, and add up here: as many bytes as a ring sends that reduces and scatters."""
        found = torch.empty_like(parts)
        dist.all_to_all_single(found, parts, group=self._group)
        total = found[0]
        for part in found[1:]:
            total += part
        return total


def _call(name: str, before: str) -> Any:
    """Return a function of torch.distributed by its name of today, or by that of earlier releases."""
    return getattr(dist, name, None) or getattr(dist, before)


def _checked(parallel: Parallel) -> dist.ProcessGroup:
    group, size = parallel.dcp_group, parallel.dcp_size
    if not isinstance(group, dist.ProcessGroup):
        _refuse(
            f"dcp_group={group!r} was given with dcp_size={size}",
            "ranks that share a sequence exchange queries and sums through a process group of torch that they are in",
        )
    found = (dist.get_world_size(group), dist.get_rank(group))
    if found != (size, parallel.dcp_rank):
        _refuse(
            f"dcp_size={size} and dcp_rank={parallel.dcp_rank} were given",
            f"the process group given as dcp_group has {found[0]} ranks, and this process is rank {found[1]} of it",
        )
    return group


def _backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """Return the group's backend for a device: groups may have one for each."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    backends = {device: backend for device, _, backend in pairs}
    backend = backends.get(device_type)
    if backend is None or (device_type != "cpu" and backend in _THROUGH_THE_HOST):
        _refuse(
            f"a dcp_group with the backends {dist.get_backend_config(group)} was given for a {device_type} device",
            f"it has no backend for {device_type}"
            if backend is None
            else f"{backend} moves tensors through the host, which waits for the device in each layer",
        )
    return backend


def _refuse(given: str, expected: str) -> NoReturn:
    raise LimitsError(
        given,
        expected,
        "pass the result of torch.distributed.new_group(ranks), of NCCL on NVIDIA GPUs, as dcp_group of Parallel",
    )
