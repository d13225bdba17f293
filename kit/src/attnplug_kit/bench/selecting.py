"""The sections that need no torch: import, list, and selections that are first, new or repeated in their process."""

from __future__ import annotations

import os
import random
import statistics
from contextlib import suppress
from importlib.metadata import entry_points
from importlib.util import find_spec
from itertools import product
from time import perf_counter
from timeit import repeat
from typing import TYPE_CHECKING, Final

from attnplug import NoBackendError, explain, select
from attnplug.commands import say_json
from attnplug.request import Device, Requirements, Settings
from attnplug_kit.bench.processes import interpreter, shares
from attnplug_kit.bench.result import Measurement
from attnplug_kit.bench.rig import registry_without_settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnplug_kit.bench.processes import Interpreter

PLUGINS: Final = 5
"""Plugins of a first selection."""

CANDIDATES: Final = 50
"""Candidates of a new request."""

_IMPORTS: Final = (
    ("import attnplug", "`import attnplug`", 40.0),
    (
        "from attnplug import Device, Requirements, select",
        "`from attnplug import Device, Requirements, select`: what the lazy import defers until the first use",
        None,
    ),
)
_FIRST_VARIANTS: Final = 3
_FIRST_BUDGET: Final = 15.0
_FIRST: Final = """\
from time import perf_counter
from attnplug import Device, Requirements, select
requirements = Requirements(head_size=128, num_q_heads=32, num_kv_heads=8, dtype="bfloat16")
times = [perf_counter()]
select(requirements, Device.cpu())
times.append(perf_counter())
Device.current()
times.append(perf_counter())
print([after - before for before, after in zip(times, times[1:])])
"""
# Importing torch creates so many objects that the next allocations trigger a full garbage collection, wherever they
# are. It takes some tenths of a second and belongs to torch: it is done before.
_FIRST_WITH_TORCH: Final = f"import gc, torch\ngc.collect()\n{_FIRST}"
_NEW_VARIANTS: Final = 5
_NEW: Final = "from attnplug_kit.bench.selecting import print_new; print_new()"
_NEW_FIELDS: Final = {
    "head_size": (64, 96, 128, 256),
    "num_q_heads": (8, 32, 64),
    "dtype": ("bfloat16", "float16"),
    "sliding_window": (None, 128),
    "sinks": (False, True),
    "block_size": (None, 16, 64, 128),
}
_REPEATED: Final = "from attnplug_kit.bench.selecting import print_repeated; print_repeated({})"
_REPEATED_BUDGETS: Final = {
    "the same object": 0.3,
    "an equal copy": 0.8,
    "the same object and the same device, which is not this process's own": 0.5,
    "the same object and the device as a text": 0.5,
}
_LOOPS: Final = 50_000


def import_time(repeats: int) -> Iterator[Measurement]:
    """Measure processes that import, minus the median of processes that do nothing, in turn."""
    with interpreter() as python:
        for code, what, budget in _IMPORTS:
            python.seconds("-c", code)  # compiles what is not compiled yet
            pairs = [(python.seconds("-c", "pass"), python.seconds("-c", code)) for _ in range(repeats)]
            nothing = statistics.median(bare for bare, _ in pairs)
            samples = tuple(importing - nothing for _, importing in pairs)
            yield Measurement("import", f"{what}, over a process that does nothing", samples, "ms", budget)


def list_time(repeats: int) -> Iterator[Measurement]:
    """Measure processes that run the installed command's function."""
    script = next(iter(entry_points(group="console_scripts", name="attnplug")))
    code = f"import sys; from {script.module} import {script.attr} as main; sys.exit(main(['list', '--json']))"
    with interpreter() as python:
        python.seconds("-c", code)  # compiles what is not compiled yet
        samples = tuple(python.seconds("-c", code) for _ in range(repeats))
        what = "`attnplug list --json`, the whole process, with what is installed"
        yield Measurement("list", what, samples, "ms", 130.0)


