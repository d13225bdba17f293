"""What the first selection of a process takes: settings, discovery, manifests, decision."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from attnplug_kit.bench.installed import installed
from attnplug_kit.bench.interpreter import interpreter
from attnplug_kit.bench.measurement import Measurement

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnplug_kit.bench.interpreter import Interpreter

NAME: Final = "first-select"
PLUGINS: Final = 5
_VARIANTS: Final = 3
_BUDGET: Final = 15.0
_CODE: Final = """\
from time import perf_counter
from attnplug import Device, Requirements, select
asked = Requirements(head_size=128, num_q_heads=32, num_kv_heads=8, dtype="bfloat16")
times = [perf_counter()]
select(asked, Device.cpu())
times.append(perf_counter())
Device.current()
times.append(perf_counter())
print([after - before for before, after in zip(times, times[1:])])
"""
# Importing torch leaves so many objects that the next allocations set off a full collection of garbage, wherever they
# are made. It belongs to torch, takes some tenths of a second, and is done before.
_WITH_TORCH: Final = f"import gc, torch\ngc.collect()\n{_CODE}"


def measure(repeats: int) -> Iterator[Measurement]:
    """Measure inside fresh processes that have imported the names, and in such that have imported torch before."""
    made = max(0, PLUGINS - len(installed().plugins))
    what = (
        f"the first `select` after the import: settings, discovery, manifests of {PLUGINS} plugins "
        f"({made} of them made up, with {_VARIANTS} variants each), decision; the disk is warm"
    )
    with interpreter([_VARIANTS] * made) as python:
        python.answer(_CODE)
        yield from _measurements(python, _CODE, what, repeats)
        if find_spec("torch") is not None:
            what = "the same in a process that has imported torch, as every host has"
            yield from _measurements(python, _WITH_TORCH, what, max(1, repeats // 3))


def _measurements(python: Interpreter, code: str, what: str, repeats: int) -> Iterator[Measurement]:
    selecting, looking = zip(*(python.answer(code) for _ in range(repeats)), strict=True)
    yield Measurement(NAME, what, selecting, "ms", _BUDGET)
    yield Measurement(NAME, "and looking for the device, where the call names none", looking, "ms")
