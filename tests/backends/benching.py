"""What a plugin's raw calls are tried on without a GPU: tiny steps, and a clock that counts calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from attnplug_kit.bench import building, forwarding, replaying
from attnplug_kit.bench.rig import make_rig
from attnplug_kit.bench.step import decodes, first_prefills, mixed, ragged_decodes

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from attnplug_kit.bench.baseline import Baseline
    from attnplug_kit.bench.choice import Choice

TINY: Final = {"num_q_heads": 8, "num_kv_heads": 2, "head_size": 64}
STEPS: Final = (
    first_prefills(2, 21, **TINY),
    decodes(3, 33, **TINY),
    decodes(1, 1, **TINY),
    ragged_decodes(4, 2, 70, **TINY),
    mixed(3, 40, 2, 18, **TINY),
)


class Ticks:
    """Calls once, and says that it took a microsecond."""

    what = "ticks"

    def seconds(self, call: Callable[[Any], object], argument: Any) -> float:
        """Call, and return a time."""
        call(argument)
        return 1e-6


def hold_against(monkeypatch: pytest.MonkeyPatch, raw: type[Baseline], backend: str) -> None:
    """
    Let a double's backend have raw calls, and the bench a dtype that kernels for GPUs have.

    Its clock is one that counts: garbage is left to lie, which takes most of the time in a process of many tests.
    """
    monkeypatch.setattr("attnplug_kit.bench.interleaved.gc.collect", lambda: 0)
    monkeypatch.setattr("attnplug_kit.bench.rig.dtype_on", lambda _: "bfloat16")
    monkeypatch.setattr(raw, "backend", backend)
    for section in (building, forwarding, replaying):
        monkeypatch.setattr(section, "baseline_of", lambda _: (raw(), None))


def check_a_second_call(raw: Baseline, choice: Choice) -> None:
    """See that it finds in the pages what the first has written."""
    rig = make_rig(decodes(3, 33, **TINY), choice)
    call = raw.layer(rig)
    first = call().clone()

    assert torch.equal(call(), first)
    rig.value.mul_(2)  # the token's own value, which comes back through the pages
    assert not torch.equal(call(), first)
