"""What selection concludes about one candidate, as data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

from attrs import field, frozen

from attnplug.negotiation.agreement import Agreement
from attnplug.negotiation.reason import Fix, Reason, Unverified
from attnplug.negotiation.received import (
    check_received,
    is_list,
    is_name,
    is_table,
    is_text,
    one_of,
    optional,
    table_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnplug.negotiation.evaluation import Evaluation

Status = Literal["chosen", "eligible", "refused", "absent", "missing_dependency", "broken"]


@frozen
class RecordedDetails:
    """What an `Evaluation` computes of a verdict for those who read it, as another process sent it."""

    agreement: Agreement | None = None
    fix: Fix | None = None
    unverified: tuple[Unverified, ...] = ()
    level_cost: str = ""


@frozen
class Verdict:
    """
    What selection concludes about one candidate.

    Attributes:
        id: ``backend/variant``.
        status: ``chosen``, ``eligible`` (it could serve too), ``refused`` (it cannot serve this request), ``absent``
            (not installed), ``missing_dependency`` (it could serve, and something that it requires is missing) or
            ``broken``.
        reasons: Everything that refuses it, not only the first.
        emulated: Requested features that it emulates, and at what cost.
        distribution: The distribution that offers it, with its version.

    The agreement, the fix and what is unverified are computed when they are first read, since most never are.
    """

    id: str
    status: Status
    reasons: tuple[Reason, ...] = ()
    emulated: Mapping[str, str] = field(factory=dict, hash=False)
    distribution: str = ""
    _details: Evaluation | RecordedDetails = field(default=RecordedDetails(), repr=False, eq=False, alias="details")

    @property
    def agreement(self) -> Agreement | None:
        """The settled terms, where it is chosen or eligible."""
        return self._details.agreement

    @property
    def fix(self) -> Fix | None:
        """The smallest change that makes the candidate serve; None where it already does."""
        return self._details.fix

    @property
    def unverified(self) -> tuple[Unverified, ...]:
        """What is requested and no evidence covers on this device, where it is chosen or eligible. Decides nothing."""
        return self._details.unverified

    @property
    def level_cost(self) -> str:
        """How a preferred term of the KV cache lowers the graph level, in words; empty where none does."""
        return self._details.level_cost

    def __repr__(self) -> str:
        count = len(self.reasons)
        reasons = f" for {count} reason{'s' * (count != 1)}" if count else ""
        return f"<Verdict: {self.id} is {self.status.replace('_', ' ')}{reasons}>"

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
            "level_cost": self.level_cost,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Verdict:
        """
        Read what `to_dict` wrote.

        Raises:
            DecisionError: It is something else.
            RequestError: Requirements or a device in it are invalid.
        """
        check_received("a verdict", data, _CHECKS)
        return cls(
            id=data["id"],
            status=data["status"],
            reasons=tuple(Reason.from_dict(reason) for reason in data["reasons"]),
            emulated=data["emulated"],
            distribution=data["distribution"],
            details=RecordedDetails(
                Agreement.from_dict(data["agreement"]) if data["agreement"] is not None else None,
                Fix.from_dict(data["fix"]) if data["fix"] is not None else None,
                tuple(Unverified.from_dict(item) for item in data["unverified"]),
                data["level_cost"],
            ),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return Verdict.from_dict, (self.to_dict(),)


_CHECKS = {
    "id": is_name,
    "status": one_of(*get_args(Status)),
    "reasons": is_list,
    "emulated": table_of(is_text),
    "agreement": optional(is_table),
    "distribution": is_text,
    "fix": optional(is_table),
    "unverified": is_list,
    "level_cost": is_text,
}
