"""
Measure int8 attention beside 16-bit attention on one GPU: the plugin's kernels in many configurations, the plugin as a
host calls it, and FlashAttention, FlashInfer and FlexAttention, where they are installed.

    python benchmarks/int8.py --out DIR [--seconds 500] [--repeats 7] [--parts decode prefill]

Decodes are 64 requests of 4096 tokens, prefills 4 of 4096, with 32 query and 8 KV heads of size 128. All configurations
of a case run on the same inputs in turn, in one process; times are medians of device time, between two events. Each
result is first compared with attention in float64: the relative error is at most 8 % with int8 KV caches, and 1 %
otherwise. Configurations that fail, or are not installed, are listed with the reason. The report also has the tokens
that the same memory holds at each level.

It writes int8.json and int8.md into the folder after each case.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

import attnplug
import attnplug_int8_ixformer
from attnplug.contract import Batch, Layer, Limits, LoadedBackend
from attnplug.errors import DuplicateBackendError
from attnplug.ops import split_bytes, write_kv
from attnplug_int8_ixformer.pages import Pages
from attnplug_int8_ixformer.provider import ScoreParams
from attnplug_int8_ixformer.tiles import DecodeTiles, PrefillTiles
from attnplug_int8_ixformer.triton_launch import (
    DecodePlan,
    PrefillPlan,
    attend_decode,
    attend_prefill,
    column_bytes,
    write_rows,
)
from attnplug_kit.bench import Contender, DeviceClock, interleaved, machine

DEVICE = torch.device("cuda")
HEADS, KV_HEADS, SIZE, LENGTH = 32, 8, 128, 4096
CACHES = {1: "int8", 2: "int8_k"}
BYTES = {"auto": 4 * SIZE, "fp8_e4m3": 2 * SIZE, "int8": 2 * SIZE + 4, "int8_k": 3 * SIZE + 4}
"""Bytes of keys and values per token and KV head, key scales included."""

DECODE_TILES = tuple(
    DecodeTiles(keys, stages, warps, programs)
    for (keys, stages, warps), programs in product(
        ((64, 5, 2), (64, 5, 4), (64, 3, 4), (64, 7, 2), (128, 5, 4), (32, 7, 1), (16, 9, 1)), (3, 4, 8, 16)
    )
)
PREFILL_TILES = tuple(
    PrefillTiles(*numbers)
    for numbers in (
        (64, 128, 3, 4), (64, 128, 2, 4), (64, 128, 5, 4), (64, 64, 3, 4), (64, 64, 5, 4), (128, 128, 3, 8),
        (128, 64, 3, 8),
    )
)  # fmt: skip
TMA_TILES = tuple(PrefillTiles(*numbers) for numbers in ((64, 128, 3, 4), (64, 128, 2, 4), (128, 128, 2, 8)))
OTHERS = {
    "decode": (
        ("flash_attn/fa3_vllm", "auto"), ("flash_attn/fa3", "auto"), ("flash_attn/fa4", "auto"),
        ("flashinfer/fa3", "auto"), ("flashinfer/fa2", "auto"), ("flashinfer/fa2", "fp8_e4m3"),
    ),
    "prefill": (
        ("flash_attn/fa3_vllm", "auto"), ("flash_attn/fa3", "auto"), ("flash_attn/fa4", "auto"),
        ("flashinfer/fa3", "auto"), ("flashinfer/fa2", "auto"), ("torch/flex", "auto"),
    ),
}  # fmt: skip
TARGETS = {"decode": {"int8": 200, "int8_k": 260}, "prefill": {"int8": 976}}
"""Target times in microseconds."""

Launch = Callable[[], object]


@frozen(eq=False)
class Step:
    """
    A step whose requests have the same tokens in different pages.

    Attributes:
        requests: The number of requests.
        new: New tokens of each request.
        page: Tokens of a page.
        table: ``(requests, pages of each)`` int32, shuffled.
        query: ``(requests * new, HEADS, SIZE)``.
        key: ``(LENGTH, KV_HEADS, SIZE)`` of each request.
        value: As `key`.
        out: As `query`.
        scales: ``(KV_HEADS, SIZE)`` value scales.
        starts: ``(requests + 1,)`` int32.
        lens: ``(requests,)`` int32.
        kept: Values that configurations share.
    """

    requests: int
    new: int
    page: int
    table: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor
    scales: Tensor
    starts: Tensor
    lens: Tensor
    kept: dict[Any, Any] = field(factory=dict)

    @classmethod
    def of(cls, requests: int, new: int, page: int) -> Step:
        """Return random inputs; the channels of the values have different sizes."""
        generator = torch.Generator(DEVICE).manual_seed(0)
        draw = partial(torch.randn, generator=generator, device=DEVICE)
        each = LENGTH // page
        order = torch.randperm(requests * each, generator=generator, device=DEVICE)
        value = draw(LENGTH, KV_HEADS, SIZE) * (1 + draw(KV_HEADS, SIZE).abs())
        query = draw(new, HEADS, SIZE).bfloat16().repeat(requests, 1, 1)
        return cls(
            requests=requests,
            new=new,
            page=page,
            table=1 + order.int().view(requests, each),
            query=query,
            key=draw(LENGTH, KV_HEADS, SIZE).bfloat16(),
            value=value.bfloat16(),
            out=torch.empty_like(query),
            scales=value.abs().amax(0) / 127,
            starts=torch.arange(requests + 1, dtype=torch.int32, device=DEVICE) * new,
            lens=torch.full((requests,), LENGTH, dtype=torch.int32, device=DEVICE),
        )

    @property
    def fresh(self) -> tuple[Tensor, Tensor]:
        """Keys and values of the new tokens of all requests."""
        return self.once(
            "fresh", lambda: tuple(part[-self.new :].repeat(self.requests, 1, 1) for part in (self.key, self.value))
        )

    @property
    def slots(self) -> Tensor:
        """The slot of each token, ``(requests, LENGTH)`` int64."""
        positions = torch.arange(LENGTH, device=DEVICE)
        return self.once(
            "slots", lambda: self.table[:, positions // self.page].long() * self.page + positions % self.page
        )

    @property
    def blocks(self) -> int:
        """Blocks of a cache."""
        return 1 + self.table.numel()

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Return the value of the first call."""
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def pages(self, level: int) -> Pages:
        """Return the quantized cache, written by the plugin's kernel."""
        return self.once(("pages", level), lambda: self._pages(level))

    def _pages(self, level: int) -> Pages:
        shape = (self.blocks, KV_HEADS, self.page, SIZE)
        keys = torch.zeros(shape, dtype=torch.int8, device=DEVICE)
        values = torch.zeros(shape, dtype=torch.int8 if level == 1 else torch.bfloat16, device=DEVICE)
        found = Pages(
            keys.transpose(1, 2),
            values.transpose(1, 2),
            torch.zeros(shape[:3], device=DEVICE),
            self.scales if level == 1 else None,
        )
        for row in self.slots:
            write_rows(self.key, self.value, found, row)
        return found

    def exact(self) -> Tensor:
        """Return the last rows of a request, ``(rows, HEADS, SIZE)`` float64."""
        rows = min(self.new, 32)
        key, value = (part.double().repeat_interleave(HEADS // KV_HEADS, 1) for part in (self.key, self.value))
        scores = torch.einsum("qhd,khd->hqk", self.query[-rows:].double(), key) * SIZE**-0.5
        positions = torch.arange(LENGTH, device=DEVICE)
        scores.masked_fill_(positions[None] > positions[-rows:, None], -torch.inf)
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), value)


