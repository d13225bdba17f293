"""
``attnplug bench --host NAME``: what a step of a host costs by itself and through attnplug, by part.

A host's distribution offers its steps by an entry point in the group ``attnplug.benchmarks``. Its name is the host's,
its value a module with two members:

``DISTRIBUTIONS``
    The distributions whose versions the numbers depend on.

``parts(device, backend)``
    Yields each part of a step, on ``"cpu"`` or ``"cuda"``, with this backend of attnplug or, for None, the one that is
    chosen: its name, and two calls, each with its name, the host's own first. A call is a pair: what is measured, and
    what returns its argument before each sample, unmeasured. The results of both have been compared by then.

The module is imported in a process that ends afterwards. It may raise errors of `attnplug.errors`.
"""

from __future__ import annotations

import re
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Final

from attnplug.commands import ForeignCode, install_text, version_of
from attnplug.errors import AttnplugError, PluginError, RequestError
from attnplug.request import near
from attnplug_kit.bench.processes import measure_in_process
from attnplug_kit.bench.result import Measurement, ResultCollector, SectionResult
from attnplug_kit.bench.timing import Contender, host_clock, interleaved, work_clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from typing import Any, TypeAlias

    from attnplug_kit.bench.rig import Target
    from attnplug_kit.bench.timing import Clock

    Calls: TypeAlias = Mapping[str, tuple[Callable[[Any], object], Callable[[], Any]]]

GROUP: Final = "attnplug.benchmarks"
"""The entry-point group."""

KNOWN: Final = {
    "sglang": ("SGLang", "attnplug-sglang"),
    "torch": ("torch", "attnplug-torch"),
    "transformers": ("Transformers", "attnplug-transformers"),
    "vllm": ("vLLM", "attnplug-vllm"),
}
"""Host -> how it is written, and this project's distribution for it."""

_CALL: Final = "attnplug bench: the call"

# Functions of CUDA's runtime and driver: those that queue work, and those that return when the device has done it.
_LAUNCH: Final = re.compile(r"cu(da)?(Launch(Cooperative)?Kernel|GraphLaunch|Mem(cpy|set)\w*Async)")
_WAIT: Final = re.compile(r"cu(da)?((Stream|Device|Event|Ctx)Synchronize|Memcpy(?!\w*Async))")


def entry_of(host: str) -> metadata.EntryPoint:
    """
    Return the entry point of a host.

    Raises:
        RequestError: No distribution offers it; the fix is what to install.
    """
    found = {entry.name: entry for entry in metadata.entry_points(group=GROUP)}
    if host in found:
        return found[host]
    if host in KNOWN:
        written, distribution = KNOWN[host]
        raise RequestError(
            f"--host {host} was given, and {distribution} is not installed here",
            f"it measures {written}, in the environment of {written}",
            f"install it there ({install_text(distribution)}), and run this again",
        )
    names = sorted({*found, *KNOWN})
    raise RequestError(f"--host {host} was given{near(host, names)}", f"hosts are {', '.join(names)}", "name one")


def measure(repeats: int, target: Target) -> SectionResult:
    """Measure in a fresh process."""
    return measure_in_process("hosting", repeats, target)


def measure_here(repeats: int, target: Target) -> SectionResult:
    """
    Measure in this process.

    Raises:
        RequestError: The host is not installed.
        AttnplugError: Its module fails, or no part of a step ran.
    """
    host, device = target.host or "", target.prepare()
    found = ResultCollector(f"--host {host}")
    module = _module(host)
    for name, calls in _parts(module, host, device.type, target.backend):
        found.add(name, partial(_part, host, name, calls, device.type, repeats))
    versions = {name: version_of(name) for name in module.DISTRIBUTIONS}
    setup = {
        "host": ", ".join(f"{name} {version}" for name, version in versions.items() if version) or host,
        "device": str(device),
    }
    measured: SectionResult = found.result() + SectionResult(setup=setup)
    return measured


def _module(host: str) -> Any:
    with ForeignCode(f"the benchmark of {host} cannot be imported:", _failure):
        return entry_of(host).load()


def _parts(module: Any, host: str, device: str, backend: str | None) -> Iterator[tuple[str, Calls]]:
    with ForeignCode(f"the benchmark of {host} raised", _failure, passing=(AttnplugError,)):
        yield from module.parts(device, backend)


def _failure(problem: str) -> PluginError:
    return PluginError(problem, "", "see whether the host runs a model without attnplug; if so, report this")


def _part(host: str, name: str, calls: Calls, device: str, repeats: int) -> SectionResult:
    """Measure both calls of a part: the host's time, and on a GPU the device's."""
    native, ours = calls
    contenders = {each: Contender(*call) for each, call in calls.items()}
    clocks: list[Clock] = [host_clock(device), *([work_clock(device)] if device == "cuda" else [])]
    found = SectionResult()
    for clock in clocks:
        samples = interleaved(contenders, clock, repeats)
        what = f"{name}, {clock.what}"
        numbers = [Measurement(host, f"{what}: {each}", samples.seconds[each], "us") for each in calls]
        ratio = Measurement(host, f"{what}: {ours} over {native}", samples.ratio(ours, native), "x", paired=True)
        unsteady = () if samples.steady else (f"{name}: time ran out before each median was known to 1 %",)
        found += SectionResult((*numbers, ratio), notes=unsteady)
    if device == "cuda":
        counts = (f"{name}: {each}: {_counted(_profiled(one))}" for each, one in contenders.items())
        found += SectionResult(notes=tuple(counts))
    return found


def _profiled(contender: Contender) -> list[Any]:
    """Return the events of one call in torch's profile, its own range among them."""
    import torch  # noqa: PLC0415 - takes a second to import

    contender.call(contender.prepare())
    argument = contender.prepare()
    torch.cuda.synchronize()
    with torch.profiler.profile() as profile:
        with torch.profiler.record_function(_CALL):
            contender.call(argument)
        torch.cuda.synchronize()
    return list(profile.events() or ())


def _counted(events: Iterable[Any]) -> str:
    """Return how often a call queued work for the device and waited for it. The rest of the profile does not count."""
    given = list(events)
    call = next(one.time_range for one in given if one.name == _CALL)
    names = [one.name for one in given if call.start <= one.time_range.start <= call.end]
    launches, waits = (sum(bool(kind.match(name)) for name in names) for kind in (_LAUNCH, _WAIT))
    return f"{launches} launches, {waits} waits for the device"
