"""Calls for which a host's own attention was measured to be faster than a backend: such hosts run it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

if TYPE_CHECKING:
    from attnplug.request.device import Device


@frozen
class NativeRow:
    """
    A row of an evidence page in which native attention is more than 3 % faster on the device.

    Attributes:
        backend: The candidate that was measured, ``backend/variant``.
        capability: Compute capability of the GPU.
        keys: Keys of the longest sequence: calls with so many or fewer count among the row.
        ratio: Time of native attention on the device, as a fraction of the backend's.
        row: The row's name on the page.
    """

    backend: str
    capability: tuple[int, int]
    keys: int
    ratio: float
    row: str


class NativeRows:
    """
    The rows of a page.

    Args:
        source: The page.
        rows: Its rows.
    """

    def __init__(self, source: str, *rows: NativeRow) -> None:
        self.source = source
        self.rows = rows
        self._keys = sorted({one.keys for one in rows})

    def keys_of(self, keys: int) -> int:
        """Return the keys of the rows that a call with so many keys counts among; 0 for more than in any row."""
        for most in self._keys:  # TorchDynamo traces it
            if keys <= most:
                return most
        return 0

    def reason(self, backend: str, device: Device, keys: int) -> str:
        """
        Return why native attention is preferred to a backend, or nothing.

        Args:
            backend: The candidate, ``backend/variant``.
            device: The device.
            keys: Keys of the longest sequence.
        """
        here = device.compute_capability
        for one in self.rows:
            is_here = here is not None and one.capability == (here.major, here.minor)
            if is_here and one.backend == backend and keys <= one.keys:
                return (
                    f"{backend} was measured slower for {one.keys} keys: native attention took {one.ratio:.2f} of its "
                    f"time ({self.source}: {one.row}); name a backend to run it"
                )
        return ""