# --- configurations ---------------------------------------------------------------------------------------------------


def decodes(step: Step, level: int, tiles: DecodeTiles, multiprocessors: int) -> Launch:
    """Return the decode kernel."""
    splits = tiles.splits(sequences=step.requests * KV_HEADS, keys=LENGTH, multiprocessors=multiprocessors)
    plan = DecodePlan(
        query_starts=step.starts,
        seq_lens=step.lens,
        table=step.table,
        max_query_len=1,
        num_splits=splits,
        scratch=torch.empty(split_bytes(step.requests * splits, HEADS, SIZE), dtype=torch.uint8, device=DEVICE),
        tiles=tiles,
    )
    pages, fresh, params = step.pages(level), step.fresh, ScoreParams(SIZE**-0.5)
    return lambda: attend_decode(step.query, fresh, pages, step.out, plan, params)


def prefills(step: Step, level: int, tiles: PrefillTiles, *, uses_tma: bool = False) -> Launch:
    """Return the prefill kernels, on pages that are written already."""
    bytes_of_all = step.requests * LENGTH * column_bytes(KV_HEADS, SIZE, with_keys=True)
    plan = PrefillPlan(
        query_starts=step.starts,
        seq_lens=step.lens,
        table=step.table,
        key_starts=torch.arange(step.requests, dtype=torch.int32, device=DEVICE) * LENGTH,
        first=0,
        count=step.requests,
        max_query_len=step.new,
        max_seq_len=LENGTH,
        scratch=step.once("scratch", lambda: torch.empty(bytes_of_all, dtype=torch.uint8, device=DEVICE)),
        uses_tma=uses_tma,
        tiles=tiles,
    )
    pages, params = step.pages(level), ScoreParams(SIZE**-0.5)
    return lambda: attend_prefill(step.query, pages, step.out, plan, params)


