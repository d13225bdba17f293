"""Calls for which torch's own operator was measured to be faster than a backend: they are left to torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import frozen

if TYPE_CHECKING:
    from attnplug import Device


@frozen
class Measured:
    """
    A row of an evidence page in which torch's own operator is more than 3 % faster on the device.

    Attributes:
        backend: The candidate that was measured.
        capability: Compute capability of the GPU.
        keys: Keys of the longest sequence: calls with so many or fewer are left to torch.
        ratio: Time of torch's operator on the device, as a fraction of the backend's.
        row: The row.
    """

    backend: str
    capability: tuple[int, int]
    keys: int
    ratio: float
    row: str


SOURCE: Final = "docs/reference/evidence/torch-h200.md"

FASTER_NATIVELY: Final = (
    Measured("flash_attn/fa3_vllm", (9, 0), 8, 0.62, "sdpa causal 1x4x8x64"),
    Measured("flash_attn/fa4", (9, 0), 8, 0.86, "sdpa causal 1x4x8x64"),
)
"""The rows of `SOURCE`. The next longer sequences there have 2,048 keys, for which both backends are faster."""


def measured_keys(keys: int) -> int | None:
    """Return the keys of the rows that a call with so many keys counts among; None for more than in any row."""
    return min((one.keys for one in FASTER_NATIVELY if keys <= one.keys), default=None)


def slower_than_native(backend: str, device: Device, keys: int) -> str:
    """
    Return why torch's own operator is preferred to a backend, or nothing.

    Args:
        backend: The candidate, ``backend/variant``.
        device: The device.
        keys: Keys of the longest sequence.
    """
    here = device.compute_capability
    for one in FASTER_NATIVELY:
        is_here = here is not None and one.capability == (here.major, here.minor)
        if is_here and one.backend == backend and keys <= one.keys:
            return (
                f"{backend} was measured slower for {one.keys} keys: torch's own operator took {one.ratio:.2f} of its "
                f"time ({SOURCE}: {one.row}); name a backend to run it"
            )
    return ""
