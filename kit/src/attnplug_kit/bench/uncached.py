"""What a decision takes that has not been made before."""

from __future__ import annotations

import random
from contextlib import suppress
from itertools import product
from time import perf_counter
from typing import TYPE_CHECKING, Final

from attnplug import NoBackendError, explain, select
from attnplug.commands import say_json
from attnplug.request import Device, Requirements, Settings
from attnplug_kit.bench.installed import installed
from attnplug_kit.bench.interpreter import interpreter
from attnplug_kit.bench.measurement import Measurement
from attnplug_kit.bench.scenery import shares

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME: Final = "uncached"
CANDIDATES: Final = 50
_VARIANTS: Final = 5
_CHILD: Final = "from attnplug_kit.bench.uncached import child; child()"
_FIELDS: Final = {
    "head_size": (64, 96, 128, 256),
    "num_q_heads": (8, 32, 64),
    "dtype": ("bfloat16", "float16"),
    "sliding_window": (None, 128),
    "sinks": (False, True),
    "block_size": (None, 16, 64, 128),
}


def measure(repeats: int) -> Iterator[Measurement]:
    """Measure many different questions in one process; several processes, since each has its own luck with memory."""
    made = CANDIDATES - len(installed().candidates(Settings()))
    with interpreter(shares(made, _VARIANTS)) as python:
        answers = [python.answer(_CHILD) for _ in range(max(1, repeats // 5))]
    told = answers[0]
    times = tuple(time for answer in answers for time in answer["times"])
    yield Measurement(
        NAME,
        f"`select` of a question that is new, on cuda:9.0, with {told['candidates']} candidates and every reason of "
        f"each that is refused ({told['refused']:.0f} of them with {told['reasons']:.0f} reasons on average); "
        f"{len(told['times'])} questions a process",
        times,
        "us",
        350.0,
    )
    yield Measurement(
        NAME,
        "the first of these in its process, when no candidate has been asked anything",
        tuple(answer["first"] for answer in answers),
        "us",
    )


def child() -> None:
    """Measure in this process, and print what was found."""
    device = Device.cuda("9.0")
    questions = _questions()
    select(Requirements(head_size=64, num_q_heads=1, num_kv_heads=1, dtype="bfloat16"), Device.cpu())  # scans
    times = []
    for asked in questions:
        start = perf_counter()
        with suppress(NoBackendError):  # where torch is missing some have no answer; writing that error is not counted
            select(asked, device)
            times.append(perf_counter() - start)
    verdicts = [explain(asked, device).verdicts for asked in questions]
    refused = [v for listed in verdicts for v in listed if v.status == "refused"]
    answer = {
        "first": times[0],
        "times": times[1:],
        "candidates": len(verdicts[0]),
        "refused": len(refused) / len(questions),
        "reasons": sum(len(verdict.reasons) for verdict in refused) / len(questions),
    }
    say_json(answer)


def _questions() -> list[Requirements]:
    """Return questions in an order that does not ask all small variations of one in a row."""
    rows = [dict(zip(_FIELDS, values, strict=True)) for values in product(*_FIELDS.values())]
    questions = [Requirements.from_dict({"num_kv_heads": 8, **row}) for row in rows]
    random.Random(0).shuffle(questions)
    return questions
