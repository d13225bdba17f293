"""
Benchmarks: the command ``attnplug bench``, and what a plugin's baseline of direct library calls is written with.

The names load on first use (PEP 562): ``attnplug --help`` imports this module for its `SUMMARY`.
"""

from __future__ import annotations

import shlex
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Final

from attnplug.commands import NO, OK, complain, say_json, tracked
from attnplug.errors import RequestError
from attnplug.request import near

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from attnplug_kit.bench.baseline import Baseline as Baseline
    from attnplug_kit.bench.baseline import TorchBaseline as TorchBaseline
    from attnplug_kit.bench.result import Measurement as Measurement
    from attnplug_kit.bench.result import Result as Result
    from attnplug_kit.bench.result import SectionResult as SectionResult
    from attnplug_kit.bench.result import formatted as formatted
    from attnplug_kit.bench.result import machine as machine
    from attnplug_kit.bench.result import setup_of as setup_of
    from attnplug_kit.bench.rig import Planner as Planner
    from attnplug_kit.bench.rig import Rig as Rig
    from attnplug_kit.bench.rig import Step as Step
    from attnplug_kit.bench.rig import Target as Target
    from attnplug_kit.bench.rig import decodes as decodes
    from attnplug_kit.bench.rig import first_prefills as first_prefills
    from attnplug_kit.bench.rig import make_planner as make_planner
    from attnplug_kit.bench.rig import make_rig as make_rig
    from attnplug_kit.bench.rig import mixed as mixed
    from attnplug_kit.bench.rig import ragged_decodes as ragged_decodes
    from attnplug_kit.bench.timing import Contender as Contender
    from attnplug_kit.bench.timing import DeviceClock as DeviceClock
    from attnplug_kit.bench.timing import LaunchClock as LaunchClock
    from attnplug_kit.bench.timing import Samples as Samples
    from attnplug_kit.bench.timing import host_clock as host_clock
    from attnplug_kit.bench.timing import interleaved as interleaved
    from attnplug_kit.bench.timing import work_clock as work_clock

_NAMES: Final = {
    "baseline": "Baseline TorchBaseline",
    "result": "Measurement Result SectionResult formatted machine setup_of",
    "rig": "Planner Rig Step Target decodes first_prefills make_planner make_rig mixed ragged_decodes",
    "timing": "Contender DeviceClock LaunchClock Samples host_clock interleaved work_clock",
}
_MODULES: Final = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULES)  # noqa: PLE0605 - a list, which ruff does not see


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


SECTIONS: Final = {
    "import": "selecting:import_time",
    "list": "selecting:list_time",
    "first-select": "selecting:first_select",
    "uncached": "selecting:new_requests",
    "cached": "selecting:repeated_requests",
    "build": "building:measure",
    "forward": "forwarding:measure",
    "dense": "dense:measure",
}
"""Every section, with the function that measures it."""

ON_A_BACKEND: Final = ("build", "forward", "dense")
"""Those that run a backend, and so need torch."""

SUMMARY: Final = "the time budgets, measured on this machine"

_EPILOG: Final = """\
measurements:
  import        `import attnplug`, over a process that does nothing
  list          `attnplug list --json`, the whole process
  first-select  the first selection of a process, with 5 plugins: settings, discovery, manifests, decision
  uncached      a new request, with 50 candidates and every reason
  cached        the same request again, with the same object, with an equal copy, and with a device
  build         the metadata of a step: 256 decodes, a mixed batch, prefills; the check and the assembly by themselves;
                over the plan of the backend's library, where it has one
  forward       a layer through the contract, over direct library calls that compute the same, measured in turn; on
                CUDA also the replay of its graph
  dense         `attnplug.attention` of a shape that was called before, over torch's scaled_dot_product_attention

build, forward and dense run the backend that a selection chooses here, or --backend, on this machine's device, or
--device. On a CPU times are wall times. On CUDA they are host times of the launches, or device times between two
events, as each line says. The direct calls are torch's, or those of --baseline: a Python file with a class that is an
attnplug_kit.bench.Baseline of the backend. Results are compared before they are timed: a step with a wrong result, or
another failure, has no time.

--host NAME measures a step of a host instead, by part: by itself and through attnplug, in turn, with the ratio of each
round. There are torch, transformers, vllm and sglang, in the environment of each.

Medians are compared with the budgets. The best of a measurement shows how much of it is other work of the machine.

Budgets of attnplug's own part decide the exit code. The backend's part, its build and the overhead of its forward over
direct calls, is compared with the same budgets, shown as "over", and fails nothing.

exit codes: 0 every budget that decides is kept, 1 one is not or a step failed, 2 the request is invalid
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = "Measure the time budgets in fresh processes. It takes about a minute."
    parser.epilog = _EPILOG
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to measure; default: everything")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--output", metavar="FILE", help="also write the result to a file, as .md or .json")
    parser.add_argument(
        "--repeats",
        type=int,
        default=15,
        metavar="N",
        help="samples of a measurement, or fewer where one takes long; default 15. "
        "build, forward and dense: until medians are steady, but no longer than N fifths of a second for each step",
    )
    parser.add_argument(
        "--backend",
        metavar="NAME",
        help="build, forward and dense: this backend or backend/variant; default: what is chosen",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="build, forward and dense: where they run; default: this machine's"
    )
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="build, forward and dense: threads of torch's CPU kernels; default: torch's",
    )
    parser.add_argument("--host", metavar="NAME", help="a step of this host, natively and through attnplug, by part")
    parser.add_argument(
        "--baseline",
        metavar="FILE",
        help="build and forward: a Python file with direct calls of the backend's library; default: torch's calls",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure."""
    from attnplug_kit.bench.result import check_suffix, show  # noqa: PLC0415 - help does without
    from attnplug_kit.bench.rig import Target  # noqa: PLC0415 - likewise

    target = Target(arguments.backend, arguments.device, arguments.threads, arguments.baseline, arguments.host)
    names = _checked(arguments.names, target)
    file = Path(arguments.output) if arguments.output else None
    if file is not None:
        check_suffix(file)  # before minutes of measuring
    if arguments.repeats < 1:
        raise RequestError(f"--repeats {arguments.repeats} was given", "it is a whole number from 1 on", "leave it out")
    result = _measure(names, arguments.repeats, target, shown=not arguments.json)
    if file is not None:
        result.write(file)
    if arguments.json:
        say_json(result.to_dict())
    else:
        show(result)
    return OK if result.within else NO


