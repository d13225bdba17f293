"""
Compares the variants of the built-in backend through the public contract.

    python benchmarks/torch_variants.py [--device cuda] [--dtype bfloat16] [--variants sdpa,flex] [--threads 1] [--json]

Each line is the time of one forward of one layer, KV-cache write and gathering included: the fastest of several runs
after a warm-up that compiles. `build`, which an engine calls once for many layers, is timed separately.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from typing import TYPE_CHECKING, Any

import torch
from attrs import asdict, evolve, frozen

import attnplug
from attnplug.contract import Batch, Layer, Limits
from attnplug.request import Device

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnplug.contract import Attention, LoadedBackend, Metadata

BLOCK = 16


@frozen
class Work:
    """A step to time: its lengths, and what the layer requires."""

    name: str
    query_lens: tuple[int, ...]
    context_lens: tuple[int, ...]
    requested: dict[str, Any]


def works(scale: int, requests: int) -> list[Work]:
    """Return the steps, for prompts of `scale` tokens and so many requests that decode."""
    prompt, nothing = (scale,), (0,)
    decode, contexts = (1,) * requests, tuple(scale * (i + 1) // requests - 1 for i in range(requests))
    return [
        Work("prefill", prompt, nothing, {}),
        Work("prefill, window 256", prompt, nothing, {"sliding_window": 256}),
        Work("prefill, soft cap", prompt, nothing, {"logits_soft_cap": 50.0}),
        Work("prefill, sinks", prompt, nothing, {"sinks": True}),
        Work("chunk of 256", (256,), (scale - 256,), {}),
        Work("chunk of 256, soft cap", (256,), (scale - 256,), {"logits_soft_cap": 50.0}),
        Work(f"decode {requests}, one length", decode, (scale - 1,) * requests, {}),
        Work(f"decode {requests}, many lengths", decode, contexts, {}),
        Work(f"decode {requests}, window 256", decode, contexts, {"sliding_window": 256}),
        Work(f"decode {requests}, soft cap", decode, contexts, {"logits_soft_cap": 50.0}),
        Work(f"decode {requests} and a chunk of 256", (*decode, 256), (*contexts, 0), {}),
    ]


@frozen
class Timing:
    """One line of the report, in milliseconds."""

    work: str
    variant: str
    first: float
    build: float
    forward: float


def measure(work: Work, variant: str, options: argparse.Namespace) -> Timing | str:
    """Return the timing, or why this variant does not support this work."""
    device = Device.cpu() if options.device == "cpu" else Device.current()
    requested = attnplug.Requirements(
        head_size=options.head_size, num_q_heads=options.heads[0], num_kv_heads=options.heads[1], dtype=options.dtype,
        block_size=BLOCK, **work.requested,
    )  # fmt: skip
    try:
        backend = load(requested, device, variant)
    except attnplug.AttnplugError as error:
        return str(error).splitlines()[0]
    sinks = torch.zeros(options.heads[0], device=options.device) if requested.sinks else None
    impl = backend.make_impl(Layer(name="layer", sinks=sinks))
    pages = [-(-(n + c) // BLOCK) for n, c in zip(work.query_lens, work.context_lens, strict=True)]
    limits = Limits(
        max_num_reqs=len(pages), max_num_tokens=sum(work.query_lens), max_seq_len=max(pages) * BLOCK,
        num_blocks=sum(pages) + 1,
    )  # fmt: skip
    builder = backend.make_builder([impl], backend.make_state(limits))
    batch = make_batch(work, pages, options.device)
    call = make_call(work, impl, backend.make_cache(sum(pages) + 1), options)
    sync = torch.cuda.synchronize if options.device == "cuda" else lambda: None
    first = timed(lambda: call(builder.build(batch)), sync)
    metadata = builder.build(batch)
    build = min(timed(lambda: builder.build(batch), sync) for _ in range(options.runs))
    call(metadata)
    forward = min(timed(lambda: call(metadata), sync) for _ in range(options.runs))
    return Timing(work.name, variant, *(round(1e3 * seconds, 3) for seconds in (first, build, forward)))


def load(requested: attnplug.Requirements, device: Device, variant: str) -> LoadedBackend:
    """Load a variant; flex also on the CPU, where it is never selected, to measure whether it should be."""
    if (device.type, variant) != ("cpu", "flex"):
        return attnplug.load(requested, device, backend=f"torch/{variant}")
    from attnplug.torch_backend import backend, flex  # noqa: PLC0415 - not every torch has it

    flex._flex = without_lse  # noqa: SLF001 - on the CPU it returns no LSE
    selection = attnplug.select(requested, device, backend="torch/sdpa")
    return backend.FlexBackend(evolve(selection.agreement, variant="flex"), device)


def without_lse(query: Any, key: Any, value: Any, bend: Any, mask: Any, scale: float) -> tuple[Any, None]:
    """Run the kernel of the variant flex without an LSE, which it does not return on the CPU."""
    from torch.nn.attention.flex_attention import flex_attention  # noqa: PLC0415 - as above

    key, value = key.transpose(1, 2), value.transpose(1, 2)
    return flex_attention(query, key, value, score_mod=bend, block_mask=mask, scale=scale), None


def make_batch(work: Work, pages: list[int], device: str) -> Batch:
    """Return a batch on shuffled pages."""
    order = 1 + torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0))
    table = torch.zeros(len(pages), max(pages), dtype=torch.int32)
    slots = []
    for request, (mine, n, c) in enumerate(zip(order.split(pages), work.query_lens, work.context_lens, strict=True)):
        table[request, : len(mine)] = mine.int()
        positions = torch.arange(c, c + n)
        slots.append(mine[positions // BLOCK] * BLOCK + positions % BLOCK)
    seq_lens = [n + c for n, c in zip(work.query_lens, work.context_lens, strict=True)]
    return Batch.from_lengths(
        work.query_lens, seq_lens, block_table=table, slot_mapping=torch.cat(slots), device=device
    )


def make_call(work: Work, impl: Attention, cache: Any, options: argparse.Namespace) -> Callable[[Metadata], None]:
    """Return a call of forward on random tensors."""
    dtype, tokens = getattr(torch, options.dtype), sum(work.query_lens)
    (q_heads, kv_heads), size = options.heads, options.head_size
    query, key, value = (
        torch.randn(tokens, heads, size, device=options.device).to(dtype) for heads in (q_heads, kv_heads, kv_heads)
    )
    for pages in (cache.k, cache.v):
        pages.normal_()
    output = torch.empty(tokens, q_heads * size, dtype=dtype, device=options.device)
    return lambda metadata: impl.forward(query, key, value, cache, metadata, output)


def timed(call: Callable[[], object], sync: Callable[[], None]) -> float:
    """Return the seconds that a call takes, its work on the device included."""
    sync()
    start = time.perf_counter()
    call()
    sync()
    return time.perf_counter() - start


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--variants", default="sdpa,flex")
    parser.add_argument("--tokens", type=int, default=None, help="prompt length; 2048 on the CPU, 8192 on CUDA")
    parser.add_argument("--requests", type=int, default=16, help="requests that decode")
    parser.add_argument("--heads", type=lambda text: tuple(map(int, text.split(","))), default=(32, 8))
    parser.add_argument("--head-size", type=int, default=128)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", default="", help="run the works whose name contains this")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    options = arguments()
    torch.set_num_threads(options.threads)
    tokens = options.tokens or (2048 if options.device == "cpu" else 8192)
    name = torch.cuda.get_device_name() if options.device == "cuda" else f"{platform.processor() or 'CPU'} "
    header = {
        "torch": torch.__version__, "device": name.strip(), "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": options.threads, "dtype": options.dtype, "heads": options.heads, "head_size": options.head_size,
        "tokens": tokens,
    }  # fmt: skip
    print(json.dumps(header), file=sys.stderr)
    for work in works(tokens, options.requests):
        if options.only not in work.name:
            continue
        for variant in options.variants.split(","):
            timing = measure(work, variant, options)
            if isinstance(timing, str):
                print(f"{work.name:30} {variant:6} {timing}", file=sys.stderr)
            elif options.json:
                print(json.dumps(asdict(timing)), flush=True)
            else:
                columns = f"first {timing.first:10.1f}  build {timing.build:8.3f}  forward {timing.forward:9.3f} ms"
                print(f"{work.name:30} {variant:6} {columns}", flush=True)


if __name__ == "__main__":
    main()
