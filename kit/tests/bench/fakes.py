"""Fakes of the benchmark tests: a clock without time, and tiny layers."""

from __future__ import annotations

from typing import Final

from attnplug_kit.bench import Target

TORCH: Final = Target("torch/sdpa", "cpu")
TINY: Final = {"num_q_heads": 4, "num_kv_heads": 2, "head_size": 16}


class Ticks:
    """A clock that counts calls instead of seconds."""

    what = "ticks"

    def __init__(self) -> None:
        self.calls = 0

    def seconds(self, call, argument) -> float:
        call(argument)
        self.calls += 1
        return 1e-6
