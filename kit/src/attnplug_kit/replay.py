"""The command ``attnplug replay``: recorded steps run again on random tensors, beside the oracle."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any, Final

from attrs import frozen

from attnplug.commands import NO, OK, ForeignCode, say, say_json, tracked, wrapped
from attnplug.errors import RequestError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from attnplug import Device
    from attnplug.contract import RecordedStep, Recording
    from attnplug_kit.tune.grid import Cell

SUMMARY: Final = "recorded steps run again, and compared with the oracle"

_EPILOG: Final = """\
A process with ATTNPLUG_RECORD=FILE writes the lengths and terms of its steps. Here each different one runs on random
tensors in the same pages, on the backend that was recorded unless another is named, and the last new token of each
request is compared with the conformance kit's oracle in float64. Decodes and drafts that ran in a CUDA graph run in one
again, other steps eagerly.

Of FP8 caches and selected tokens results are computed and not compared: the conformance kit does that. Steps whose
lengths only the GPU had, without a paged KV cache, of ranks that share one, and of layers with custom masks, biases or
spans, whose values are not recorded, are left out and counted.

--times measures the steps that are right: a layer's forward, with new K/V written; of a GPU its device time. The plan
of the step is not part of it. `attnplug tune --steps` compares backends.

examples:
  attnplug replay steps.jsonl
  attnplug replay steps.jsonl --backend torch --device cpu --most 10
  attnplug replay steps.jsonl --times

exit codes: 0 all are right, 1 a result is wrong or a backend failed, 2 the file or the backend is invalid
"""
_MOST: Final = 64
_ROWS: Final = 16  # requests of a step whose last token is compared
_ROUNDS: Final = 7  # of a measured step at least


@frozen
class Replayed:
    """
    What came of a step.

    Attributes:
        cell: The step.
        backend: The candidate that ran.
        problem: Why it is not right; empty where it is.
        seconds: Median time of a forward, where it was measured.
    """

    cell: Cell
    backend: str
    problem: str
    seconds: float | None = None


@frozen
class _Counts:
    """Recorded steps, different ones that can run again, and those that cannot."""

    recorded: int
    different: int
    left_out: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = "Run the steps of a recorded file again, and compare their results with the oracle."
    parser.epilog = _EPILOG
    parser.add_argument("file", metavar="FILE", help="the file that ATTNPLUG_RECORD named")
    parser.add_argument("--backend", metavar="NAME", help="the backend; default: the recorded ones")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where; default: this machine's")
    parser.add_argument(
        "--most",
        type=int,
        default=_MOST,
        metavar="N",
        help="different steps at most; default %(default)s",
    )
    parser.add_argument("--times", action="store_true", help="measure and print the time of each step, too")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Replay."""
    from attnplug import registry  # noqa: PLC0415 - help does without
    from attnplug.contract import read_steps  # noqa: PLC0415 - imports torch
    from attnplug.request import names_of_pair  # noqa: PLC0415 - likewise
    from attnplug_kit.bench import Target  # noqa: PLC0415 - likewise

    if arguments.most < 1:
        raise RequestError(f"--most {arguments.most} was given", "it is a whole number from 1 on", "leave it out")
    recording = read_steps(arguments.file)
    device = Target(device=arguments.device).prepare()
    chosen, counts = _chosen(recording, arguments.most)
    for name in {arguments.backend or step.layer.agreement.id for step, _ in chosen}:
        for part in names_of_pair(name) or (name,):
            registry().check_name(part)
    found = [
        _replayed(step, cell, arguments.backend, device, times=arguments.times)
        for step, cell in tracked(chosen, lambda each: f"running {each[1]}", shown=not arguments.json)
    ]
    if arguments.json:
        say_json(_to_dict(recording, found, counts))
    else:
        _show(recording, found, counts, device)
    return NO if any(each.problem for each in found) else OK


