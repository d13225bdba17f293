"""What the probe of a candidate has refused: a library may be there and lack only what one request needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from attrs import evolve, field, frozen

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from attnplug.negotiation.agreement import Agreement
    from attnplug.negotiation.reason import Reason
    from attnplug.request.device import Device

_MOST: Final = 1024
"""Refusals that are remembered of one candidate. The oldest is forgotten, and its probe is called again."""


@frozen
class ProbeRefusal:
    """
    What a probe refuses. The code of its reason says whether that is this request, the device, or everything.

    Attributes:
        reason: What the probe returned.
        agreement: The refused agreement; None where every one is.
        device: The device likewise.
    """

    reason: Reason
    agreement: Agreement | None = None
    device: Device | None = None

    @classmethod
    def of(cls, reason: Reason, agreement: Agreement, device: Device) -> ProbeRefusal:
        """Return the refusal of what a probe was called for, as far as the code of its reason goes."""
        if reason.code == "broken":
            return cls(reason)
        return cls(reason, None if reason.code == "probe_device" else agreement, device)

    def beside(self, known: ProbeRefusals | None) -> ProbeRefusals:
        """Return it with what the candidate's probe has refused before, if that is anything."""
        return (ProbeRefusals() if known is None else known).plus(self)

    @property
    def is_total(self) -> bool:
        """Whether it holds for every request, on every device."""
        return self.agreement is None and self.device is None

    @property
    def finding(self) -> Reason:
        """The reason without the fix, which is shown beside it."""
        return evolve(self.reason, because="")

    @property
    def fix(self) -> str:
        """The probe's own fix."""
        return self.reason.because or "choose another backend"


@frozen
class ProbeRefusals:
    """What the probe of one candidate has refused. Immutable: `plus` returns others."""

    _found: Mapping[tuple[Agreement | None, Device | None], ProbeRefusal] = field(factory=dict, alias="found")

    def __iter__(self) -> Iterator[ProbeRefusal]:
        return iter(self._found.values())

    def find(self, agreement: Agreement | None, device: Device) -> ProbeRefusal | None:
        """
        Return what refuses an agreement on a device, or None.

        Args:
            agreement: What would be agreed on; None finds what is refused whatever that is.
            device: Where it would run.
        """
        return self._found.get((None, device)) or self._found.get((agreement, device))

    def plus(self, refusal: ProbeRefusal) -> ProbeRefusals:
        """Return these and one more, which replaces an earlier one of the same."""
        key = refusal.agreement, refusal.device
        others = [(known, each) for known, each in self._found.items() if known != key]  # oldest first
        return ProbeRefusals(dict([*others[-_MOST + 1 :], (key, refusal)]))
