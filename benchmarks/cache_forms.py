"""
Measure the forms of the KV cache on a GPU: `forward` beside direct library calls on a KV cache of the same form.

    python benchmarks/cache_forms.py --backend flash_attn/fa3_vllm --out DIR [--seconds 120]

Each form is measured in decodes of 64 requests and in first prefills of 4 prompts, of 4,096 tokens each. The results so
far stay in DIR; the exit status is 3 where the library or the GPU is missing.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stepwise import NOT_HERE, is_here, measure_all

import attnplug
from attnplug_kit.bench import Target, forwarding, work_clock
from attnplug_kit.bench.rig import decodes, first_prefills

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attnplug_kit.bench import SectionResult
    from attnplug_kit.bench.rig import Step

FORMS = ("joint", "interleaved", "split", "packed", "independent")
STEPS = {"cuda": (decodes(64, 4096), first_prefills(4, 4096)), "cpu": (decodes(4, 256), first_prefills(1, 128))}
"""Those of the CPU show that the script works."""


def main() -> int:
    """Measure the requested backend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True, help="backend/variant")
    parser.add_argument("--device", default="cuda", choices=sorted(STEPS))
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit")
    parser.add_argument("--repeats", type=int, default=10, help="as for `attnplug bench`")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    direct = Path(__file__).with_name(f"direct_{options.backend.partition('/')[0]}.py")
    target = Target(options.backend, options.device, 1, str(direct) if direct.exists() else None)
    if not is_here(target):
        return NOT_HERE
    file = options.out / f"cache-forms-{options.backend.replace('/', '-')}"
    command = f"python benchmarks/cache_forms.py --backend {options.backend}"
    steps = _steps(target, options.device, options.repeats)
    return 1 if measure_all(steps, command, file, options.seconds).failures else 0


def _steps(target: Target, device: str, repeats: int) -> Iterator[tuple[str, Callable[[], SectionResult]]]:
    """Yield the measurements of the forms that the backend takes."""
    clock = work_clock(device)
    for step in STEPS[device]:
        for form in FORMS:
            if _takes(step, target, form):
                measure = partial(forwarding.measure_step, step, target, clock, repeats, is_small=False)
                yield f"{step.what}, {form}", partial(measure, kv_cache_form=form)
            else:
                print(f"{target.backend} does not take the form {form}", flush=True)


def _takes(step: Step, target: Target, form: str) -> bool:
    requirements = step.requirements("bfloat16", kv_cache_form=form)
    return attnplug.explain(requirements, target.prepare(), backend=target.backend).chosen is not None


if __name__ == "__main__":
    sys.exit(main())
