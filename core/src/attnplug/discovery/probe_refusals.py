"""What probes have refused, and of what: a library may be there and lack only what one request needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve, field, frozen

from attnplug.negotiation.agreement import Agreement
from attnplug.request.device import Device

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attnplug.negotiation.verdict import Reason

_MOST: Final = 1024
"""ProbeRefusals that are remembered of one candidate. The oldest goes, and its probe is asked again."""

_Of = tuple[Agreement | None, Device | None]


@frozen
class ProbeRefusal:
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
        """The reason without the fix, which stands beside it wherever it is read."""
        return evolve(self.reason, because="")

    @property
    def fix(self) -> str:
        """The probe's own fix."""
        return self.reason.because or "choose another backend"

    def beside(self, known: ProbeRefusals | None) -> ProbeRefusals:
        """Return it with what the candidate's probe has refused before, if that is anything."""
        return (ProbeRefusals() if known is None else known).plus(self)


@frozen
class ProbeRefusals:
    """What the probe of one candidate has refused. Immutable: `plus` returns others."""

    _found: Mapping[_Of, ProbeRefusal] = field(factory=dict, alias="found")

    def __iter__(self) -> Iterator[ProbeRefusal]:
        return iter(self._found.values())

    def find(self, agreement: Agreement | None, device: Device) -> ProbeRefusal | None:
        """
        Return what stands against an agreement on a device, or None.

        Args:
            agreement: What would be agreed on; None finds what is refused whatever that is.
            device: Where it would run.
        """
        found = self._found
        return found.get((None, device)) or found.get((agreement, device)) or found.get((agreement, None))

    def plus(self, refusal: ProbeRefusal) -> ProbeRefusals:
        """Return these and one more, which takes the place of an earlier answer to the same."""
        of = refusal.agreement, refusal.device
        others = [(of_, each) for of_, each in self._found.items() if of_ != of]
        return ProbeRefusals(dict([*others[-_MOST + 1 :], (of, refusal)]))
