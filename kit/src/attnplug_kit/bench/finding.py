"""What a section found on a backend: numbers, what they depend on, and what could not be measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attrs import asdict, frozen

from attnplug.commands import PACKAGES, version_of
from attnplug_kit.bench.measurement import Measurement

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from attnplug.contract import Backend


@frozen
class Finding:
    """
    What a section found.

    Attributes:
        measurements: The numbers.
        setup: Backend, device, dtype, threads.
        notes: What could not be measured, or not well, and why; a sentence each.
        failures: What went wrong while others were measured; a sentence each.
    """

    measurements: tuple[Measurement, ...]
    setup: Mapping[str, str]
    notes: tuple[str, ...] = ()
    failures: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON values, samples included: ``Finding.from_dict(data)`` in another process."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Finding:
        """Read what `to_dict` wrote."""
        numbers = [Measurement(**{**number, "samples": tuple(number["samples"])}) for number in data["measurements"]]
        return cls(tuple(numbers), data["setup"], tuple(data["notes"]), tuple(data["failures"]))


class Gathering:
    """
    Gathers what steps give, each by itself: one that fails is told, and the others are measured all the same.

    Args:
        section: The section's name.
    """

    def __init__(self, section: str) -> None:
        self._section = section
        self._measurements: list[Measurement] = []
        self._setup: dict[str, str] = {}
        self._notes: dict[str, None] = {}
        self._failures: dict[str, Exception] = {}

    def add(self, what: str, measure: Callable[[], Finding]) -> None:
        """
        Measure one step.

        Args:
            what: The step in words.
            measure: Measures it.
        """
        try:
            found = measure()
        except Exception as error:  # noqa: BLE001 - of a backend, its library or its device: the next may do better
            self._failures[f"{self._section}, {what}: {type(error).__name__}: {error}"] = error
            return
        self._measurements += found.measurements
        self._setup |= found.setup
        self._notes |= dict.fromkeys(found.notes)

    def finding(self) -> Finding:
        """
        Return all of it.

        Raises:
            Exception: Nothing was measured: what the first step raised.
        """
        if self._failures and not self._measurements:
            raise next(iter(self._failures.values()))
        return Finding(tuple(self._measurements), self._setup, tuple(self._notes), tuple(self._failures))


def setup_of(backend: Backend) -> dict[str, str]:
    """Return what numbers of a backend depend on, ready to read."""
    import torch  # noqa: PLC0415 - only who measures pays for it

    agreement, asked = backend.agreement, backend.agreement.requirements
    where = backend.device_properties
    device = f"{where} with CUDA {torch.version.cuda}" if where.type == "cuda" else str(where)
    libraries = _libraries(backend)
    return {
        "backend": f"{backend.id}, {asked.dtype}, blocks of {agreement.block_size}, layout {agreement.kv_layout}",
        **({"libraries": libraries} if libraries else {}),
        "device": device,
        "torch threads": str(torch.get_num_threads()),
    }


def _libraries(backend: Backend) -> str:
    """Return what the variant requires beside what every run tells, with the versions that are installed."""
    from attnplug import registry  # noqa: PLC0415 - as above
    from attnplug.manifest import requirement_name  # noqa: PLC0415 - only who measures pays for it

    candidates = registry().candidates()
    variants = [one.variant for one in candidates if one.id == backend.id and one.variant is not None]
    names = {requirement_name(required) for variant in variants for required in variant.requires} - {*PACKAGES}
    return ", ".join(f"{name} {version}" for name in sorted(names) if (version := version_of(name)))
