"""
Decodes of latents beside direct calls of the backend's library, captured and replayed, on one GPU with a cold L2 cache.

    python benchmarks/latent.py --backend flashmla [--heads 16 128] [--query-lens 1 2 4] [--fp8] [--out FILE]

Each call writes the new latents into the KV cache and attends; with an FP8 KV cache it quantizes queries before. The
direct calls leave their result in the library's own tensor; "and a copy" copies it into an output, as `forward` does.
Results are compared before. Times are medians of device time in microseconds, calls in turn; --out has them as JSON. A
copy of 1 GiB is measured for scale.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen

import attnplug
from attnplug.contract import Batch, GraphShape, Layer, Limits, capture
from attnplug.ops import quantize_queries, write_kv
from attnplug_kit.bench import Contender, interleaved, machine, work_clock

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

LATENT, ROPE, BLOCK = 512, 64, 64
SCALE = 192**-0.5  # of keys with 128 + 64 elements, before absorption


@frozen(eq=False, kw_only=True)
class Step:
    """
    A decode step with its tensors.

    Attributes:
        heads: Query heads.
        query_len: New tokens of each request.
        seq_len: Keys of each request, new ones included.
        query: ``(tokens, heads, 576)``.
        keys: ``(tokens, 1, 576)``.
        pages: ``(num_blocks, 64, 1, 576)``, the cached latents.
        table: ``(requests, blocks)`` int32, shuffled.
        slots: ``(tokens,)`` int64.
        scale: ``(1,)`` float32, of queries and of an FP8 KV cache; None where it is in bfloat16.
    """

    heads: int
    query_len: int
    seq_len: int
    query: Tensor
    keys: Tensor
    pages: Tensor
    table: Tensor
    slots: Tensor
    scale: Tensor | None = None

    @classmethod
    def make(
        cls, requests: int, seq_len: int, heads: int, query_len: int, device: torch.device, *, fp8: bool = False
    ) -> Step:
        """Return a step of random latents in shuffled pages."""
        generator, columns = torch.Generator(device).manual_seed(0), -(-seq_len // BLOCK)
        tokens, size = requests * query_len, LATENT + ROPE

        def rows(*shape: int) -> Tensor:
            return (torch.randn(*shape, generator=generator, device=device) * 0.5).bfloat16()

        blocks = torch.randperm(requests * columns, generator=generator, device=device, dtype=torch.int64) + 1
        table = blocks.view(requests, columns)
        places = torch.arange(seq_len - query_len, seq_len, device=device)
        slots = (table[:, places // BLOCK] * BLOCK + places % BLOCK).flatten()
        pages = rows(requests * columns + 1, BLOCK, 1, size)
        pages = pages.to(torch.float8_e4m3fn) if fp8 else pages
        query, keys = rows(tokens, heads, size), rows(tokens, 1, size)
        return cls(
            heads=heads, query_len=query_len, seq_len=seq_len, query=query, keys=keys, pages=pages,
            table=table.int(), slots=slots, scale=torch.ones(1, device=device) if fp8 else None,
        )  # fmt: skip

    def write(self) -> None:
        """Write the new latents, as backends do."""
        latents = slice(LATENT)
        write_kv(
            self.keys,
            self.keys[..., latents],
            self.pages,
            self.pages[..., latents],
            self.slots,
            *[self.scale] * 2,
            padded=False,
        )


def flashmla(step: Step) -> Callable[[], Tensor]:
    """Return the direct calls of FlashMLA, whose schedule is made ahead."""
    from flash_mla import flash_mla_interface as library  # noqa: PLC0415 - where it is measured

    requests = step.table.shape[0]
    lens = torch.full((requests,), step.seq_len, dtype=torch.int32, device=step.query.device)
    rows, fp8 = step.query_len * step.heads, step.scale is not None
    schedule, splits = library.get_mla_decoding_metadata(lens, rows, 1, step.heads, is_fp8_kvcache=fp8, use_legacy=True)
    meta = library.FlashMLASchedMeta(tile_scheduler_metadata=schedule, num_splits=splits)
    form = {"softmax_scale": SCALE, "causal": True, "is_fp8_kvcache": fp8, "use_legacy": True}

    def call() -> Tensor:
        step.write()
        query = step.query if step.scale is None else quantize_queries(step.query, step.scale)
        query = query.view(requests, step.query_len, step.heads, -1)
        out, _ = library.flash_mla_with_kvcache(
            query, step.pages, step.table, lens, LATENT, meta, descale_q=step.scale, descale_k=step.scale, **form
        )
        return out.view(step.query.shape[0], -1)

    return call


DIRECT = {"flashmla": flashmla}
"""The direct calls by the name of the backend."""


def forward(step: Step, backend: str) -> tuple[Callable[[], object], Tensor]:
    """Return a replay of `forward`, and its output."""
    device = step.query.device
    requests, tokens = step.table.shape[0], len(step.slots)
    required = attnplug.Requirements(
        latent=True, head_size=LATENT + ROPE, head_size_v=LATENT, num_q_heads=step.heads, num_kv_heads=1,
        dtype="bfloat16", block_size=BLOCK, cudagraph="uniform_batch", decode_query_len=step.query_len,
        kv_cache_dtype="auto" if step.scale is None else "fp8_e4m3",
    )  # fmt: skip
    loaded = attnplug.load(required, backend=backend)
    impl = loaded.make_impl(Layer(name="latents", scale=SCALE))
    state = loaded.make_state(Limits(max_num_reqs=requests, max_num_tokens=tokens, max_seq_len=step.seq_len))
    builder = loaded.make_builder([impl], state)
    cache = loaded.bind_cache({"k": step.pages, "v": step.pages[..., :LATENT]})
    batch = Batch.from_lengths(
        [step.query_len] * requests, [step.seq_len] * requests, block_table=step.table, slot_mapping=step.slots
    )
    output = step.query.new_empty(tokens, impl.output_width)
    with state.graph_capture(requests):
        graph = state.graph(GraphShape(requests, tokens, step.query_len))
        metadata = builder.build(batch, graph=graph)
        _, replay = capture(lambda: impl.forward(step.query, step.keys, None, cache, metadata, output), device)
    return replay, output


def contenders(step: Step, backend: str) -> dict[str, Callable[[], object]]:
    """Return the calls, of which results were compared."""
    direct, copied = DIRECT[backend.partition("/")[0]](step), step.query.new_empty(len(step.slots), step.heads * LATENT)
    replay, output = forward(step, backend)
    found = direct()
    replay()
    torch.testing.assert_close(output, found, rtol=0.02, atol=0.02)
    calls = {"direct": direct, "direct and a copy": lambda: copied.copy_(direct())}
    return {**{name: capture(call, step.query.device)[1] for name, call in calls.items()}, "forward": replay}


def measured(calls: dict[str, Callable[[], object]], device: torch.device, repeats: int) -> dict[str, float]:
    """Return the median of each call in microseconds. The product that keeps the GPU busy before evicts the L2."""
    clock = work_clock(device.type)
    samples = interleaved(
        {name: Contender(lambda _, call=call: call()) for name, call in calls.items()}, clock, repeats
    )
    return {name: round(statistics.median(seconds) * 1e6, 1) for name, seconds in samples.seconds.items()}


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", default="flashmla")
    parser.add_argument("--heads", type=int, nargs="+", default=[16, 128])
    parser.add_argument("--query-lens", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--seq-len", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--out", type=Path)
    options, device = parser.parse_args(), torch.device("cuda")
    rows: list[dict[str, Any]] = []
    source, target = torch.empty(2, 1 << 30, dtype=torch.uint8, device=device)
    copy = measured({"copy of 1 GiB": lambda: target.copy_(source)}, device, options.repeats)
    print(torch.cuda.get_device_name(), machine()["versions"], copy, flush=True)
    for heads in options.heads:
        for query_len in options.query_lens:
            step = Step.make(options.requests, options.seq_len, heads, query_len, device, fp8=options.fp8)
            times = measured(contenders(step, options.backend), device, options.repeats)
            row = {"heads": heads, "query_len": query_len, **times}
            rows.append({**row, "forward / direct": round(times["forward"] / times["direct"], 3)})
            print(rows[-1], flush=True)
    if options.out:
        sizes = {
            "backend": options.backend,
            "requests": options.requests,
            "seq_len": options.seq_len,
            "fp8": options.fp8,
        }
        sizes |= {"device": torch.cuda.get_device_name(), "machine": machine()}
        options.out.write_text(json.dumps({**sizes, **copy, "rows": rows}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
