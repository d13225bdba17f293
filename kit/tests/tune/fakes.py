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
from attnplug.torch_backend.backend import TorchBackend
from attnplug.torch_backend.impl import TorchImpl
from kit.tests.tune.fakes import COSTS


class Impl(TorchImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        super().run(query, key, value, kv_cache, metadata, output, lse)
        output.mul_({factor})
        COSTS.spent += COSTS.of["{name}"]
        {extra}


class Made(TorchBackend):
    impl_class = Impl


@hookimpl
def attnplug_backend():
    return Made
"""


class _Costs:
    """What backends state that their calls cost, in seconds."""

    def __init__(self) -> None:
        self.of: dict[str, float] = {}
        self.spent = 0.0


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
    return Clocks(clock, clock, lambda: None)


def write_backend(folder: Path, name: str, *, factor: float = 1.0, extra: str = "pass") -> tuple[str, Path]:
    """Write a backend that computes what torch does, times a factor; return its module and its manifest."""
    whole = (folder.__class__(_MANIFEST[0]) / _MANIFEST[1]).read_text("utf-8")
    text = whole.partition("# No custom_mask")[0].replace(
        'name = "torch", aliases = ["TORCH_SDPA"]', f'name = "{name}"'
    )
    (folder / f"tune_{name}.py").write_text(_SOURCE.format(name=name, factor=factor, extra=extra))
    manifest = folder / f"{name}.toml"
    manifest.write_text(text)
    return f"tune_{name}", manifest
