"""Fakes of tuning: a clock that reads costs which backends state, and the source of such backends."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any

import attnplug.torch_backend
from attnplug_kit.tune.measuring import Clocks

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_MANIFEST = (attnplug.torch_backend.__path__[0], "attnplug.toml")
_SOURCE = """\
from attnplug.contract import hookimpl
from attnplug.negotiation import Reason
from attnplug.torch_backend.backend import TorchBackend
from attnplug.torch_backend.impl import TorchImpl
from kit.tests.tune.fakes import COSTS


class Impl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        super().run(query, key, value, kv_cache, metadata, output, lse)
        output.mul_({factor})
        COSTS.spend("{name}", is_decode=metadata.num_prefills == 0)
        {extra}


class Made(TorchBackend):
    impl_class = Impl


@hookimpl
def attnplug_backend():
    return Made


@hookimpl
def attnplug_probe(variant):
    return Reason("probe_device", variant, None, {refusal!r}) if {refusal!r} else None
"""


class _Costs:
    """What backends state that their calls cost, in seconds: one number, or that of decodes and that of others."""

    def __init__(self) -> None:
        self.of: dict[str, float | tuple[float, float]] = {}
        self.spent = 0.0

    def spend(self, name: str, *, is_decode: bool) -> None:
        cost = self.of[name]
        self.spent += cost if isinstance(cost, float) else cost[0 if is_decode else 1]


COSTS = _Costs()


class CostClock:
    """A clock that reads stated costs, with a noise of 0.2 %."""

    what = "stated costs"

    def __init__(self) -> None:
        self._noise = cycle((1.0, 1.002, 0.998, 1.001, 0.999))
        self.samples = 0

    def seconds(self, call: Callable[[Any], object], argument: Any) -> float:
        before = COSTS.spent
        call(argument)
        self.samples += 1
        return (COSTS.spent - before or 1e-6) * next(self._noise)


def fake_clocks() -> Clocks:
    clock = CostClock()
    return Clocks(clock, clock, lambda: None, clock)


def write_backend(
    folder: Path, name: str, *, factor: float = 1.0, extra: str = "pass", refusal: str = ""
) -> tuple[str, Path]:
    """Write a backend that computes what torch does, times a factor; return its module and its manifest."""
    whole = (folder.__class__(_MANIFEST[0]) / _MANIFEST[1]).read_text("utf-8")
    text = whole.partition("# No custom_mask")[0].replace(
        'name = "torch", aliases = ["TORCH_SDPA"]', f'name = "{name}"'
    )
    text = text.replace("features = [", 'features = ["batch_invariant", ', 1)
    (folder / f"tune_{name}.py").write_text(_SOURCE.format(name=name, factor=factor, extra=extra, refusal=refusal))
    manifest = folder / f"{name}.toml"
    manifest.write_text(text)
    return f"tune_{name}", manifest
