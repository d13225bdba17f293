"""``attnplug bench``: the time budgets of the selection, measured here. A file for each measured thing."""

from __future__ import annotations

import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnplug.cli.exits import NO, OK
from attnplug.cli.output import complain, say_json
from attnplug.errors import RequestError
from attnplug.request.fields import near

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from attnplug.cli.bench.result import Result

SECTIONS: Final = {
    "import": "importing",
    "list": "listing",
    "first-select": "first_select",
    "uncached": "uncached",
    "cached": "cached",
}
"""Every measured thing, with its module."""

_EPILOG: Final = """\
measurements:
  import        `import attnplug`, over a process that does nothing
  list          `attnplug list --json`, the whole process
  first-select  the first selection of a process, with 5 plugins: settings, discovery, manifests, decision
  uncached      a decision that is new, with 50 candidates and every reason
  cached        the same question again, with the same object and with an equal copy

Medians are held against the budgets; the best of a measurement tells how much of it is other work of the machine.

exit codes: 0 every budget is kept, 1 one is not, 2 the question is wrong
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = "Measure the time budgets of the selection in fresh processes. It takes about half a minute."
    parser.epilog = _EPILOG
    parser.add_argument("names", nargs="*", metavar="NAME", help="what to measure; everything by default")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--output", metavar="FILE", help="also write the result to a file, as .md or .json")
    parser.add_argument(
        "--repeats",
        type=int,
        default=15,
        metavar="N",
        help="samples of a measurement, or fewer where one takes long; default 15",
    )


def run(arguments: argparse.Namespace) -> int:
    """Measure."""
    from attnplug.cli.bench.result import check_suffix  # noqa: PLC0415 - help costs nothing this way

    names = _checked(arguments.names)
    file = Path(arguments.output) if arguments.output else None
    if file is not None:
        check_suffix(file)  # before half a minute of measuring
    if arguments.repeats < 1:
        raise RequestError(f"--repeats {arguments.repeats} was given", "it is a whole number from 1 on", "leave it out")
    result = _measure(names, arguments.repeats)
    if file is not None:
        result.write(file)
    if arguments.json:
        say_json(result.to_dict())
    else:
        from attnplug.cli.bench.show import show  # noqa: PLC0415 - JSON does without

        show(result)
    return OK if result.within else NO


def _checked(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in SECTIONS:
            raise RequestError(
                f"the measurement {name!r} was asked for{near(name, tuple(SECTIONS))}",
                f"the measurements are {', '.join(SECTIONS)}",
                "name one of them, or none for all",
            )
    return tuple(dict.fromkeys(names)) or tuple(SECTIONS)


def _measure(names: Sequence[str], repeats: int) -> Result:
    from attnplug.cli.bench.machine import machine  # noqa: PLC0415 - as above
    from attnplug.cli.bench.result import Result  # noqa: PLC0415 - as above

    facts = machine()
    measurements = []
    for name in names:
        if sys.stderr.isatty():
            complain(f"measuring {name} ...")
        section = import_module(f"attnplug.cli.bench.{SECTIONS[name]}")
        measurements += section.measure(repeats)
    asked = [*(names if len(names) < len(SECTIONS) else ()), *(["--repeats", str(repeats)] if repeats != 15 else [])]
    return Result(shlex.join(["attnplug", "bench", *asked]), facts, tuple(measurements))
