"""How messages show a value that may be anything: short, and never raising."""

from __future__ import annotations

from reprlib import Repr
from typing import Final

_MOST_BITS: Final = 400  # 120 digits; Python itself refuses to write out more than 4,300


class _Short(Repr):
    """Bounds the length and the depth of what it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = 240
        self.maxlist = self.maxtuple = self.maxset = self.maxfrozenset = self.maxdict = 24

    def repr_int(self, value: int, level: int) -> str:
        """Return the digits of a number, or its size where they fill lines."""
        del level
        return repr(value) if value.bit_length() <= _MOST_BITS else f"<an int of {value.bit_length()} bits>"


_SHORT: Final = _Short()


def shown(value: object) -> str:
    """Return the repr of a value, cut to a length that a message can hold; its class where it has none."""
    try:
        return _SHORT.repr(value)
    except Exception:  # noqa: BLE001 - a repr runs foreign code, and the message about the value matters more
        return f"<{type(value).__name__}>"
