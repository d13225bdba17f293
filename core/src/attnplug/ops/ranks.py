"""
Exchanges queries and partial outputs between the ranks of decode context parallelism, through torch.distributed.

Differences between its backends and releases stay here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from attnplug.errors import LimitsError
from attnplug.ops.triton import triton_function

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


def combine(out: Tensor, lse: Tensor, ranks: Ranks, kv_heads: int, *, in_order: bool) -> tuple[Tensor, Tensor]:
    """
    Merge partial outputs of all ranks by LSE: return the output and the LSE of this rank's heads.

    Args:
        out: ``(tokens, all q_heads, head_size_v)`` over the keys of this rank, contiguous; undefined in rows without
            keys.
        lse: ``(tokens, all q_heads)`` float32, -inf in rows without keys.
        ranks: The ranks.
        kv_heads: The number of KV heads, by which `gather_heads` orders the query heads.
        in_order: As in `Ranks.reduce_scatter`.
    """
    tokens, heads, size = out.shape
    parts = out.new_empty((ranks.size, tokens, heads // ranks.size, size))
    total = lse.new_empty(parts.shape[1:3])
    weigh(out, ranks.all_gather(lse), parts, total, ranks.rank, kv_heads)
    return ranks.reduce_scatter(parts, in_order=in_order), total


def weigh(out: Tensor, lses: Tensor, parts: Tensor, total: Tensor, rank: int, kv_heads: int) -> None:
    """
    Write this rank's part of the output for each rank, and the LSE of this rank's heads over the keys of all ranks.

    Args:
        out: ``(tokens, all q_heads, head_size_v)`` contiguous, undefined in rows without keys.
        lses: ``(ranks, tokens, all q_heads)`` float32, contiguous.
        parts: ``(ranks, tokens, q_heads, head_size_v)`` contiguous, in the dtype of `out`; written.
        total: ``(tokens, q_heads)`` float32, contiguous; written.
        rank: This rank.
        kv_heads: The number of KV heads.
    """
    launch = triton_function("attnplug.ops.triton_ranks", "weigh") if out.is_cuda else None
    if launch is not None:
        launch(out, lses, parts, total, rank, kv_heads)
        return
    sums = lses.logsumexp(0)
    weight = (lses[rank] - sums.masked_fill(sums == -torch.inf, 0.0)).exp().unsqueeze(-1)
    # Rows without keys are undefined, NaN included, and 0 * NaN is NaN. So they are replaced, not scaled.
    parts.copy_(split_heads(torch.where(weight > 0, out * weight, 0.0), parts.shape[0], kv_heads))
    total.copy_(split_heads(sums, parts.shape[0], kv_heads)[rank])


def gather_heads(heads: Tensor, kv_heads: int) -> Tensor:
    """
    Return the query heads of all ranks, ordered by KV head: ``(tokens, ranks * q_heads, ...)``.

    Args:
        heads: ``(ranks, tokens, q_heads, ...)``.
        kv_heads: The number of KV heads. The query heads of a KV head become consecutive.
    """
    size, tokens, count, *rest = heads.shape
    grouped = heads.view(size, tokens, kv_heads, count // kv_heads, *rest)
    return grouped.movedim(0, 2).reshape(tokens, size * count, *rest)


def split_heads(heads: Tensor, size: int, kv_heads: int) -> Tensor:
    """Undo `gather_heads`: return ``(size, tokens, q_heads, ...)``, by rank."""
    tokens, count, *rest = heads.shape
    grouped = heads.view(tokens, kv_heads, size, count // (kv_heads * size), *rest)
    return grouped.movedim(2, 0).reshape(size, tokens, count // size, *rest)


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
