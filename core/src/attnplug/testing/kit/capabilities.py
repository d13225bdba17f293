"""One tier for each declared capability, and each with each other one, against the float64 oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from attnplug.request.fields import FIELDS
from attnplug.testing.kit.menu import menu_of
from attnplug.testing.kit.pairwise import covering_asks
from attnplug.testing.kit.serving import serve
from attnplug.testing.kit.tier import Tier, over

if TYPE_CHECKING:
    from collections.abc import Mapping

    from attnplug.testing.kit.ask import Ask
    from attnplug.testing.kit.record import Record
    from attnplug.testing.kit.subject import Subject

_ELSEWHERE: Final = ("cudagraph", "host_lengths")


def _capabilities(subject: Subject) -> Mapping[str, Ask]:
    asks = menu_of(subject).asks.items()
    return {
        str(item): ask for item, ask in asks if FIELDS[item.field].kind != "device" and item.field not in _ELSEWHERE
    }


def _rows(subject: Subject) -> Mapping[str, Ask]:
    return {f"{number:02}": ask for number, ask in enumerate(covering_asks(subject))}


class Capabilities(Tier):
    """Every declared value that this device can reach."""

    @over(_capabilities)
    def test_capability(self, subject: Subject, record: Record, point: Any) -> None:
        """A declared value gives the oracle's output, and its LSE where that is served."""
        for seed in (11, 12):
            serve(subject, point, record, point.case(seed, gain=1.0 if seed % 2 else 4.0))

    @over(_rows)
    def test_pairs(self, subject: Subject, record: Record, point: Any) -> None:
        """Every two declared values that may be asked for together give the oracle's output."""
        serve(subject, point, record, point.case(seed=21))
