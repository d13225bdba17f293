"""What a user reads when nothing fits, word by word: every known backend once, with all its reasons and its fix."""

from __future__ import annotations

from pathlib import Path

import pytest

import attnplug
from attnplug.discovery.plugin import Known, KnownPlugin, Plugin
from attnplug.discovery.registry import Registry
from attnplug.errors import NoBackendError
from attnplug.negotiation.reason import Reason
from attnplug.request.device import Device
from attnplug.request.settings import Settings
from attnplug.selection import process

GOLDEN = Path(__file__).with_name("golden") / "nothing_fits.txt"
ABSENT = KnownPlugin("absent", ("ABSENT",), "a published plugin", "attnplug-absent")
DAMAGED = Plugin(
    "damaged",
    "damaged.plugin",
    "dist-damaged",
    "0.3",
    problem=Reason("broken", "damaged", None, "dist-damaged 0.3 has no valid manifest", "attnplug.toml:5: no TOML"),
    fix="correct the syntax",
)


@pytest.fixture
def crowd(world, monkeypatch):
    """A process that knows a backend of each status."""
    monkeypatch.setenv("COLUMNS", "100")
    usual = world("flash", "generic")
    found = {"flash-old": "2.6", "flash-new": "4.0"}
    settings = Settings(block=frozenset({"generic"}))
    registry = Registry([*usual.plugins, DAMAGED], known=Known((ABSENT,)), version_of=found.get)
    process.PROCESS.state = process.ProcessState(registry, settings, registry.generation, own_device=Device.cuda("9.0"))
    return registry


def test_nothing_fits(crowd, request_of) -> None:
    with pytest.raises(NoBackendError) as caught:
        attnplug.select(request_of(head_size=512, sinks=True, cascade=True, sliding_window=128))

    text = str(caught.value)
    assert text == GOLDEN.read_text(encoding="utf-8").rstrip("\n")
    ids = [verdict.id for verdict in caught.value.explanation.verdicts]
    assert sorted(ids) == sorted(set(ids))
    assert {"absent", "damaged", "flash/new", "flash/hopper", "flash/old", "generic/default"} == set(ids)
    assert all(verdict.reasons for verdict in caught.value.explanation.verdicts)