def first_select(repeats: int) -> Iterator[Measurement]:
    """Measure in fresh processes that have imported the names, and in such that have imported torch before."""
    made_up = max(0, PLUGINS - len(registry_without_settings().plugins))
    what = (
        f"the first `select` after the import: settings, discovery, manifests of {PLUGINS} plugins "
        f"({made_up} of them made up, with {_FIRST_VARIANTS} variants each), decision; files are in the page cache"
    )
    with interpreter([_FIRST_VARIANTS] * made_up) as python:
        python.json_of(_FIRST)
        yield from _first(python, _FIRST, what, repeats)
        if find_spec("torch") is not None:
            what = "the same in a process that has imported torch, as every host has"
            yield from _first(python, _FIRST_WITH_TORCH, what, max(1, repeats // 3))


def _first(python: Interpreter, code: str, what: str, repeats: int) -> Iterator[Measurement]:
    selecting, detecting = zip(*(python.json_of(code) for _ in range(repeats)), strict=True)
    yield Measurement("first-select", what, selecting, "ms", _FIRST_BUDGET)
    yield Measurement("first-select", "and the detection of the device, if the call names none", detecting, "ms")


def new_requests(repeats: int) -> Iterator[Measurement]:
    """Measure many different requests in one process; several processes, since each allocates memory differently."""
    made_up = CANDIDATES - len(registry_without_settings().candidates(Settings()))
    with interpreter(shares(made_up, _NEW_VARIANTS)) as python:
        found = [python.json_of(_NEW) for _ in range(max(1, repeats // 5))]
    one = found[0]
    yield Measurement(
        "uncached",
        f"`select` of a new request on cuda:9.0, with {one['candidates']} candidates and every reason of each that is "
        f"refused ({one['refused']:.0f} of them with {one['reasons']:.0f} reasons on average); {len(one['times'])} "
        "requests a process",
        tuple(time for each in found for time in each["times"]),
        "us",
        350.0,
    )
    first = tuple(each["first"] for each in found)
    yield Measurement("uncached", "the first of these in its process, before any candidate is evaluated", first, "us")


def print_new() -> None:
    """Measure new requests in this process, and print the times."""
    device, requests = Device.cuda("9.0"), _new_requests()
    select(Requirements(head_size=64, num_q_heads=1, num_kv_heads=1, dtype="bfloat16"), Device.cpu())  # scans
    times = []
    for requirements in requests:
        start = perf_counter()
        with suppress(NoBackendError):  # without torch nothing serves some; writing that error is not measured
            select(requirements, device)
            times.append(perf_counter() - start)
    verdicts = [explain(requirements, device).verdicts for requirements in requests]
    refused = [verdict for listed in verdicts for verdict in listed if verdict.status == "refused"]
    say_json(
        {
            "first": times[0],
            "times": times[1:],
            "candidates": len(verdicts[0]),
            "refused": len(refused) / len(requests),
            "reasons": sum(len(verdict.reasons) for verdict in refused) / len(requests),
        }
    )


def _new_requests() -> list[Requirements]:
    """Return requests in random order, so that similar ones don't follow each other."""
    rows = [dict(zip(_NEW_FIELDS, values, strict=True)) for values in product(*_NEW_FIELDS.values())]
    requests = [Requirements.from_dict({"num_kv_heads": 8, **row}) for row in rows]
    random.Random(0).shuffle(requests)
    return requests


def repeated_requests(repeats: int) -> Iterator[Measurement]:
    """Measure a request that is repeated, as by a layer that selects in every step; the loop's own cost included."""
    with interpreter([1]) as python:
        times = python.json_of(_REPEATED.format(repeats))["loops"]
    for (what, budget), samples in zip(_REPEATED_BUDGETS.items(), times, strict=True):
        text = f"`select` of a request that was decided before, with {what}; each sample is {_LOOPS} calls"
        yield Measurement("cached", text, tuple(samples), "us", budget)


def print_repeated(repeats: int) -> None:
    """Measure repeated requests in this process, and print the seconds of a call."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the made-up plugin serves the CPU, whatever is installed
    requirements = Requirements(head_size=128, num_q_heads=32, num_kv_heads=8, dtype="bfloat16")
    copy = Requirements.from_dict(requirements.to_dict())
    other = Device("cpu", name="another CPU")
    calls: tuple[tuple[Requirements, Device | str | None], ...] = (
        (requirements, None),
        (copy, None),
        (requirements, other),
        (requirements, "cpu"),
    )
    loops = []
    for one, device in calls:
        select(one, device=device)
        call = "select(one)" if device is None else "select(one, device=device)"
        names = {"select": select, "one": one, "device": device}
        loops.append(repeat(call, globals=names, number=_LOOPS, repeat=repeats))
    say_json({"loops": [[seconds / _LOOPS for seconds in samples] for samples in loops]})
