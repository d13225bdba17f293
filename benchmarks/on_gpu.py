"""
Everything that is measured of the FlashInfer plugin on one GPU, within a given time.

    pip install --no-deps -e core -e plugins/flashinfer
    python benchmarks/on_gpu.py --out DIR [--seconds 560] [--parts compile bench-fa3 bench-fa2 decode engine]

Each part runs in a process of its own and is ended when its time is over; what it had found by then is in the folder,
and the next part begins. summary.json says how each part ended.

- compile: the modules that the other parts and the GPU tests need, several at once
- bench-fa3, bench-fa2: builds, forwards and replays over the library's raw calls, as by `attnplug bench build forward`
- decode: CUDA cores against tensor cores, as by flashinfer_decode.py
- engine: the engine beside transformers' continuous batching, as by engine.py --preset 1b
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attrs import evolve

import attnplug
from attnplug.cli.bench import building, forwarding, replaying
from attnplug.cli.bench.baseline import GROUP
from attnplug.cli.bench.choice import Choice
from attnplug.cli.bench.clock import host_clock, work_clock
from attnplug.cli.bench.machine import machine
from attnplug.cli.bench.measurement import told
from attnplug.cli.bench.result import Result

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attnplug.cli.bench.finding import Finding

HERE = Path(__file__).parent
SHARES = {"compile": 0.5, "bench-fa3": 0.5, "bench-fa2": 0.5, "decode": 0.5, "engine": 1.0}
"""What each part may take of the time that is left when it begins."""

AT_ONCE = 6
JOBS = "3"
"""Processes that compile, and what each may start: a compiler takes some GiB."""

_LLAMA = {"head_size": 128, "num_q_heads": 32, "num_kv_heads": 8, "dtype": "bfloat16"}
_GPT_OSS = {"head_size": 64, "num_q_heads": 64, "num_kv_heads": 8, "dtype": "bfloat16", "sinks": True}
_GEMMA = {**_LLAMA, "num_q_heads": 16, "logits_soft_cap": 2.0}
NEEDED: tuple[dict[str, Any], ...] = (
    _LLAMA,
    {**_LLAMA, "head_size": 64},
    _GPT_OSS,
    {**_GPT_OSS, "sliding_window": 128},
    _GEMMA,
    {**_GEMMA, "sliding_window": 128},
)
"""The layers of the benchmarks, of the engine's model, and of the models of the GPU tests."""

NEEDED_OF_FA2: tuple[dict[str, Any], ...] = (
    {**_LLAMA, "num_q_heads": 16},
    {**_LLAMA, "num_q_heads": 16, "sliding_window": 128},
)
"""Those of the GPU tests in which a layer forgets its soft cap."""


