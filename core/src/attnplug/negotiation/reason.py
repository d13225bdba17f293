"""What verdicts are made of, as data: the reasons that refuse a candidate, the fix, and what is unverified."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import attrs
from attrs import field, frozen

from attnplug.errors import shown
from attnplug.negotiation.received import (
    check_received,
    is_table,
    is_text,
    is_wanted,
    list_of,
    one_of,
    optional,
    refuse_received,
)
from attnplug.request.device import Device
from attnplug.request.fields import FIELDS
from attnplug.request.tables import freeze, thaw

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from attnplug.request.requirements import Requirements

Code = Literal[
    "unsupported",
    "undeclared",
    "rule",
    "work",
    "missing",
    "version",
    "absent",
    "blocked",
    "api",
    "probe",
    "probe_device",
    "broken",
    "pair",
]
_OF_DEVICE: Final = {"device_type": "is", "device_name": "is", "vendor": "is from"}
"""How a device has what a field says; it "has" everything else."""


@frozen
class Reason:
    """
    One reason against a candidate.

    Attributes:
        code: ``undeclared`` (the field is not supported at all), ``unsupported`` (not this value), ``rule`` (a
            combination), ``work`` (its rules need more evaluations than are made), ``missing`` and ``version`` (a
            required distribution), ``absent`` (the plugin is not installed), ``blocked`` (by the settings), ``api``
            (another major version of the contract). What a plugin's probe refuses: ``probe`` (this request on this
            device), ``probe_device`` (every request on this device), ``broken`` (everything; also where the manifest
            or the plugin's code fails). ``pair``: two candidates that are no routed pair.
        field: The field that it is about, or the requirement, or the plugin.
        wanted: The requested value, as a plain value that hashes: lists are tuples, tables are tuples of pairs.
        supported: What is supported, in words; of a probe what it found. Empty where that is nothing.
        because: The explanation of the manifest or of the failure, of a probe its fix, or an empty text.
    """

    code: Code
    field: str
    wanted: Any = attrs.field(converter=freeze)
    supported: str
    because: str = ""

    @property
    def requested(self) -> str:
        """The fields with their values, as ``head_size=256 with causal=False``."""
        names = self.field.split(" and ")
        values = self.wanted if len(names) > 1 and isinstance(self.wanted, tuple) else (self.wanted,)
        pairs = zip(names, values, strict=False)  # of a reason that a plugin or another process has written
        return " with ".join(f"{name}={value}" if name in FIELDS else str(value) for name, value in pairs)

    def __str__(self) -> str:
        return f"{self._claim()}: {self.because}" if self.because else self._claim()

    def _claim(self) -> str:
        if self.code in ("unsupported", "undeclared"):
            return self._claim_about_value()
        if self.code != "rule":
            return self.supported
        if not self.supported:
            return f"does not support {self.requested}"
        if self.wanted in (None, ()) or self.field not in FIELDS:
            return f"requires {self.supported}"
        return f"requires {self.supported} (requested: {self.requested})"

    def _claim_about_value(self) -> str:
        if not self.supported:
            return f"does not support {self.requested}"
        if self.field in FIELDS and FIELDS[self.field].kind == "device":  # nobody requests the device that is there
            name = self.field.removeprefix("num_").replace("_", " ")
            return f"requires {name} {self.supported}; the device {_OF_DEVICE.get(self.field, 'has')} {self.wanted}"
        return f"does not support {self.requested}; supported: {self.supported}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**attrs.asdict(self, recurse=False), "wanted": thaw(self.wanted)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Reason:
        """
        Read what `to_dict` wrote.

        Raises:
            DecisionError: It is something else.
        """
        check_received("a reason", data, _REASON)
        return cls(**data)


_CODES: Final = {"broken": 0, "api": 0, "blocked": 0, "absent": 0, "probe_device": 1, "probe": 4}
_KINDS: Final = {"device": 1, "model": 2, "derived": 2, "engine": 3}
_OF_INSTALLATION: Final = 5


def most_important(reasons: Iterable[Reason]) -> Reason | None:
    """
    Return the reason that says most: what is broken or excluded, then what no request changes (the device, then the
    model), then the engine's fields, and what could be installed last. Of equals the first; None where there is none.
    """
    return min(reasons, key=_importance, default=None)


def _importance(reason: Reason) -> int:
    if reason.code in _CODES:
        return _CODES[reason.code]
    kinds = (FIELDS[name].kind for name in reason.field.split(" and ") if name in FIELDS)
    return min((_KINDS[kind] for kind in kinds if kind in _KINDS), default=_OF_INSTALLATION)


@frozen
class Fix:
    """
    One fix. Applying all of its parts makes the candidate serve; where `lacks` or `needs` are not empty there is
    no fix.

    Attributes:
        install: Requirements to install, as pip takes them. The text offers a command for those that are safe in it.
        engine: Engine fields to request instead, with their values.
        device: The device to run on instead.
        action: A step in words: a setting to change, a plugin to repair.
        lacks: What the model requests and the candidate does not support.
        needs: What the candidate requires of every request, and the model does not request.
    """

    install: tuple[str, ...] = ()
    engine: Mapping[str, Any] = field(factory=dict, hash=False)
    device: Device | None = None
    action: str = ""
    lacks: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()

    @property
    def possible(self) -> bool:
        """Whether there is a fix at all."""
        return not (self.lacks or self.needs)

    def apply(self, requirements: Requirements, device: Device) -> tuple[Requirements, Device]:
        """Return the requirements and the device as the fix changes them."""
        return (requirements.evolve(**self.engine) if self.engine else requirements), self.device or device

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values; ``text`` is the fix in words."""
        return {
            "install": list(self.install),
            "engine": {
                name: FIELDS[name].domain.dump(value) if value is not None else None
                for name, value in self.engine.items()
            },
            "device": self.device.to_dict() if self.device else None,
            "action": self.action,
            "lacks": list(self.lacks),
            "needs": list(self.needs),
            "text": str(self),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Fix:
        """
        Read what `to_dict` wrote.

        Raises:
            DecisionError: It is something else.
            DeviceError: Its device is invalid.
        """
        check_received("a fix", data, _FIX)
        try:
            engine = {
                name: FIELDS[name].domain.canonical(value) if value is not None else None
                for name, value in data["engine"].items()
            }
        except (KeyError, ValueError):
            refuse_received(f"engine={shown(data['engine'])} of a fix")
        device = Device.from_dict(data["device"]) if data["device"] is not None else None
        return cls(tuple(data["install"]), engine, device, data["action"], tuple(data["lacks"]), tuple(data["needs"]))

    def __str__(self) -> str:
        return "; ".join(self.steps())

    def steps(self) -> Iterator[str]:
        """
        Yield what to do, a step each, or that there is no fix; a command can be copied as it stands. Where another
        device is part of the fix, what to install there is left out: this machine has no use for it.
        """
        if not self.possible:
            lacks = [f"does not support {', '.join(self.lacks)}"] if self.lacks else []
            needs = [f"requires {', '.join(self.needs)}"] if self.needs else []
            yield f"none: this variant {', and '.join(lacks + needs)}"
            return
        if self.device is None:
            yield from filter(None, (self.action,))
            yield from self._steps_to_install() if self.install else ()
        changes = ", ".join(f"{name}={value!r}" for name, value in self.engine.items())
        if changes:
            yield f"request {changes}"
        if self.device is not None:
            yield f"run on {self.device}"

    def _steps_to_install(self) -> Iterator[str]:
        from attnplug.negotiation.install import steps_to_install  # noqa: PLC0415 - shlex; most requests need no fix

        return steps_to_install(self.install)


@frozen
class Unverified:
    """
    One thing that no evidence covers.

    Attributes:
        field: The field; ``device`` where no evidence is for such a device, ``distribution`` where it is for another
            version only.
        value: The requested value, the device, or what is installed; a plain value.
        because: What is verified instead.
    """

    field: str
    value: Any = attrs.field(converter=freeze)
    because: str

    def __str__(self) -> str:
        if self.field == "device":
            return self.because
        subject = str(self.value) if self.field == "distribution" else f"{self.field}={self.value}"
        return f"{subject} ({self.because})"

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {**attrs.asdict(self, recurse=False), "value": thaw(self.value)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Unverified:
        """
        Read what `to_dict` wrote.

        Raises:
            DecisionError: It is something else.
        """
        check_received("what is unverified", data, _UNVERIFIED)
        return cls(**data)


_REASON = {
    "code": one_of(*get_args(Code)),
    "field": is_text,
    "wanted": is_wanted,
    "supported": is_text,
    "because": is_text,
}
_FIX = {
    "install": list_of(is_text),
    "engine": is_table,
    "device": optional(is_table),
    "action": is_text,
    "lacks": list_of(is_text),
    "needs": list_of(is_text),
    "text": is_text,
}
_UNVERIFIED = {"field": is_text, "value": is_wanted, "because": is_text}
