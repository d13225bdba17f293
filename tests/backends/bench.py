"""Benchmarks of direct library calls, run without a GPU: tiny steps, and a timer that only counts calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from attnplug_kit.bench import building, decodes, first_prefills, forwarding, make_rig, mixed, ragged_decodes

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from attnplug_kit.bench import Baseline, Target

TINY: Final = {"num_q_heads": 8, "num_kv_heads": 2, "head_size": 64}
STEPS: Final = (
    first_prefills(2, 21, **TINY),
    decodes(3, 33, **TINY),
    decodes(1, 1, **TINY),
    ragged_decodes(4, 2, 70, **TINY),
    mixed(3, 40, 2, 18, **TINY),
)


class FakeTimer:
    """Calls once and reports one microsecond."""

    what = "ticks"

    def seconds(self, call: Callable[[Any], object], argument: Any) -> float:
        """Call, and return a fixed time."""
        call(argument)
        return 1e-6


def use_baseline(monkeypatch: pytest.MonkeyPatch, baseline: type[Baseline], backend: str) -> None:
    """
    Compare a backend on fake libraries with a baseline, in a dtype that GPU kernels support.

    Garbage collection between measurements is off: no time is measured, and it takes most of the time of a long run.
    """
    monkeypatch.setattr("attnplug_kit.bench.timing.gc.collect", lambda: 0)
    monkeypatch.setattr("attnplug_kit.bench.rig.dtype_on", lambda _: "bfloat16")
    monkeypatch.setattr(baseline, "backend", backend)
    for section in (building, forwarding):
        monkeypatch.setattr(section, "baseline_of", lambda *_: (baseline(), None))


def check_second_call(baseline: Baseline, choice: Target) -> None:
    """Check that a second call reads what the first wrote to the KV cache."""
    rig = make_rig(decodes(3, 33, **TINY), choice)
    call = baseline.layer(rig)
    first = call().clone()

    assert torch.equal(call(), first)
    rig.value.mul_(2)  # the new token's value, which the call reads from its page
    assert not torch.equal(call(), first)
