"""Why a candidate cannot serve, as data; words are made at the edge."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, cast

import attrs
from attrs import field, frozen

from attnplug.negotiation.agreement import Agreement
from attnplug.negotiation.unverified import Unverified
from attnplug.request.device import Device
from attnplug.request.fields import FIELDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attnplug.request.requirements import Requirements

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
        because: The explanation of the manifest or of the failure, of a probe its fix, or an empty text.
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


@frozen
class Fix:
    """
    One fix. Applying all of its parts makes the candidate serve; where `lacks` or `needs` are not empty there is
    none.

    Attributes:
        install: Requirements to install, as pip takes them.
        engine: Engine fields to ask for instead, with their values.
        device: The device to run on instead.
        action: A step in words: a setting to change, a plugin to repair.
        lacks: What the model asks for and the candidate does not serve.
        needs: What the candidate serves nothing without, and the model does not ask for.
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
        """Return the question as the fix would ask it."""
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
        """Read what `to_dict` wrote."""
        engine = {
            name: FIELDS[name].domain.canonical(value) if value is not None else None
            for name, value in data["engine"].items()
        }
        device = Device.from_dict(data["device"]) if data["device"] else None
        return cls(tuple(data["install"]), engine, device, data["action"], tuple(data["lacks"]), tuple(data["needs"]))

    def __str__(self) -> str:
        if not self.possible:
            lacks = [f"lacks {', '.join(self.lacks)}"] if self.lacks else []
            needs = [f"needs {', '.join(self.needs)}"] if self.needs else []
            return f"none: this variant {', and '.join(lacks + needs)}"
        parts = [self.action] if self.action else []
        parts += (
            [
                "pip install "
                + " ".join(f"'{text}'" if " " in text or "<" in text or ">" in text else text for text in self.install)
            ]
            if self.install
            else []
        )
        parts += (
            ["ask for " + ", ".join(f"{name}={value!r}" for name, value in self.engine.items())] if self.engine else []
        )
        parts += [f"run on {self.device}"] if self.device else []
        return "; ".join(parts)


Status = Literal["chosen", "eligible", "refused", "absent", "missing_dependency", "broken"]


def _nothing() -> None:
    return None


def _nothing_unverified(_: Agreement) -> tuple[Unverified, ...]:
    return ()


@frozen
class Verdict:
    """
    The answer to one candidate.

    Attributes:
        id: ``backend/variant``.
        status: ``chosen``, ``eligible`` (it could serve too), ``refused`` (it cannot serve this),
            ``absent`` (not installed), ``missing_dependency`` (it could serve, and something that it requires is
            missing) or ``broken``.
        reasons: Everything that stands against it, not only the first.
        emulated: Asked-for features that it emulates, and at what cost.
        distribution: The distribution that offers it, with its version.

    The agreement, the fix and what is unverified are worked out when they are first read, since most never are.
    """

    id: str
    status: Status
    reasons: tuple[Reason, ...] = ()
    emulated: Mapping[str, str] = field(factory=dict, hash=False)
    distribution: str = ""
    _agree: Callable[[], Agreement | None] = field(default=_nothing, repr=False, eq=False, alias="agree")
    _find_fix: Callable[[], Fix | None] = field(default=_nothing, repr=False, eq=False, alias="find_fix")
    _find_unverified: Callable[[Agreement], tuple[Unverified, ...]] = field(
        default=_nothing_unverified, repr=False, eq=False, alias="find_unverified"
    )
    _found: dict[str, Any] = field(factory=dict, init=False, repr=False, eq=False)

    @property
    def agreement(self) -> Agreement | None:
        """The terms, where it is chosen or eligible."""
        if "agreement" not in self._found:
            self._found["agreement"] = self._agree()
        return cast("Agreement | None", self._found["agreement"])

    @property
    def fix(self) -> Fix | None:
        """The smallest change that makes the candidate serve; None where it already does."""
        if "fix" not in self._found:
            self._found["fix"] = self._find_fix()
        return cast("Fix | None", self._found["fix"])

    @property
    def unverified(self) -> tuple[Unverified, ...]:
        """
        What was asked for and no evidence covers on this device, where it is chosen or eligible. It decides nothing.
        """
        if "unverified" not in self._found:
            agreed = self.agreement
            self._found["unverified"] = () if agreed is None else self._find_unverified(agreed)
        return cast("tuple[Unverified, ...]", self._found["unverified"])

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, the fix and what is unverified included."""
        return {
            "id": self.id,
            "status": self.status,
            "reasons": [reason.to_dict() for reason in self.reasons],
            "emulated": dict(self.emulated),
            "agreement": self.agreement.to_dict() if self.agreement else None,
            "distribution": self.distribution,
            "fix": self.fix.to_dict() if self.fix else None,
            "unverified": [item.to_dict() for item in self.unverified],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Verdict:
        """Read what `to_dict` wrote."""
        unverified = tuple(Unverified.from_dict(item) for item in data["unverified"])
        fix = Fix.from_dict(data["fix"]) if data["fix"] else None
        agreement = Agreement.from_dict(data["agreement"]) if data["agreement"] else None
        return cls(
            id=data["id"],
            status=data["status"],
            reasons=tuple(Reason.from_dict(reason) for reason in data["reasons"]),
            emulated=data["emulated"],
            distribution=data["distribution"],
            agree=lambda: agreement,
            find_fix=lambda: fix,
            find_unverified=lambda _: unverified,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Verdict.from_dict, (self.to_dict(),)
