"""
Compares writes of K and V of one layer into its KV cache.

    python benchmarks/write.py [--device cuda] [--dtype bfloat16] [--cache bfloat16] [--layout NHD] [--json]

`write_kv` is the launch that backends use, `write_pages` two calls for K and V, `index_copy` two calls of torch, with
rows that already have the dtype of the cache and no padding. `host` is the host time of a call, `device` the time of a
call in a captured graph, both in microseconds: medians of alternating rounds. On the CPU there is `host` only.
`pages_of` is timed too, by number of requests.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from statistics import median
from typing import TYPE_CHECKING

import torch

from attnplug.batching import pages_of
from attnplug.contract import Batch, is_narrow_float
from attnplug.ops import quantize, write_kv, write_pages
from attnplug.ops.gather import slots_view

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

BLOCK = 16


def writers(tokens: int, options: argparse.Namespace) -> dict[str, Callable[[], None]]:
    """Return the calls that write so many tokens into shuffled slots."""
    dtype, narrow = getattr(torch, options.dtype), getattr(torch, options.cache)
    heads, size = options.heads, options.head_size
    fused = torch.randn(tokens, 6 * heads, size, device=options.device).to(
        dtype
    )  # as in the output of a fused projection
    key, value = fused[:, 4 * heads : 5 * heads], fused[:, 5 * heads :]
    blocks = 2 * tokens // BLOCK + 2
    shape = (blocks, 2, BLOCK, heads, size) if options.layout == "NHD" else (blocks, 2, heads, BLOCK, size)
    cache = torch.zeros(shape, device=options.device).to(narrow)
    pages = [half if options.layout == "NHD" else half.transpose(1, 2) for half in (cache[:, 0], cache[:, 1])]
    slots = BLOCK + torch.randperm((blocks - 1) * BLOCK, generator=torch.Generator().manual_seed(0))[:tokens]
    slots = slots.to(options.device)
    scale = torch.ones(1, device=options.device) if is_narrow_float(narrow) else None

    def both() -> None:
        write_pages(key, pages[0], slots, scale)
        write_pages(value, pages[1], slots, scale)

    return {
        "write_kv": lambda: write_kv(key, value, *pages, slots, scale, scale),
        "write_pages": both,
        "index_copy": copies(key, value, narrow, slots, options),
    }


def copies(
    key: Tensor, value: Tensor, dtype: torch.dtype, slots: Tensor, options: argparse.Namespace
) -> Callable[[], None]:
    """Return two calls of torch, into contiguous slots, with rows that need no conversion."""
    rows = [
        quantize(each, dtype).view(torch.uint8) if is_narrow_float(dtype) else each.to(dtype) for each in (key, value)
    ]
    count = (2 * key.shape[0] // BLOCK + 2) * BLOCK
    flat = [each.new_zeros(count // BLOCK, BLOCK, *each.shape[1:], device=options.device) for each in rows]
    into = [slots_view(each) for each in flat]

    def call() -> None:
        for each, target in zip(rows, into, strict=True):
            target.index_copy_(0, slots, each)  # type: ignore[union-attr]

    return call


def captured(call: Callable[[], None], calls: int) -> torch.cuda.CUDAGraph:
    """Return a graph of so many calls, after a first one that compiles."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    graph.replay()
    return graph


def on_device(graph: torch.cuda.CUDAGraph, calls: int) -> float:
    """Return the microseconds of one of the calls in a graph."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return 1e3 * start.elapsed_time(end) / calls


def on_host(call: Callable[[], object], calls: int, device: str) -> float:
    """Return the microseconds of host time of a call, on an idle device."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    return 1e6 * (time.perf_counter() - start) / calls


def measure(tokens: int, options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Return microseconds by writer, `host` and `device`."""
    calls, cuda = options.calls, options.device == "cuda"
    all_writers = writers(tokens, options)
    graphs = {name: captured(call, calls) for name, call in all_writers.items()} if cuda else {}
    found: dict[str, dict[str, list[float]]] = {name: {"host": [], "device": []} for name in all_writers}
    for _ in range(options.rounds):
        for name, call in all_writers.items():
            found[name]["host"].append(on_host(call, calls, options.device))
            if cuda:
                found[name]["device"].append(on_device(graphs[name], calls))
    return {name: {kind: round(median(all_), 2) for kind, all_ in of.items() if all_} for name, of in found.items()}


def pages(requests: int, options: argparse.Namespace) -> float:
    """Return the microseconds of host time of `pages_of`, for requests of about 1000 tokens."""
    lens = torch.randint(1, 2000, (requests,), generator=torch.Generator().manual_seed(0)).tolist()
    table = torch.ones(requests, 125, dtype=torch.int32, device=options.device)
    batch = Batch.from_lengths([1] * requests, lens, block_table=table)

    def call() -> None:
        batch.derived.clear()
        pages_of(batch, BLOCK)

    call()
    return round(median(on_host(call, options.calls, options.device) for _ in range(options.rounds)), 2)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--cache", default="bfloat16", help="dtype of the cache, float8_e4m3fn say")
    parser.add_argument("--layout", default="NHD", choices=["NHD", "HND"])
    parser.add_argument("--tokens", type=lambda text: tuple(map(int, text.split(","))), default=(1, 64, 256, 8192))
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--calls", type=int, default=50, help="calls per round")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = arguments()
    torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if options.device == "cuda" else platform.processor() or "CPU"
    print(json.dumps({"torch": torch.__version__, "device": name, **vars(options)}), file=sys.stderr)
    for tokens in options.tokens:
        for writer, found in measure(tokens, options).items():
            if options.json:
                print(json.dumps({"tokens": tokens, "writer": writer, **found}), flush=True)
            else:
                print(f"{tokens:6} tokens  {writer:12} " + "  ".join(f"{k} {v:9.2f} us" for k, v in found.items()))
    for requests in (4, 64, 256):
        host = pages(requests, options)
        line = json.dumps({"requests": requests, "writer": "pages_of", "host": host})
        print(line if options.json else f"{requests:6} requests pages_of    host {host:9.2f} us", flush=True)


if __name__ == "__main__":
    main()