def hosted(step: Step, backend: str, dtype: str) -> Launch:
    """Return a backend as a host calls it: the write of the new rows, and attention."""
    requirements = attnplug.Requirements(
        head_size=SIZE, num_q_heads=HEADS, num_kv_heads=KV_HEADS, dtype="bfloat16", paged=True, block_size=step.page,
        kv_cache_dtype=dtype,
    )  # fmt: skip
    loaded = attnplug.load(requirements, backend=backend)
    impl, rows = loaded.make_impl(Layer(name="layer")), step.requests * step.new
    cache = _filled(step, loaded)
    batch = Batch.from_lengths(
        [step.new] * step.requests,
        [LENGTH] * step.requests,
        block_table=step.table.cpu(),
        slot_mapping=step.slots[:, -step.new :].flatten().cpu(),
        device=DEVICE,
    )
    limits = Limits(max_num_reqs=step.requests, max_num_tokens=rows, max_seq_len=LENGTH)
    built = loaded.make_builder([impl], loaded.make_state(limits)).build(batch)
    key, value = step.fresh
    if "decode" in impl.host_writes or "prefill" in impl.host_writes:
        impl.write_kv(key, value, cache, built.batch.slot_mapping)
    return lambda: impl.forward(step.query, key, value, cache, built, step.out.view(rows, -1))


def _filled(step: Step, loaded: LoadedBackend) -> Any:
    cache = loaded.make_cache(step.blocks)
    if "k_scale" in cache:
        if "v_scale" in cache:
            cache["v_scale"].copy_(step.scales)
        for row in step.slots:
            write_rows(step.key, step.value, Pages.of(cache), row)
        return cache
    scale = None if cache.k.dtype == torch.bfloat16 else torch.ones(1, device=DEVICE)
    for row in step.slots:
        write_kv(step.key, step.value, cache.k, cache.v, row, scale, scale)
    return cache


def launches_of(part: str, step: Step, multiprocessors: int) -> dict[str, tuple[Callable[[], Launch], str]]:
    """Return the configurations of a case by name, each with its KV cache dtype."""
    found: dict[str, tuple[Callable[[], Launch], str]] = {}
    for backend, dtype in OTHERS[part]:
        found[f"{backend}, {dtype}"] = (partial(hosted, step, backend, dtype), dtype)
    for dtype in CACHES.values():
        found[f"int8_ixformer/triton, {dtype}"] = (partial(hosted, step, "int8_ixformer/triton", dtype), dtype)
    for level, dtype in CACHES.items():
        if part == "decode":
            found |= {
                f"level {level} {tiles}": (partial(decodes, step, level, tiles, multiprocessors), dtype)
                for tiles in DECODE_TILES
            }
        else:
            found |= {
                f"level {level} {tiles}": (partial(prefills, step, level, tiles), dtype) for tiles in PREFILL_TILES
            }
            tma_tiles = TMA_TILES if level == 1 else ()
            found |= {
                f"level {level}, TMA, {tiles}": (
                    partial(prefills, step, level, tiles, uses_tma=True),
                    dtype,
                )
                for tiles in tma_tiles
            }
    return found


# --- measuring ------------------------------------------------------------------------------------------------------


