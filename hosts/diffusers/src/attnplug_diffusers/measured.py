"""Calls for which diffusers' native attention was measured to be faster than a backend: it runs them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import frozen

if TYPE_CHECKING:
    from attnplug import Device


@frozen
class Measured:
    """
    A row of an evidence page in which native attention is more than 3 % faster on the device.

    Attributes:
        backend: The candidate that was measured.
        capability: Compute capability of the GPU.
        keys: Keys of each sequence: calls with so many or fewer are native.
        ratio: Time of native attention on the device, as a fraction of the backend's.
        row: The row.
    """

    backend: str
    capability: tuple[int, int]
    keys: int
    ratio: float
    row: str


SOURCE: Final = "docs/reference/evidence/diffusers-h200.md"

FASTER_NATIVELY: Final = (
    Measured("flash_attn/fa3_vllm", (9, 0), 512, 0.74, "Wan 1.3B, 480p, 81 frames: cross"),
    Measured("flash_attn/fa3_vllm", (9, 0), 1536, 0.93, "Flux, 512 px: joint"),
    Measured("flash_attn/fa4", (9, 0), 512, 0.77, "Wan 1.3B, 480p, 81 frames: cross"),
)
"""The rows of `SOURCE`. From 4,429 keys on, both backends are faster in every row."""

_KEYS: Final = sorted({one.keys for one in FASTER_NATIVELY})


def measured_keys(keys: int) -> int:
    """Return the keys of the rows that a call with so many keys counts among; 0 for more than in any row."""
    for most in _KEYS:  # TorchDynamo traces it
        if keys <= most:
            return most
    return 0


def slower_than_native(backend: str, device: Device, keys: int) -> str:
    """
    Return why native attention is preferred to a backend, or nothing.

    Args:
        backend: The candidate, ``backend/variant``.
        device: The device.
        keys: Keys of each sequence.
    """
    here = device.compute_capability
    for one in FASTER_NATIVELY:
        is_here = here is not None and one.capability == (here.major, here.minor)
        if is_here and one.backend == backend and keys <= one.keys:
            return (
                f"{backend} was measured slower for {one.keys} keys: native attention took {one.ratio:.2f} of its time "
                f"({SOURCE}: {one.row}); name a backend to run it"
            )
    return ""
