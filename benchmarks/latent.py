"""
Measure latent attention (MLA) on a GPU: `forward` beside direct library calls.

    python benchmarks/latent.py --backend flash_attn/fa3_vllm --out DIR [--block-size 64] [--seconds 120]
    python benchmarks/latent.py --backend flashmla --out DIR [--kv-cache-dtype fp8_e4m3]
    python benchmarks/latent.py --backend flashmla --out DIR --topk 2048 [--kv-cache-dtype fp8_ds_mla]

Absorbed decodes of 64 requests of 4,096 tokens with 16 and 128 query heads and 1, 2 and 4 new tokens each, replayed
from a graph; and the uncompressed prefill of 4 prompts of 4,096 tokens with keys of 192 and values of 128. With --topk
each token attends to so many random ones, in decodes and in the absorbed prefill of a prompt of 4,096 tokens; slots are
not checked in the direct calls, so that the difference is the price of it. Before each call a product of matrices
replaces what the L2 cache holds. The results so far stay in DIR; the exit status is 3 where the library or the GPU is
missing.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stepwise import NOT_HERE, is_here, measure_all

from attnplug_kit.bench import Step, Target, first_prefills, forwarding, work_clock

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from attnplug_kit.bench import SectionResult

HEADS = (16, 128)
QUERY_LENS = (1, 2, 4)


def decodes(heads: int, query_len: int, requests: int = 64, length: int = 4096, topk: int | None = None) -> Step:
    """Return decodes over latents of 512 elements and 64 rotary ones."""
    selected = "" if topk is None else f", {topk} selected"
    return Step(
        f"latents: decode, {requests} requests of {length} tokens, {query_len} new{selected}",
        (query_len,) * requests,
        (length - query_len,) * requests,
        num_q_heads=heads,
        num_kv_heads=1,
        head_size=576,
        head_size_v=512,
        latent=True,
        topk=topk,
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
    parser.add_argument(
        "--kv-cache-dtype", default="auto", help="dtype of the KV cache; prefills are left out of others"
    )
    parser.add_argument("--topk", type=int, help="tokens that each token attends to; default: all")
    parser.add_argument("--seconds", type=float, default=120.0, help="time limit")
    parser.add_argument("--repeats", type=int, default=10, help="as for `attnplug bench`")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    direct = Path(__file__).with_name(f"direct_{options.backend.partition('/')[0]}.py")
    target = Target(options.backend, "cuda", 1, str(direct) if direct.exists() else None)
    given = {"block_size": options.block_size, "kv_cache_dtype": options.kv_cache_dtype}
    engine = {name: value for name, value in given.items() if value not in (None, "auto")}
    if not is_here(target, decodes(16, 1, topk=options.topk).requirements("bfloat16", **engine)):
        return NOT_HERE
    varied = {**engine, **({} if options.topk is None else {"topk": options.topk})}
    file = options.out / "-".join(("latent", options.backend.replace("/", "-"), *map(str, varied.values())))
    words = [f" --{name.replace('_', '-')} {value}" for name, value in varied.items()]
    command = f"python benchmarks/latent.py --backend {options.backend}{''.join(words)}"
    steps = _steps(target, options.repeats, engine, options.topk)
    return 1 if measure_all(steps, command, file, options.seconds).failures else 0


def _steps(
    target: Target, repeats: int, engine: Mapping[str, Any], topk: int | None
) -> Iterator[tuple[str, Callable[[], SectionResult]]]:
    for query_len in QUERY_LENS:
        for heads in HEADS:
            step = decodes(heads, query_len, topk=topk)
            yield f"{step.what}, {heads} heads", partial(forwarding.measure_replay, step, target, repeats, **engine)
    how: dict[str, Any] = {"is_small": False, **({"paged": False} if topk is None else engine)}
    if topk is not None:
        step = decodes(128, 4096, requests=1, topk=topk)
    elif "kv_cache_dtype" not in engine:
        step = prefill(128)
    else:
        return
    yield step.what, partial(forwarding.measure_step, step, target, work_clock("cuda"), repeats, **how)


if __name__ == "__main__":
    sys.exit(main())
