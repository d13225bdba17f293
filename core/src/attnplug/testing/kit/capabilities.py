"""One tier for each declared capability, and each with each other one, against the float64 oracle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import evolve

from attnplug.request.fields import FIELDS
from attnplug.testing.kit.demand import demand
from attnplug.testing.kit.menu import menu_of
from attnplug.testing.kit.pairwise import covering_asks
from attnplug.testing.kit.rig import Rig
from attnplug.testing.kit.serving import load_for, plain, serve
from attnplug.testing.kit.tier import Tier, needs, over
from attnplug.testing.scene import realise

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

    def test_declared_values_are_served(self, subject: Subject) -> None:
        """No declared value is refused, by the manifest's own rules, in every request that asks for it."""
        unserved = [f"{item.capability} ({item.because})" for item in menu_of(subject).unserved]
        demand(not unserved, f"{subject}: declared, and refused in every request: {'; '.join(unserved)}")

    @over(_capabilities)
    def test_capability(self, subject: Subject, record: Record, point: Any) -> None:
        """A declared value gives the oracle's output, and its LSE where that is served."""
        for seed in (11, 12):
            serve(subject, point, record, point.case(seed, gain=1.0 if seed % 2 else 4.0))

    @over(_rows)
    def test_pairs(self, subject: Subject, record: Record, point: Any) -> None:
        """Every two declared values that may be asked for together give the oracle's output."""
        serve(subject, point, record, point.case(seed=21))

    @needs(batch_invariant=True)
    def test_batch_invariant(self, subject: Subject) -> None:
        """A request gives the same bits alone and among others, where that is declared."""
        ask = plain(subject, batch_invariant=True)
        scene = realise(ask.case(22, query_lens=(1, 1, 12), context_lens=(30, 64, 7)))
        backend = load_for(subject, ask, scene.case)
        lens = {"query_lens": scene.case.query_lens[:1], "context_lens": scene.case.context_lens[:1]}
        alone = realise(ask.case(22, **lens))
        alone = evolve(alone, queries=scene.queries[:1], keys=scene.keys[:1], values=scene.values[:1])
        among, apart = (Rig(backend, each).run(each).output[:1] for each in (scene, alone))
        demand(torch.equal(among, apart), f"{subject}: batch_invariant is declared, and a row differs in another batch")
