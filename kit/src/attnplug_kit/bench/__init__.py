"""``attnplug bench``: the time budgets, measured here. A file for each measured thing."""

from __future__ import annotations

import shlex
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnplug.commands import NO, OK, complain, say_json
from attnplug.errors import RequestError
from attnplug.request import near

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from attnplug_kit.bench.choice import Choice
    from attnplug_kit.bench.measurement import Measurement
    from attnplug_kit.bench.result import Result

SECTIONS: Final = {
    "import": "importing",
    "list": "listing",
    "first-select": "first_select",
    "uncached": "uncached",
    "cached": "cached",
    "build": "building",
    "forward": "forwarding",
}
"""Every measured thing, with its module."""

ON_A_BACKEND: Final = ("build", "forward")
"""Those that run a backend, and so need torch."""

SUMMARY: Final = "the time budgets, measured here"

_EPILOG: Final = """\
measurements:
  import        `import attnplug`, over a process that does nothing
  list          `attnplug list --json`, the whole process
  first-select  the first selection of a process, with 5 plugins: settings, discovery, manifests, decision
  uncached      a decision that is new, with 50 candidates and every reason
  cached        the same question again, with the same object and with an equal copy
  build         the metadata of a step: 256 decodes, a mixed batch, prompts; the check and the assembly by themselves;
                over the plan of the backend's library, where it has one
  forward       a layer through the contract, over raw calls that compute the same, measured in turn; on CUDA also the
                replay of its graph

build and forward run a backend: the one that a selection chooses here, or --backend, on this machine's device, or
--device. On a CPU times are wall times; on CUDA they are the host's launches alone, or the device's own between two
events, as each line says. The raw calls are those of the backend's own library, where its distribution brings them
(entry point group attnplug.benchmarks), or else torch's. Both ways are compared before they are timed: of a step with
a wrong result, or another failure, no time is told.

Medians are held against the budgets; the best of a measurement tells how much of it is other work of the machine.

Budgets of attnplug's own part decide the exit code. What a backend takes besides, its build and its forward over the
raw calls, is held against the same budgets and told as "over", and fails nothing.

exit codes: 0 every budget that decides is kept, 1 one is not or a step failed, 2 the question is wrong
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = "Measure the time budgets in fresh processes. It takes about a minute."
    parser.epilog = _EPILOG
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to measure; everything by default")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--output", metavar="FILE", help="also write the result to a file, as .md or .json")
    parser.add_argument(
        "--repeats",
        type=int,
        default=15,
        metavar="N",
        help="samples of a measurement, or fewer where one takes long; default 15. "
        "build and forward: until medians are steady, but no longer than N fifths of a second for each step",
    )
    parser.add_argument(
        "--backend", metavar="NAME", help="build and forward: this backend or backend/variant; default: what is chosen"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="build and forward: where they run; default: this machine's"
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="build and forward: threads of torch's CPU kernels; default: torch's"
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure."""
    from attnplug_kit.bench.choice import Choice  # noqa: PLC0415 - help costs nothing this way
    from attnplug_kit.bench.result import check_suffix  # noqa: PLC0415 - as above

    choice = Choice(arguments.backend, arguments.device, arguments.threads)
    names = _checked(arguments.names, choice)
    file = Path(arguments.output) if arguments.output else None
    if file is not None:
        check_suffix(file)  # before minutes of measuring
    if arguments.repeats < 1:
        raise RequestError(f"--repeats {arguments.repeats} was given", "it is a whole number from 1 on", "leave it out")
    result = _measure(names, arguments.repeats, choice)
    if file is not None:
        result.write(file)
    if arguments.json:
        say_json(result.to_dict())
    else:
        from attnplug_kit.bench.show import show  # noqa: PLC0415 - JSON does without

        show(result)
    return OK if result.within else NO


def _checked(asked: Sequence[str], choice: Choice) -> tuple[str, ...]:
    for name in asked:
        if name not in SECTIONS:
            raise RequestError(
                f"the measurement {name!r} was asked for{near(name, tuple(SECTIONS))}",
                f"the measurements are {', '.join(SECTIONS)}",
                "name one of them, or none for all",
            )
    names = tuple(dict.fromkeys(asked)) or tuple(SECTIONS)
    if choice.words() and not set(names) & set(ON_A_BACKEND):
        raise RequestError(
            f"{choice.words()[0]} was given, to measure {', '.join(names)}",
            f"it is for {' and '.join(ON_A_BACKEND)}: nothing else runs a backend",
            "leave it out, or measure those",
        )
    choice.check()
    return names if find_spec("torch") else _without_torch(names, is_asked=bool(asked))


def _without_torch(names: Sequence[str], *, is_asked: bool) -> tuple[str, ...]:
    """Leave out what needs torch, and say so; refuse where it was asked for by name."""
    lacking = [name for name in names if name in ON_A_BACKEND]
    if lacking and is_asked:
        raise RequestError(
            f"the measurement {lacking[0]!r} was asked for",
            "it runs a backend, and torch is not installed",
            "pip install 'attnplug[torch]'",
        )
    if lacking:
        complain(f"attnplug bench: left out, since torch is not installed: {', '.join(lacking)}")
    return tuple(name for name in names if name not in lacking)


def _measure(names: Sequence[str], repeats: int, choice: Choice) -> Result:
    from attnplug_kit.bench.machine import machine  # noqa: PLC0415 - as above
    from attnplug_kit.bench.result import Result  # noqa: PLC0415 - as above

    facts, setup = machine(), dict[str, str]()
    measurements: list[Measurement] = []
    notes: list[str] = []
    failures: list[str] = []
    for name in names:
        if sys.stderr.isatty():
            complain(f"measuring {name} ...")
        section = import_module(f"attnplug_kit.bench.{SECTIONS[name]}")
        if name in ON_A_BACKEND:
            found = section.measure(repeats, choice)
            measurements += found.measurements
            setup |= found.setup
            notes += found.notes
            failures += found.failures
        else:
            measurements += section.measure(repeats)
    named = names if len(names) < len(SECTIONS) else ()
    asked = [*named, *choice.words(), *(["--repeats", str(repeats)] if repeats != 15 else [])]
    command = shlex.join(["attnplug", "bench", *asked])
    return Result(command, facts, tuple(measurements), setup, tuple(notes), tuple(failures))
