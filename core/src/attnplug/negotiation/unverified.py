"""One thing that was asked for and that nobody has verified, as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs
from attrs import frozen

if TYPE_CHECKING:
    from collections.abc import Mapping


@frozen
class Unverified:
    """
    One thing that nobody has verified.

    Attributes:
        field: The field; ``device`` where no evidence is for such a device, ``distribution`` where it is for another
            version only.
        value: The value asked for, the device, or what is installed; a plain value.
        because: What is known instead.
    """

    field: str
    value: Any
    because: str

    def __str__(self) -> str:
        if self.field == "device":
            return self.because
        asked = str(self.value) if self.field == "distribution" else f"{self.field}={self.value}"
        return f"{asked} ({self.because})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return attrs.asdict(self, recurse=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Unverified:
        """Read what `to_dict` wrote."""
        return cls(**data)
