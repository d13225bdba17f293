"""
Measure latent attention (MLA) on a GPU: `forward` beside direct library calls.

    python benchmarks/latent.py --backend flash_attn/fa3_vllm --out DIR [--block-size 64] [--seconds 120]

Absorbed decodes of 64 requests of 4,096 tokens with 16 and 128 query heads and 1, 2 and 4 new tokens each, replayed
from a graph; and the uncompressed prefill of 4 prompts of 4,096 tokens with keys of 192 and values of 128. Before each
call a product of matrices replaces what the L2 cache holds. The results so far stay in DIR; the exit status is 3 where
the library or the GPU is missing.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from stepwise import NOT_HERE, is_here, measure_all

from attnplug_kit.bench import Step, Target, first_prefills, forwarding, work_clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from attnplug_kit.bench import SectionResult

HEADS = (16, 128)
QUERY_LENS = (1, 2, 4)


def decodes(heads: int, query_len: int, requests: int = 64, length: int = 4096) -> Step:
    """Return decodes over latents of 512 elements and 64 rotary ones."""
    return Step(
        f"latents: decode, {requests} requests of {length} tokens, {query_len} new",
        (query_len,) * requests,
        (length - query_len,) * requests,
        num_q_heads=heads,
        num_kv_heads=1,
        head_size=576,
        head_size_v=512,
        latent=True,
    )


def prefill(heads: int, requests: int = 4, length: int = 4096) -> Step:
    """Return first prefills with uncompressed keys and values."""
    return first_prefills(requests, length, num_q_heads=heads, num_kv_heads=heads, head_size=192, head_size_v=128)


def main() -> int:
    """Measure the requested backend."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", required=True, help="backend/variant")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--block-size", type=int, help="tokens per block; default: what the backend prefers")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit")
    parser.add_argument("--repeats", type=int, default=10, help="as for `attnplug bench`")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    direct = Path(__file__).with_name(f"direct_{options.backend.partition('/')[0]}.py")
    target = Target(options.backend, "cuda", 1, str(direct) if direct.exists() else None)
    if not is_here(target, decodes(16, 1).requirements("bfloat16", block_size=options.block_size)):
        return NOT_HERE
    size = options.block_size
    file = options.out / f"latent-{options.backend.replace('/', '-')}{f'-{size}' if size else ''}"
    command = f"python benchmarks/latent.py --backend {options.backend}{f' --block-size {size}' if size else ''}"
    steps = _steps(target, options.repeats, size)
    return 1 if measure_all(steps, command, file, options.seconds).failures else 0


def _steps(target: Target, repeats: int, size: int | None) -> Iterator[tuple[str, Callable[[], SectionResult]]]:
    pages = {} if size is None else {"block_size": size}
    for query_len in QUERY_LENS:
        for heads in HEADS:
            step = decodes(heads, query_len)
            yield f"{step.what}, {heads} heads", partial(forwarding.measure_replay, step, target, repeats, **pages)
    step, clock = prefill(128), work_clock("cuda")
    yield step.what, partial(forwarding.measure_step, step, target, clock, repeats, is_small=False, paged=False)


if __name__ == "__main__":
    sys.exit(main())