def _chosen(recording: Recording, most: int) -> tuple[Sequence[tuple[RecordedStep, Cell]], _Counts]:
    """
    Return different steps that can run here, evenly from the whole file, and how many steps there are.

    Raises:
        RequestError: No step can run again.
    """
    from attnplug_kit.tune.grid import cell_of  # noqa: PLC0415 - imports torch

    cells = {step: cell for step in dict.fromkeys(recording.steps) if (cell := cell_of(step)) is not None}
    if not cells:
        raise RequestError(
            f"none of {len(recording.steps)} recorded steps can run again",
            "a step has its lengths, and a KV cache that no other rank shares",
            "record steps whose lengths the CPU has",
        )
    pairs = list(cells.items())
    count = min(most, len(pairs))
    left_out = sum(step not in cells for step in recording.steps)
    counts = _Counts(len(recording.steps), len(pairs), left_out)
    return [pairs[number * len(pairs) // count] for number in range(count)], counts


def _replayed(step: RecordedStep, cell: Cell, backend: str | None, device: Device, *, times: bool) -> Replayed:
    name = backend or step.layer.agreement.id
    with ForeignCode("it failed:") as code:
        seconds = _run(step, cell, name, device, times=times)
    if code.error is None:
        return Replayed(cell, name, "", seconds)
    return Replayed(cell, name, str(code.error) if isinstance(code.error, AssertionError) else code.problem)


def _run(step: RecordedStep, cell: Cell, name: str, device: Device, *, times: bool) -> float | None:
    """
    Run a step in the agreed pages; return its seconds where times are wanted, of the replay where it ran in a graph.

    Raises:
        AssertionError: A result differs from the oracle.
    """
    from attnplug_kit.bench import Target, make_rig  # noqa: PLC0415 - imports torch
    from attnplug_kit.bench.forwarding import replay_of  # noqa: PLC0415 - likewise
    from attnplug_kit.tune.measuring import check_rows  # noqa: PLC0415 - likewise

    in_graph = step.in_graph and device.type != "cpu" and cell.graph_level != "never"
    agreement = step.layer.agreement
    terms: dict[str, Any] = {name: getattr(agreement, name) for name in ("block_size", "kv_layout", "kv_cache_form")}
    terms = {name: value for name, value in terms.items() if value is not None}
    level = cell.graph_level if in_graph else "never"
    target = Target(name, "cpu" if device.type == "cpu" else None)
    rig = make_rig(cell.step, target, **{**cell.engine, **terms, "cudagraph": level})
    calls = [rig.forward(), *([replay_of(rig)] if in_graph else [])]
    for call in calls:
        check_rows(rig, call(), cell.layer, most=_ROWS)
    return _seconds(calls[-1], device) if times else None


def _seconds(call: Callable[[], object], device: Device) -> float:
    """Return the median time of a call."""
    from attnplug_kit.bench.timing import Contender, interleaved, work_clock  # noqa: PLC0415 - imports torch

    samples = interleaved({"forward": Contender(lambda _: call())}, work_clock(device.type), _ROUNDS)
    return median(samples.seconds["forward"])


def _show(recording: Recording, found: Sequence[Replayed], counts: _Counts, device: Device) -> None:
    from attnplug_kit.tune.grid import described  # noqa: PLC0415 - imports torch

    first = recording.steps[0].layer
    versions = ", ".join(f"{name} {version}" for name, version in recording.versions.items())
    say("\n".join(wrapped(f"recorded on {first.device} with {versions}; this machine: {device}")))
    for each in found:
        if each.problem:
            say("\n".join(wrapped(f"{each.backend} is wrong: {each.cell.step.what}; {described(each.cell.layer)}")))
            say("\n".join(wrapped(each.problem.strip().splitlines()[0], "  ")))
    for each in found:
        if each.seconds is not None:
            say(f"{each.seconds * 1e6:9.1f} us  {each.cell.step.what}; {described(each.cell.layer)}")
    wrong = sum(1 for each in found if each.problem)
    backends = ", ".join(sorted({each.backend for each in found}))
    note = f" ({counts.left_out} cannot run again)" if counts.left_out else ""
    say(
        f"{len(found)} of {counts.different} different steps ran on {backends}, {counts.recorded} were recorded{note}: "
        f"{len(found) - wrong} right, {wrong} wrong"
    )


def _to_dict(recording: Recording, found: Sequence[Replayed], counts: _Counts) -> dict[str, Any]:
    return {
        "versions": dict(recording.versions),
        "recorded": counts.recorded,
        "different": counts.different,
        "left_out": counts.left_out,
        "steps": [
            {
                "what": each.cell.step.what,
                "backend": each.backend,
                "requirements": each.cell.layer.to_dict(),
                "query_lens": list(each.cell.step.query_lens),
                "seq_lens": list(each.cell.step.seq_lens),
                "problem": each.problem,
                "seconds": each.seconds,
            }
            for each in found
        ],
    }
