"""Collectives of the ranks, through torch.distributed. Differences between its backends and releases stay here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from attnplug.errors import LimitsError

if TYPE_CHECKING:
    from attnplug.contract import Parallel

_WITHOUT_REDUCE_SCATTER: Final = frozenset({"gloo", "mpi"})
"""Backends whose reduce-scatter is missing in some supported releases of torch, or is a whole all-reduce."""

_SYNCHRONIZING: Final = frozenset({"gloo", "mpi"})
"""Backends that copy device tensors to the CPU, and so synchronize."""


class Ranks:
    """
    The ranks that share each sequence. All ranks make the same calls in the same order.

    Args:
        parallel: Sizes, and the process group.
        device: The device of all tensors.

    Raises:
        LimitsError: The process group is missing, contradicts the sizes, or does not support the device.

    Attributes:
        size: The number of ranks.
        rank: The index of this rank.
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
            tensor: Of the same shape and dtype on all ranks. Any dtype, since it is sent as bytes.
        """
        mine = tensor.contiguous().view(-1).view(torch.uint8)
        found = mine.new_empty(self.size * mine.shape[0])
        _call("all_gather_single", "all_gather_into_tensor")(found, mine, group=self._group)
        return found.view(tensor.dtype).view(self.size, *tensor.shape)

    def reduce_scatter(self, parts: Tensor, *, in_order: bool = False) -> Tensor:
        """
        Return the sum of all ranks' parts for this rank, ``(...)``.

        Args:
            parts: ``(size, ...)`` contiguous, this rank's part for each rank.
            in_order: Whether parts are added in the order of the ranks. Libraries choose the order by message size, so
                that it depends on the whole batch.
        """
        if in_order or not self._reduces:
            return self._exchange(parts)
        found = torch.empty_like(parts[0])
        _call("reduce_scatter_single", "reduce_scatter_tensor")(found.view(-1), parts.view(-1), group=self._group)
        return found

    def _exchange(self, parts: Tensor) -> Tensor:
        """Send each rank its part, and sum here. It sends as many bytes as a ring reduce-scatter."""
        found = torch.empty_like(parts)
        dist.all_to_all_single(found, parts, group=self._group)
        total = found[0]
        for part in found[1:]:
            total += part
        return total


def _call(name: str, former_name: str) -> Any:
    """Return a function of torch.distributed by its current name, or by that of earlier releases."""
    return getattr(dist, name, None) or getattr(dist, former_name)


def _checked(parallel: Parallel) -> dist.ProcessGroup:
    group, size = parallel.dcp_group, parallel.dcp_size
    if not isinstance(group, dist.ProcessGroup):
        _refuse(
            f"dcp_group={group!r} was given with dcp_size={size}",
            "ranks that share a sequence communicate through a torch process group that contains them",
        )
    found = (dist.get_world_size(group), dist.get_rank(group))
    if found != (size, parallel.dcp_rank):
        _refuse(
            f"dcp_size={size} and dcp_rank={parallel.dcp_rank} were given",
            f"dcp_group has {found[0]} ranks, and this process is its rank {found[1]}",
        )
    return group


def _backend_of(group: dist.ProcessGroup, device_type: str) -> str:
    """Return the group's backend for a device type; a group may have several backends."""
    pairs = (pair.partition(":") for pair in dist.get_backend_config(group).split(","))
    backends = {device: backend for device, _, backend in pairs}
    backend = backends.get(device_type)
    if backend is None or (device_type != "cpu" and backend in _SYNCHRONIZING):
        _refuse(
            f"a dcp_group with the backends {dist.get_backend_config(group)} was given for a {device_type} device",
            f"it has no backend for {device_type}"
            if backend is None
            else f"{backend} copies tensors to the CPU, and so synchronizes in each layer",
        )
    return backend


def _refuse(problem: str, expected: str) -> NoReturn:
    raise LimitsError(
        problem,
        expected,
        "pass torch.distributed.new_group(ranks), with NCCL on NVIDIA GPUs, as dcp_group of Parallel",
    )
