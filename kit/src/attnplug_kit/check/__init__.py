"""The command ``attnplug check``: mistakes in a manifest or a plugin project, and evidence of this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from attnplug.commands import NO, OK, say_json
from attnplug.errors import RequestError

if TYPE_CHECKING:
    import argparse

SUMMARY: Final = "mistakes in a manifest or a plugin project; evidence of this machine"

_EPILOG: Final = """\
A problem keeps the plugin, or a part of its manifest, from ever working. A note may be a mistake, or intended.

--evidence runs the conformance kit instead, on this machine's device, which takes minutes. A run that passed is written
as BACKEND-VARIANT-DEVICE.json, with device, versions, command and result. A failed run has no file: it would verify
nothing.

--solution judges a solution of FlashInfer Trace by the same kit, as a temporary backend that declares what the
definition has. Its code runs, with your rights: read it first, then pass --trust.

examples:
  attnplug check
  attnplug check src/acme_attention/attnplug.toml --json
  attnplug check --evidence torch/sdpa
  attnplug check --solution dataset/solutions/me/gqa_paged/NAME/mine.json --trust

exit codes: 0 there is no problem, 1 there is one or the kit failed, 2 there is nothing to check: no such PATH, backend
or device
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.usage = "attnplug check [PATH] [options]"
    parser.description = (
        "Check a manifest, or a plugin project: the folder of its pyproject.toml. Every finding has a file and a\n"
        "line. Nothing is imported, and nothing is built."
    )
    parser.epilog = _EPILOG
    parser.add_argument(
        "path",
        nargs="?",
        metavar="PATH",
        help="an attnplug.toml, or a folder with a pyproject.toml; default: this folder",
    )
    parser.add_argument(
        "--evidence",
        nargs="?",
        const="",
        metavar="NAME[/VARIANT]",
        help="run the conformance kit for an installed backend, and write its file; default: the one chosen here",
    )
    parser.add_argument(
        "--device",
        metavar="DEVICE",
        help="--evidence, --solution: cpu, or a device of this machine; default: its first",
    )
    parser.add_argument(
        *("--feature", "--attn-feature"),
        dest="features",
        metavar="VENDOR.NAME",
        action="append",
        default=[],
        help="--evidence: an open feature of every request; may be given several times",
    )
    parser.add_argument(
        "--out", metavar="DIR", default=".", help="--evidence: the folder of the file; default: this folder"
    )
    parser.add_argument("--solution", metavar="FILE", help="run the conformance kit for a solution of FlashInfer Trace")
    parser.add_argument("--trust", action="store_true", help="--solution: run its code")
    parser.add_argument(
        "--definition", metavar="FILE", help="--solution: its definition; default: found in the data set around it"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Check a path, or run the kit and write its evidence."""
    if arguments.solution is not None:
        return _judge(arguments)
    if arguments.evidence is not None:
        return _write_evidence(arguments)
    from attnplug_kit.check.examine import examine  # noqa: PLC0415 - help does without

    report = examine(arguments.path or ".", shown=not arguments.json)
    if arguments.json:
        say_json(report.to_dict())
    else:
        from attnplug_kit.check.report import show  # noqa: PLC0415 - likewise

        show(report)
    return NO if report.problems else OK


def _write_evidence(arguments: argparse.Namespace) -> int:
    if arguments.path is not None:
        raise RequestError(
            f"a path, {arguments.path!r}, was given with --evidence",
            "--evidence tests an installed backend, by its name",
            "write `attnplug check --evidence NAME --out DIR`, or leave --evidence out",
        )
    from attnplug_kit.check.evidence import write_evidence  # noqa: PLC0415 - imports torch

    options = (arguments.evidence, arguments.device, arguments.features, Path(arguments.out))
    return write_evidence(*options, as_json=arguments.json)


def _judge(arguments: argparse.Namespace) -> int:
    if arguments.path is not None or arguments.evidence is not None:
        raise RequestError(
            "--solution was given with a path or --evidence",
            "a solution has no project, and its run is no evidence of a backend",
            "write `attnplug check --solution FILE --trust`",
        )
    from attnplug_kit.trace.solution import judge  # noqa: PLC0415 - help does without

    options = (arguments.solution, arguments.definition, arguments.device)
    return judge(*options, trusted=arguments.trust, as_json=arguments.json)
