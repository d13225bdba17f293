"""
Run all measurements of the FlashInfer and FlashAttention plugins on one GPU, within a time limit.

    pip install --no-deps -e core -e kit -e hosts/transformers -e plugins/flashinfer -e plugins/flash_attn
    python benchmarks/on_gpu.py --out DIR [--seconds 560] [--parts PART ...]

Each part runs in a separate process, which is killed at its time limit; its results so far stay in the folder, and the
next part begins. summary.json has the outcome of each part: 0, the failure, or the missing library or GPU.

- compile: the FlashInfer modules of the other parts, the GPU tests and the kit, as by flashinfer_modules.py
- bench-BACKEND-VARIANT: builds, forwards and replays beside direct library calls, as by `attnplug bench build forward`
- flashinfer-decode: CUDA cores against tensor cores, as by flashinfer_decode.py
- cascade-BACKEND-VARIANT: steps with a shared prefix, with and without a cascade, as by cascade.py
- engine-BACKEND: the engine beside transformers' continuous batching, as by engine.py --preset 1b

By default all parts of the installed plugins run.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepwise import NOT_HERE, is_here, measure_all

from attnplug_kit.bench import Target, building, forwarding, host_clock, work_clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attnplug_kit.bench import SectionResult


HERE = Path(__file__).parent
FLASH_ATTN = ("fa3_vllm", "fa3_tokenspeed", "fa4", "fa3", "fa2", "torch", "fa2_vllm")
"""In order of measurement: the driver compiles the last one for minutes on some GPUs."""

PARTS = {
    "flashinfer": ("compile", "bench-flashinfer-fa3", "bench-flashinfer-fa2", "flashinfer-decode", "engine-flashinfer"),
    "flash_attn": (
        *(f"bench-flash_attn-{variant}" for variant in FLASH_ATTN),
        *(f"cascade-flash_attn-{variant}" for variant in FLASH_ATTN),
        "engine-flash_attn",
    ),
}
"""The parts of each backend."""

SHARE = 0.5
"""The fraction of the remaining time that each part but the last may take."""


def main() -> int:
    """Run the requested parts."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.bench:
        return _bench(options.bench, options.out, options.seconds, options.repeats)
    installed = [name for name in PARTS if entry_points(group="attnplug.backends", name=name)]
    if not installed:
        print("no plugin is installed: pip install --no-deps -e core -e kit -e plugins/flashinfer", file=sys.stderr)
        return 2
    parts = options.parts or [part for name in installed for part in PARTS[name]]
    end, outcomes = time.monotonic() + options.seconds, dict[str, Any]()
    for part in parts:
        limit = (SHARE if part != parts[-1] else 1.0) * (end - time.monotonic())
        print(f"== {part}, at most {limit:.0f} s", flush=True)
        start = time.monotonic()
        outcomes[part] = {"ended": _run(part, installed, options, limit), "seconds": round(time.monotonic() - start, 1)}
        print(f"== {part}: {outcomes[part]}", flush=True)
        (options.out / "summary.json").write_text(json.dumps(outcomes, indent=1))
    return int(any(one["ended"] != 0 and not _is_absent(one["ended"]) for one in outcomes.values()))


def _is_absent(ended: int | str) -> bool:
    return isinstance(ended, str) and ended.startswith("not here")


def _run(part: str, installed: list[str], options: argparse.Namespace, limit: float) -> int | str:
    (backend,) = [name for name, parts in PARTS.items() if part in parts]
    if backend not in installed:
        return f"not here: the plugin of {backend} is not installed"
    if limit < 5:
        return "no time was left"
    log = options.out / f"{part}.log"
    ended = _ended([sys.executable, *_words(part, backend, options, limit - 5)], log, limit)
    if ended != NOT_HERE:
        return ended
    return next(line for line in log.read_text(encoding="utf-8").splitlines() if line.startswith("not here"))


def _words(part: str, backend: str, options: argparse.Namespace, seconds: float) -> list[str]:
    """Return the script of a part, and its options."""
    limits, out = ["--seconds", f"{seconds:.0f}", "--repeats", str(options.repeats)], ["--out", str(options.out)]
    variant = part.rpartition("-")[2]
    if part == "compile":
        return [str(HERE / "flashinfer_modules.py")]
    if part.startswith("bench-"):
        return [str(HERE / "on_gpu.py"), *out, *limits, "--bench", f"{backend}/{variant}"]
    if part.startswith("cascade-"):
        return [str(HERE / "cascade.py"), *out, *limits, "--backend", f"{backend}/{variant}"]
    if part == "flashinfer-decode":
        return [str(HERE / "flashinfer_decode.py"), *out, *limits[:2]]
    folder = ["--out", str(options.out / part)]
    return [str(HERE / "engine.py"), "--preset", "1b", "--backend", backend, "--also", "torch", *folder]


def _ended(command: list[str], log: Path, limit: float) -> int | str:
    """Run a command with a time limit, log its output, and return its exit status or that it was killed."""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(  # noqa: S603 - scripts of this folder
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # killed together with compilers that it starts
        )
        try:
            found: int | str = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            found = f"killed after {limit:.0f} s"
    print(log.read_text(encoding="utf-8", errors="replace")[-4000:], flush=True)
    return found


# -- bench ---------------------------------------------------------------------------------------------------------


def _bench(backend: str, out: Path, seconds: float, repeats: int) -> int:
    target = Target(backend, "cuda", 1, str(HERE / f"direct_{backend.partition('/')[0]}.py"))
    if not is_here(target):
        return NOT_HERE
    file = out / f"forward-{backend.replace('/', '-')}"
    found = measure_all(_steps(target, repeats), f"python benchmarks/on_gpu.py --bench {backend}", file, seconds)
    return 1 if found.failures else 0


def _steps(target: Target, repeats: int) -> Iterator[tuple[str, Callable[[], SectionResult]]]:
    """Yield the measurements, the most important first."""
    host, device = host_clock("cuda"), work_clock("cuda")
    for step in forwarding.LARGE["cuda"]:
        yield f"device, {step.what}", lambda s=step: forwarding.measure_step(s, target, device, repeats, is_small=False)
    for step in forwarding.SMALL:
        yield f"host, {step.what}", lambda s=step: forwarding.measure_step(s, target, host, repeats, is_small=True)
    for step in building.GRAPH_STEPS:
        yield f"graph, {step.what}", lambda s=step: building.measure_graph_build(s, target, host, repeats)
    for step in building.STEPS:
        yield f"build, {step.what}", lambda s=step: building.measure_step(s, target, host, repeats)
    for step in forwarding.REPLAY_STEPS:
        yield f"replay, {step.what}", lambda s=step: forwarding.measure_replay(s, target, repeats)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=560.0, help="time limit of all parts together")
    parser.add_argument("--parts", nargs="+", choices=[part for parts in PARTS.values() for part in parts])
    parser.add_argument("--repeats", type=int, default=10, help="as for `attnplug bench`")
    parser.add_argument("--bench", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
