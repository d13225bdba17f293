"""
Compares cascades with flat attention, for steps in which all requests share a long prefix, on one GPU.

    python benchmarks/cascade.py --backend flash_attn/fa3_vllm --out DIR [--seconds 120] [--repeats 5]

Both run in turn in one process, on the same inputs and pages; their results are compared before. The result names what
the published heuristic chooses in each case. Graphs are not measured: steps with a shared prefix run without them.

It writes cascade-BACKEND-VARIANT.md and .json into the folder, again after each case. Without the library or the GPU of
the backend it exits with status 3.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, frozen
from stepwise import NOT_HERE, is_here, measure_all

from attnplug_kit.bench import (
    Contender,
    Measurement,
    Rig,
    SectionResult,
    Step,
    Target,
    host_clock,
    interleaved,
    make_rig,
    setup_of,
    work_clock,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from attnplug.contract import Metadata
    from attnplug_kit.bench import Samples

NAME = "cascade"
_TOLERANCE = 2**-5  # of the largest number of a result: the two round at different places, to 2**-9 in bfloat16


@frozen
class Case:
    """
    Requests that share a prefix.

    Attributes:
        requests: The number of requests.
        prefix: Tokens that they share.
        own: Further tokens of each, new ones included.
        new: New tokens of each.
    """

    requests: int
    prefix: int
    own: int = 256
    new: int = 1

    @property
    def step(self) -> Step:
        """The step, without a shared prefix."""
        cached = self.prefix + self.own - self.new
        return Step(self.what, (self.new,) * self.requests, (cached,) * self.requests)

    @property
    def what(self) -> str:
        """The case in words."""
        tokens = f"{self.new} new token{'s' * (self.new > 1)} each"
        return f"{self.requests} requests, {self.prefix} shared tokens, {self.own} further tokens each, {tokens}"


CASES = (
    Case(64, 8192),
    Case(64, 2048),
    Case(16, 8192),
    Case(256, 2048),
    Case(8, 8192),
    Case(8, 512),
    Case(16, 8192, own=512, new=256),
)


@frozen(eq=False)
class Shared:
    """
    A step over pages that all requests share, with flat metadata and that of a cascade.

    Attributes:
        rig: Inputs, cache and flat metadata.
        cascade: The metadata with the shared prefix.
        prefix: Tokens that are shared.
    """

    rig: Rig
    cascade: Metadata
    prefix: int

    @classmethod
    def of(cls, case: Case, target: Target) -> Shared:
        """Make the step of a case. All requests get the first one's pages for the prefix."""
        rig = make_rig(case.step, target, cascade=True)
        columns = case.prefix // rig.block_size
        blocks = tuple(rig.blocks[0][:columns] + own[columns:] for own in rig.blocks)
        rig = rig.for_step(rig.step, blocks)
        batch = evolve(rig.batch(), common_prefix_len=case.prefix)
        return cls(rig, rig.builder.build(batch), case.prefix)

    @property
    def chosen(self) -> str:
        """The choice of the heuristic."""
        step = self.rig.step
        uses = self.rig.builder.use_cascade_attention(self.prefix, step.query_lens)
        return "cascade" if uses else "flat"

    def builds(self) -> dict[str, Contender]:
        """Return both builds; each step has a new batch."""
        flat, build = self.rig.batch(), self.rig.builder.build
        shared = evolve(flat, common_prefix_len=self.prefix)
        return {"flat": Contender(build, lambda: evolve(flat)), "cascade": Contender(build, lambda: evolve(shared))}

    def forwards(self) -> dict[str, Contender]:
        """Return both forwards."""
        flat, cascade = self.rig.forward(), evolve(self.rig, metadata=self.cascade).forward()
        return {"flat": Contender(lambda _: flat()), "cascade": Contender(lambda _: cascade())}

    def check(self) -> None:
        """
        Compare the results.

        Raises:
            RuntimeError: They differ.
        """
        outputs = []
        for one in self.forwards().values():
            self.rig.output.fill_(float("nan"))
            one.call(None)
            outputs.append(self.rig.output.float().clone())
        apart = float((outputs[0] - outputs[1]).abs().max())
        largest = float(outputs[0].abs().max())  # means of thousands of values are far below 1
        if not apart <= _TOLERANCE * largest:  # NaN is not
            message = f"the results are {apart} apart, and their largest number is {largest}"
            raise RuntimeError(message)


def measured(case: Case, target: Target, repeats: int) -> SectionResult:
    """
    Measure one case.

    Raises:
        RuntimeError: The results differ.
    """
    shared = Shared.of(case, target)
    shared.check()
    kind = shared.rig.backend.device.type
    device, host = work_clock(kind), host_clock(kind)
    ran = interleaved(shared.forwards(), device, repeats)
    built = interleaved(shared.builds(), host, repeats)
    numbers = [
        *_measurements(case, ran, f"forward, {device.what}", "ms"),
        *_measurements(case, built, f"build, {host.what}", "us"),
    ]
    note = f"{case.what}: the heuristic chooses {shared.chosen}"
    return SectionResult(tuple(numbers), setup_of(shared.rig.backend), (note,))


def _measurements(case: Case, samples: Samples, what: str, unit: Any) -> Iterator[Measurement]:
    for name in ("flat", "cascade"):
        yield Measurement(NAME, f"{case.what}: {name} {what}", samples.seconds[name], unit)
    ratio = samples.ratio("flat", "cascade")
    yield Measurement(NAME, f"{case.what}: flat over cascade, {what}", ratio, "x", paired=True)


def main() -> int:
    """Measure all cases."""
    options = _options()
    target = Target(options.backend, "cuda", 1)
    if not is_here(target):
        return NOT_HERE
    options.out.mkdir(parents=True, exist_ok=True)
    steps = ((case.what, lambda case=case: measured(case, target, options.repeats)) for case in CASES)
    command = f"python benchmarks/cascade.py --backend {options.backend}"
    file = options.out / f"cascade-{options.backend.replace('/', '-')}"
    found = measure_all(_emptied(steps), command, file, options.seconds)
    return 1 if found.failures else 0


def _emptied(steps: Any) -> Any:
    """Yield the steps, and free the cached memory of each."""
    for step in steps:
        yield step
        torch.cuda.empty_cache()


def _options() -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True, help="backend/variant")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the results; default: the current one")
    parser.add_argument("--seconds", type=float, default=120.0, help="the time after which no case begins")
    parser.add_argument("--repeats", type=int, default=5, help="as for `attnplug bench`")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