def main() -> int:
    """Run the parts that were asked for."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    if options.compile:
        return _compile(json.loads(options.compile))
    if options.bench:
        return _bench(options.bench, options.out, options.seconds, options.repeats)
    if not entry_points(group=GROUP, name="flashinfer"):
        print("the plugin is not installed: pip install --no-deps -e core -e plugins/flashinfer", file=sys.stderr)
        return 2
    end, outcomes = time.monotonic() + options.seconds, {}
    for part in options.parts:
        limit = SHARES[part] * (end - time.monotonic()) if part != options.parts[-1] else end - time.monotonic()
        print(f"== {part}, at most {limit:.0f} s", flush=True)
        start = time.monotonic()
        outcomes[part] = {"ended": _run(part, options, limit), "seconds": round(time.monotonic() - start, 1)}
        print(f"== {part}: {outcomes[part]}", flush=True)
        (options.out / "summary.json").write_text(json.dumps(outcomes, indent=1))
    return int(any(one["ended"] != 0 for one in outcomes.values()))


def _run(part: str, options: argparse.Namespace, limit: float) -> int | str:
    if limit < 5:
        return "no time was left"
    if part == "compile":
        return _compile_all(options.out, limit)
    own = [sys.executable, str(HERE / "on_gpu.py"), "--out", str(options.out), "--seconds", f"{limit - 5:.0f}"]
    commands = {
        "bench-fa3": [*own, "--repeats", str(options.repeats), "--bench", "flashinfer/fa3"],
        "bench-fa2": [*own, "--repeats", str(options.repeats), "--bench", "flashinfer/fa2"],
        "decode": [*own[:1], str(HERE / "flashinfer_decode.py"), *own[2:]],
        "engine": [*own[:1], str(HERE / "engine.py"), "--preset", "1b", "--backend", "flashinfer", "--also", "torch"],
    }
    command = commands[part] + (["--out", str(options.out)] if part == "engine" else [])
    return _ended(command, options.out / f"{part}.log", limit)


def _ended(command: list[str], log: Path, limit: float, environment: dict[str, str] | None = None) -> int | str:
    """Run a command, show and keep what it says, and end it when its time is over; return how it ended."""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(  # noqa: S603 - scripts of this folder
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,  # compilers that it starts end with it
        )
        try:
            found: int | str = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            found = f"ended after {limit:.0f} s"
    print(log.read_text(encoding="utf-8", errors="replace")[-4000:], flush=True)
    return found


# -- compile -------------------------------------------------------------------------------------------------------


def _compile_all(out: Path, limit: float) -> int | str:
    end = time.monotonic() + limit
    jobs = [{"variant": variant, **asked} for asked in NEEDED for variant in ("fa3", "fa2")]
    jobs += [{"variant": "fa2", **asked} for asked in NEEDED_OF_FA2]

    def compiled(number: int) -> int | str:
        left, start = end - time.monotonic(), time.monotonic()
        if left < 1:
            return "no time was left"
        command = [sys.executable, str(HERE / "on_gpu.py"), "--out", str(out), "--compile", json.dumps(jobs[number])]
        found = _ended(command, out / f"compile-{number}.log", left, {"MAX_JOBS": JOBS})
        print(f"{jobs[number]}: {found}, {time.monotonic() - start:.0f} s", flush=True)
        return found

    with ThreadPoolExecutor(AT_ONCE) as pool:
        ended = list(pool.map(compiled, range(len(jobs))))
    failed = [f"{job}: {how}" for job, how in zip(jobs, ended, strict=True) if how != 0]
    return "; ".join(failed) or 0


def _compile(asked: dict[str, Any]) -> int:
    import torch  # noqa: PLC0415 - the parent does without

    from attnplug.contract import GraphKey  # noqa: PLC0415 - as above

    variant = asked.pop("variant")
    backend = attnplug.load(attnplug.Requirements(**asked), backend=f"flashinfer/{variant}")
    backend.warmup([GraphKey(1, 1, 1)])
    torch.cuda.synchronize()
    return 0


# -- bench ---------------------------------------------------------------------------------------------------------


def _bench(backend: str, out: Path, seconds: float, repeats: int) -> int:
    """Measure step by step, and write what was found after each."""
    end, choice = time.monotonic() + seconds, Choice(backend, "cuda", 1)
    choice.settle()
    facts, file = machine(), out / f"forward-{backend.replace('/', '-')}"
    found = Result(f"python benchmarks/on_gpu.py --bench {backend}", facts, ())
    for what, measure in _steps(choice, repeats):
        found = _with(found, what, measure if time.monotonic() < end else _no_time)
        for suffix in (".md", ".json"):
            found.write(file.with_suffix(suffix))
    return 1 if found.failures else 0


def _steps(choice: Choice, repeats: int) -> Iterator[tuple[str, Callable[[], Finding]]]:
    """Yield what is measured: the most wanted first."""
    host, device = host_clock("cuda"), work_clock("cuda")
    for step in forwarding.LARGE["cuda"]:
        yield f"device, {step.what}", lambda s=step: forwarding.measured(s, choice, device, repeats, is_small=False)
    for step in forwarding.SMALL:
        yield f"host, {step.what}", lambda s=step: forwarding.measured(s, choice, host, repeats, is_small=True)
    for step in building.IN_SLOT:
        yield f"slot, {step.what}", lambda s=step: building.measured_in_slot(s, choice, host, repeats)
    for step in building.STEPS:
        yield f"build, {step.what}", lambda s=step: building.measured(s, choice, host, repeats)
    for step in replaying.STEPS:
        yield f"replay, {step.what}", lambda s=step: replaying.measured(s, choice, repeats)


def _no_time() -> Finding:
    raise TimeoutError("no time was left")


def _with(result: Result, what: str, measure: Callable[[], Finding]) -> Result:
    """Return a result with what one step gives."""
    try:
        found = measure()
    except Exception as error:  # noqa: BLE001 - the next step may do better
        failure = f"{what}: {type(error).__name__}: {error}"
        print(f"FAILED {failure}", flush=True)
        return evolve(result, failures=(*result.failures, failure))
    for one in found.measurements:
        budget = "" if one.budget is None else f"  ({one.verdict}, budget {one.budget:g})"
        print(f"{told(one.median, one.unit):>10}  {one.what}{budget}", flush=True)
    return evolve(
        result,
        measurements=(*result.measurements, *found.measurements),
        setup={**result.setup, **found.setup},
        notes=tuple(dict.fromkeys((*result.notes, *found.notes))),
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=560.0, help="what all parts may take together")
    parser.add_argument("--parts", nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--repeats", type=int, default=10, help="as for `attnplug bench`")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    parser.add_argument("--bench", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
