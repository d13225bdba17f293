"""What probes have refused, and of what: a library may be there and lack only what one request needs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from attrs import evolve, field, frozen

from attnplug.negotiation.agreement import Agreement
from attnplug.negotiation.reason import Reason
from attnplug.request.device import Device

if TYPE_CHECKING:
    from collections.abc import Collection

_MOST: Final = 1024
"""Refusals that are remembered of one candidate. The oldest goes, and its probe is asked again."""

_Of = tuple[Agreement | None, Device | None]


@frozen
class Refusal:
    """
    The answer of a probe that refuses, and what it holds for.

    Attributes:
        reason: What the probe returned.
        agreement: The agreement that is refused; None where every one is.
        device: The device likewise.
    """

    reason: Reason
    agreement: Agreement | None = None
    device: Device | None = None

    @property
    def is_total(self) -> bool:
        """Whether it holds whatever is asked, wherever it is to run."""
        return self.agreement is None and self.device is None

    @property
    def told(self) -> Reason:
        """The reason without the way out, which stands beside it wherever it is read."""
        return evolve(self.reason, because="")

    @property
    def remedy(self) -> str:
        """The probe's own way out."""
        return self.reason.because or "choose another backend"


@frozen
class Refusals:
    """All refusals of a process that do not hold of everything. Immutable: `plus` and `without` return others."""

    _found: Mapping[str, Mapping[_Of, Refusal]] = field(factory=dict, alias="found")

    def __contains__(self, candidate_id: str) -> bool:
        return candidate_id in self._found

    def of(self, candidate_id: str) -> Collection[Refusal]:
        """Return every refusal of a candidate."""
        return self._found.get(candidate_id, {}).values()

    def find(self, candidate_id: str, agreement: Agreement | None, device: Device) -> Refusal | None:
        """
        Return what stands against an agreement on a device, or None.

        Args:
            candidate_id: ``backend/variant``.
            agreement: What would be agreed on; None finds what is refused whatever that is.
            device: Where it would run.
        """
        known = self._found.get(candidate_id)
        if known is None:
            return None
        return known.get((None, device)) or known.get((agreement, device)) or known.get((agreement, None))

    def plus(self, candidate_id: str, refusal: Refusal) -> Refusals:
        """Return these and one more, which takes the place of an earlier answer to the same."""
        of = refusal.agreement, refusal.device
        known = {of_: each for of_, each in self._found.get(candidate_id, {}).items() if of_ != of}
        kept = dict(list(known.items())[1 - _MOST :]) if len(known) >= _MOST else known
        return Refusals({**self._found, candidate_id: {**kept, of: refusal}})

    def without(self, backends: Collection[str]) -> Refusals:
        """Return these, less those of some backends."""
        return Refusals({id_: each for id_, each in self._found.items() if id_.partition("/")[0] not in backends})
