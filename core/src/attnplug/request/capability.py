"""
CUDA compute capabilities: numbers that are only partly ordered.

``9.0`` names hardware. ``9.0a`` names code that runs on exactly that hardware, ``10.0f`` code that runs on its family
(same major number, same or newer minor number). Source: the CUDA C++ Programming Guide, "Feature Set Compiler Targets".
"""

from __future__ import annotations

import re
from typing import Final

from attrs import frozen

_FORM = re.compile(r"([0-9]{1,3})\.([0-9])([af]?)")


@frozen(cache_hash=True)
class ComputeCapability:
    """
    One compute capability.

    Capabilities are not ordered: 12.x is not "more" than 10.x, since code for one does not run on the other. Ranges in
    a manifest compare `number`, because there the author has written both ends down.
    """

    major: int
    minor: int
    suffix: str = ""

    @property
    def number(self) -> tuple[int, int]:
        """(major, minor), what ranges compare."""
        return self.major, self.minor

    def runs(self, hardware: ComputeCapability) -> bool:
        """Whether code built for this capability runs on `hardware`."""
        if self.suffix == "f":
            return hardware.major == self.major and hardware.minor >= self.minor
        return hardware.number == self.number

    def is_whole(self) -> bool:
        """Whether its parts have their types, and are small: whoever constructs it may pass anything."""
        numbers = all(type(part) is int and 0 <= part < 1000 for part in (self.major, self.minor))
        return numbers and type(self.suffix) is str

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}{self.suffix}"


def parse_capability(value: object) -> ComputeCapability:
    """
    Read ``"9.0"``, ``"9.0a"``, ``"10.0f"`` or a (major, minor) pair.

    Raises:
        ValueError: `value` has none of these forms.
    """
    text = value
    if isinstance(value, ComputeCapability):
        text = f"{value.major}.{value.minor}{value.suffix}" if value.is_whole() else None
    elif isinstance(value, (tuple, list)) and len(value) == 2 and all(type(part) is int for part in value):
        text = f"{value[0]}.{value[1]}" if all(0 <= part < 1000 for part in value) else None
    match = _FORM.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        msg = 'a compute capability such as "9.0", "9.0a" or "10.0f"'
        raise ValueError(msg)
    if isinstance(value, ComputeCapability):
        return value
    return ComputeCapability(int(match[1]), int(match[2]), match[3])


HARDWARE: Final = tuple(
    ComputeCapability(*number)
    for number in (
        (7, 0),
        (7, 2),
        (7, 5),
        (8, 0),
        (8, 6),
        (8, 7),
        (8, 9),
        (9, 0),
        (10, 0),
        (10, 3),
        (11, 0),
        (12, 0),
        (12, 1),
    )
)
"""The existing hardware, oldest first. Source: NVIDIA, "CUDA GPU Compute Capability"."""
