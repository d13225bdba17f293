"""How much memory a device has left for caches."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attnplug.errors import LimitsError

if TYPE_CHECKING:
    from collections.abc import Callable


def free_bytes(device: torch.device, fraction: float, run: Callable[[], object]) -> int | None:
    """
    Return the bytes that may still be taken, or None on a device that does not say.

    Args:
        device: The device.
        fraction: The share of the whole device that may be in use when all is taken, other processes included.
        run: The largest step that there will be, without caches; what it needs on top of what is in use is kept free.

    Raises:
        LimitsError: The fraction is none.
    """
    if isinstance(fraction, bool) or not isinstance(fraction, (int, float)) or not 0 < fraction <= 1:
        raise LimitsError(
            f"memory_fraction={fraction!r} was given",
            "it is a share of the device's memory, above 0 and at most 1",
            "leave it out for 0.9",
        )
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    run()
    torch.cuda.synchronize(device)
    needed = torch.cuda.max_memory_allocated(device) - before
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(fraction * total) - (total - free) - needed