def measure(part: str, step: Step, options: Any) -> dict[str, Any]:
    """Return of each configuration the median in microseconds, the KV cache dtype, the relative error, and failures."""
    count = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    expected, ready, errors, failed = step.exact(), {}, {}, {}
    known = launches_of(part, step, count)
    for name, (make, dtype) in known.items():
        if time.perf_counter() > options.end:
            failed[name] = "no time was left"
            continue
        try:
            step.out.fill_(float("nan"))
            launch = make()
            launch()
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - the next configuration may run
            failed[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            continue
        errors[name] = float((step.out[-len(expected) :].double() - expected).norm() / expected.norm())
        if errors[name] <= (0.01 if dtype == "auto" else 0.08):
            ready[name] = launch
        else:
            failed[name] = f"wrong: relative error {errors[name]:.3g} against float64"
    contenders = {name: Contender(lambda _, launch=launch: launch()) for name, launch in ready.items()}
    samples = interleaved(contenders, options.clock, options.repeats)
    us = {name: 1e6 * median(samples.seconds[name]) for name in ready}
    return {"us": us, "errors": errors, "failed": failed, "cache": {name: dtype for name, (_, dtype) in known.items()}}


def page_of(facts: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """Return the results as Markdown, the fastest first."""
    lines = ["# Int8 attention", "", "Written by `benchmarks/int8.py`. Medians of device time, of one run.", ""]
    lines += [f"- {name}: {value}" for name, value in facts.items()]
    for one in results:
        fastest = min((us for name, us in one["us"].items() if one["cache"][name] == "auto"), default=None)
        lines += ["", f"## {one['case']}", "", *_verdicts(one), ""]
        lines += [
            "| configuration | us | of the fastest 16-bit one | relative error | achieved throughput |",
            "| --- | --- | --- | --- | --- |",
        ]
        for name, us in sorted(one["us"].items(), key=lambda item: item[1]):
            ratio = "" if fastest is None else f"{us / fastest:.2f}"
            read = one["tokens"] * KV_HEADS * BYTES[one["cache"][name]] / us / 1e6
            share = (
                f"{read:.2f} TB/s, {1e12 * read / facts['copy, bytes/s']:.0%} of copy bandwidth"
                if one["part"] == "decode"
                else ""
            )
            lines.append(f"| {name} | {us:.0f} | {ratio} | {one['errors'][name]:.4f} | {share} |")
        lines += ["", *(f"- {name}: {why}" for name, why in one["failed"].items())]
    return "\n".join([*lines, ""])


def _verdicts(one: dict[str, Any]) -> list[str]:
    """Compare each target with the plugin's fastest configuration."""
    lines = []
    for dtype, target in TARGETS[one["part"]].items():
        own = {n: us for n, us in one["us"].items() if one["cache"][n] == dtype}
        if own:
            best = min(own, key=lambda name: own[name])
            lines.append(f"- {dtype}: {own[best]:.0f} us at best ({best}), target {target} us")
    return lines


def capacity() -> dict[str, dict[str, float]]:
    """Return by KV cache dtype the bytes of a token in one layer's cache, and the capacity relative to 16 bits."""
    found = {}
    for dtype in ("auto", *CACHES.values()):
        requirements = attnplug.Requirements(
            head_size=SIZE, num_q_heads=HEADS, num_kv_heads=KV_HEADS, dtype="bfloat16", paged=True, block_size=16,
            kv_cache_dtype=dtype,
        )  # fmt: skip
        loaded = attnplug.load(requirements, backend="torch" if dtype == "auto" else "int8_ixformer/triton")
        found[dtype] = {"bytes of a token": loaded.bytes_per_block / 16}
    for one in found.values():
        one["times the tokens"] = found["auto"]["bytes of a token"] / one["bytes of a token"]
    return found


def copy_rate(clock: DeviceClock) -> float:
    """Return the bytes per second that a copy of 2 GiB reads and writes."""
    source = torch.empty(2**31, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / median(clock.seconds(lambda _: target.copy_(source), None) for _ in range(7))


def register(package: Any) -> None:
    """Register a plugin that is importable and not installed."""
    name = package.__name__
    try:
        attnplug.register(f"{name}.plugin", manifest=Path(package.__file__).with_name("attnplug.toml"))
    except DuplicateBackendError:
        print(f"{name} is installed")


def main() -> int:
    """Measure the requested parts within the time limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--parts", nargs="+", default=["decode", "prefill"], choices=["decode", "prefill"])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    options.end, options.clock = time.perf_counter() + options.seconds, DeviceClock()
    register(attnplug_int8_ixformer)
    for name in ("attnplug_flash_attn", "attnplug_flashinfer"):
        try:
            register(__import__(name))
        except ImportError as error:
            print(error)
    facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "versions": f"torch {torch.__version__}, CUDA {torch.version.cuda}, triton {__import__('triton').__version__}",
        "processor": machine()["processor"],
        "copy, bytes/s": copy_rate(options.clock),
        **{
            f"cache {dtype}": f"{one['bytes of a token']:.0f} bytes per token and layer, "
            f"{one['times the tokens']:.2f} times the capacity"
            for dtype, one in capacity().items()
        },
    }
    cases = [("decode", 64, 1, 16), ("decode", 64, 1, 64), ("prefill", 4, LENGTH, 16), ("prefill", 4, LENGTH, 64)]
    results: list[dict[str, Any]] = []
    for part, requests, new, page in cases:
        if part not in options.parts:
            continue
        step = Step.of(requests, new, page)
        found = measure(part, step, options)
        name = f"{part}: {requests} requests of {LENGTH} tokens, pages of {page}"
        results.append({"case": name, "part": part, "tokens": requests * LENGTH, **found})
        (options.out / "int8.json").write_text(json.dumps([facts, results], indent=1, default=str))
        (options.out / "int8.md").write_text(page_of(facts, results))
        del step, found
        torch.cuda.empty_cache()
    print((options.out / "int8.md").read_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
