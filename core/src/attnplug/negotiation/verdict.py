"""What became of one candidate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, cast

from attrs import field, frozen

from attnplug.negotiation.agreement import Agreement
from attnplug.negotiation.reason import Reason
from attnplug.negotiation.remedy import Remedy
from attnplug.negotiation.unverified import Unverified

Status = Literal["chosen", "eligible", "refused", "absent", "lacks_dependency", "broken"]


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
            ``absent`` (not installed), ``lacks_dependency`` (it could serve, and something that it requires is
            missing) or ``broken``.
        reasons: Everything that stands against it, not only the first.
        emulated: Asked-for features that it emulates, and at what cost.
        distribution: The distribution that offers it, with its version.

    The agreement, the remedy and what is unverified are worked out when they are first read, since most never are.
    """

    id: str
    status: Status
    reasons: tuple[Reason, ...] = ()
    emulated: Mapping[str, str] = field(factory=dict, hash=False)
    distribution: str = ""
    _agree: Callable[[], Agreement | None] = field(default=_nothing, repr=False, eq=False, alias="agree")
    _find_remedy: Callable[[], Remedy | None] = field(default=_nothing, repr=False, eq=False, alias="find_remedy")
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
    def remedy(self) -> Remedy | None:
        """The smallest change that makes the candidate serve; None where it already does."""
        if "remedy" not in self._found:
            self._found["remedy"] = self._find_remedy()
        return cast("Remedy | None", self._found["remedy"])

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
        """Return plain JSON values, the remedy and what is unverified included."""
        return {
            "id": self.id,
            "status": self.status,
            "reasons": [reason.to_dict() for reason in self.reasons],
            "emulated": dict(self.emulated),
            "agreement": self.agreement.to_dict() if self.agreement else None,
            "distribution": self.distribution,
            "remedy": self.remedy.to_dict() if self.remedy else None,
            "unverified": [item.to_dict() for item in self.unverified],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Verdict:
        """Read what `to_dict` wrote."""
        unverified = tuple(Unverified.from_dict(item) for item in data["unverified"])
        remedy = Remedy.from_dict(data["remedy"]) if data["remedy"] else None
        agreement = Agreement.from_dict(data["agreement"]) if data["agreement"] else None
        return cls(
            id=data["id"],
            status=data["status"],
            reasons=tuple(Reason.from_dict(reason) for reason in data["reasons"]),
            emulated=data["emulated"],
            distribution=data["distribution"],
            agree=lambda: agreement,
            find_remedy=lambda: remedy,
            find_unverified=lambda _: unverified,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Verdict.from_dict, (self.to_dict(),)
