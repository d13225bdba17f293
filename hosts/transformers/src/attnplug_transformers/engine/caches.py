"""The paged caches of a model: how many blocks they have, and their memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch

from attnplug.errors import LimitsError

if TYPE_CHECKING:
    from attnplug.contract import Cache, Limits
    from attnplug_transformers.engine.groups import Groups

CPU_BYTES: Final = 2**30
"""Most bytes of all caches on a device that does not say how much memory it has free."""


def make_caches(groups: Groups, num_blocks: int, device: torch.device) -> dict[str, Cache]:
    """
    Return the cache of each layer, by name.

    Raises:
        LimitsError: There is not enough memory.
    """
    try:
        return {
            layer.learned.name: groups.backends[layer.group].make_cache(num_blocks, device, impl=layer.impl)
            for layer in groups.layers
        }
    except torch.OutOfMemoryError as error:
        raise LimitsError(
            f"caches of {num_blocks} blocks were asked for, {num_blocks * groups.bytes_per_block / 2**30:.2f} GiB",
            f"{device} has not enough memory: {error}",
            "pass a smaller num_blocks or memory_fraction",
        ) from error


def count_blocks(groups: Groups, limits: Limits, device: torch.device, free_bytes: int | None) -> int:
    """
    Return how many blocks the caches get where the caller names no number.

    As many as all requests of the largest step may need, and the null block; fewer where memory ends before: on CUDA
    what is free, elsewhere `CPU_BYTES`.

    Args:
        groups: The backends.
        limits: The largest step.
        device: Where the caches live.
        free_bytes: Bytes that caches and workspaces may take; None where the device does not say.

    Raises:
        LimitsError: Not even two blocks fit.
    """
    most = limits.max_num_reqs * -(-limits.max_seq_len // groups.block_size) + 1
    room = CPU_BYTES if free_bytes is None else free_bytes - groups.workspace_bytes(limits)
    fitting = room // groups.bytes_per_block
    if fitting < 2:
        raise LimitsError(
            f"{max(0, room) / 2**20:.0f} MiB of {device} are left for the caches",
            f"two blocks, the least, take {2 * groups.bytes_per_block / 2**20:.1f} MiB",
            "pass a larger memory_fraction, or smaller max_num_tokens, max_num_reqs or block_size",
        )
    return min(most, fitting)
