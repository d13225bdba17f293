"""Why a candidate cannot serve, as data; words are made at the edge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import attrs
from attrs import frozen

from attnplug.request.fields import FIELDS

if TYPE_CHECKING:
    from collections.abc import Mapping

Code = Literal["unsupported", "undeclared", "rule", "missing", "version", "absent", "broken", "blocked", "api", "probe"]


def _hashable(value: Any) -> Any:
    """A list of names as a tuple: what JSON gives back is equal to what it was given."""
    return tuple(map(_hashable, value)) if isinstance(value, (list, tuple)) else value


@frozen
class Reason:
    """
    One reason against a candidate.

    Attributes:
        code: ``undeclared`` (the field is not supported at all), ``unsupported`` (not this value),
            ``rule`` (a combination), ``missing`` and ``version`` (a
            requirement), ``absent``, ``broken``, ``blocked``, ``api``, ``probe`` (the plugin itself,
            asked after import about one request).
        field: The field that it is about, or the requirement, or the plugin.
        wanted: The value asked for, as a plain value.
        supported: What is supported, in words.
        because: The explanation of the manifest or of the failure, of a probe its way out, or an empty text.
    """

    code: Code
    field: str
    wanted: Any = attrs.field(converter=_hashable)
    supported: str
    because: str = ""

    @property
    def asked(self) -> str:
        """The fields with their values, as ``head_size=256 with causal=False``."""
        names = self.field.split(" and ")
        values = self.wanted if len(names) > 1 else (self.wanted,)
        pairs = zip(names, values, strict=True)
        return " with ".join(f"{name}={value}" if name in FIELDS else str(value) for name, value in pairs)

    def __str__(self) -> str:
        tail = f": {self.because}" if self.because else ""
        if self.code == "unsupported" and self.field == "device_type":  # nobody has to ask for the device that is there
            return f"the device is {self.wanted}, supported: {self.supported}{tail}"
        if self.code in ("unsupported", "undeclared"):
            return f"{self.asked} asked, supported: {self.supported}{tail}"
        if self.code != "rule":
            return f"{self.supported}{tail}"
        if not self.supported:
            return f"{self.asked} refused{tail}"
        if self.wanted in (None, ()):
            return f"{self.field} not asked for, and needed{tail}"
        return f"{self.asked} asked, needs {self.supported}{tail}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return attrs.asdict(self, recurse=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Reason:
        """Read what `to_dict` wrote."""
        return cls(**data)