def _checked(requested: Sequence[str], target: Target) -> tuple[str, ...]:
    if target.host is not None:
        return _checked_host(requested, target, target.host)
    for name in requested:
        if name not in SECTIONS:
            raise RequestError(
                f"the measurement {name!r} was requested{near(name, tuple(SECTIONS))}",
                f"the measurements are {', '.join(SECTIONS)}",
                "name one of them, or none for all",
            )
    names = tuple(dict.fromkeys(requested)) or tuple(SECTIONS)
    if target.options() and not set(names) & set(ON_A_BACKEND):
        raise RequestError(
            f"{target.options()[0]} was given, to measure {', '.join(names)}",
            f"it is for {' and '.join(ON_A_BACKEND)}: nothing else runs a backend",
            "leave it out, or measure those",
        )
    if target.baseline is not None and not {"build", "forward"} & set(names):
        raise RequestError(
            f"--baseline {target.baseline} was given, to measure {', '.join(names)}",
            "build and forward alone are compared with direct calls of the backend's library",
            "leave it out, or measure those",
        )
    target.check()
    return names if find_spec("torch") else _without_torch(names, is_requested=bool(requested))


def _checked_host(requested: Sequence[str], target: Target, host: str) -> tuple[str, ...]:
    from attnplug_kit.bench.hosting import entry_of  # noqa: PLC0415 - as above

    if requested or target.baseline is not None:
        raise RequestError(
            f"--host {host} was given, to measure {', '.join(requested) or 'with a --baseline'}",
            "a host is measured by itself, beside its own attention",
            "leave one of the two out",
        )
    entry_of(host)
    target.check()
    return ("host",)


def _without_torch(names: Sequence[str], *, is_requested: bool) -> tuple[str, ...]:
    """Leave out what needs torch with a message, or refuse it where it was requested by name."""
    missing = [name for name in names if name in ON_A_BACKEND]
    if missing and is_requested:
        raise RequestError(
            f"the measurement {missing[0]!r} was requested",
            "it runs a backend, and torch is not installed",
            "pip install 'attnplug[torch]'",
        )
    if missing:
        complain(f"attnplug: warning: left out, since torch is not installed: {', '.join(missing)}")
    return tuple(name for name in names if name not in missing)


def _measure(names: Sequence[str], repeats: int, target: Target, *, shown: bool) -> Result:
    from attnplug_kit.bench.result import Result, SectionResult, machine  # noqa: PLC0415 - as above

    named = names if len(names) < len(SECTIONS) and target.host is None else ()
    words = [*named, *target.options(), *(["--repeats", str(repeats)] if repeats != 15 else [])]
    found = Result(command=shlex.join(["attnplug", "bench", *words]), machine=machine())
    for name in tracked(names, lambda name: f"measuring {name}", shown=shown):
        measure = resolve_name(f"{__name__}.{SECTIONS.get(name, 'hosting:measure')}")
        if target.host is not None:
            found += measure(repeats, target)
            continue
        found += measure(repeats, target) if name in ON_A_BACKEND else SectionResult(tuple(measure(repeats)))
    return found
