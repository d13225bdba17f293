"""What asking again takes: the question of every layer of every step that does not keep its answer."""

from __future__ import annotations

import os
from timeit import repeat
from typing import TYPE_CHECKING, Final

from attnplug import select
from attnplug.commands import say_json
from attnplug.request import Requirements
from attnplug_kit.bench.interpreter import interpreter
from attnplug_kit.bench.measurement import Measurement

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME: Final = "cached"
_CHILD: Final = "from attnplug_kit.bench.cached import child; child({})"
_LOOPS: Final = 50_000
_BUDGETS: Final = {"the same object": 0.3, "an equal copy": 0.8}


def measure(repeats: int) -> Iterator[Measurement]:
    """Measure loops, the loop's own cost included."""
    with interpreter([1]) as python:
        times = python.answer(_CHILD.format(repeats))
    for (what, budget), samples in zip(_BUDGETS.items(), times, strict=True):
        text = f"`select` of a question that was decided before, asked with {what}; each sample is {_LOOPS} calls"
        yield Measurement(NAME, text, tuple(samples), "us", budget)


def child(repeats: int) -> None:
    """Measure in this process, and print seconds a call."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the made-up plugin serves the CPU, whatever is installed
    asked = Requirements(head_size=128, num_q_heads=32, num_kv_heads=8, dtype="bfloat16")
    copy = Requirements.from_dict(asked.to_dict())
    select(asked)
    call = "select(question)"
    loops = [
        repeat(call, globals={"select": select, "question": question}, number=_LOOPS, repeat=repeats)
        for question in (asked, copy)
    ]
    say_json([[seconds / _LOOPS for seconds in samples] for samples in loops])
