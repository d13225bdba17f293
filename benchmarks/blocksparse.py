"""
Measure block-sparse attention on one GPU: the plugin's kernels in several configurations, FlexAttention, the block
masks of FlashAttention 4, FlashInfer's block-sparse wrapper, and dense attention.

    python benchmarks/blocksparse.py --out DIR [--seconds 500] [--repeats 7] [--parts prefill decode chunk]

All configurations of a case run on the same inputs in turn, in one process; times are medians of device time, between
two events. A few rows of each result are first compared with float64. Configurations that fail, or are not installed,
are listed with the reason. The pattern is Phi-3-small's: 32 query and 8 KV heads of size 128, blocks of 64, 16 local,
stride 8.

A second table has density, bytes and operations of each head mode, and the fastest time of it as a fraction of the
fastest dense one, which should be near the density.

It writes blocksparse.json and blocksparse.md into the folder after each case.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from attrs import evolve, frozen
from sparsity import Cost, decode_cost, prefill_cost
from torch import Tensor

import attnplug
from attnplug.contract import Batch, Layer, Limits, split_kv
from attnplug.ops import split_bytes
from attnplug_blocksparse import decode, prefill
from attnplug_blocksparse.pattern import BlocksparseParams, Pattern
from attnplug_blocksparse.plan import DecodePlan, PrefillPlan, Scales
from attnplug_blocksparse.prefill_single import has_specialized_kernel, supports_tma
from attnplug_blocksparse.tiles import DecodeTiles, HopperTiles, PrefillTiles
from attnplug_kit.bench import Contender, DeviceClock, interleaved, machine
from attnplug_kit.oracle import seen_by

DEVICE = torch.device("cuda")
HEADS, KV_HEADS, SIZE = 32, 8, 128
PHI = {"max_seqlen": 131072, "block_size": 64, "local_blocks": 16, "vert_stride": 8}
MODES: dict[str, dict[str, bool]] = {
    "per head": {},
    "homo_head_group": {"homo_head_group": True},
    "homo_head": {"homo_head": True},
}
TMA_TILES = tuple(
    PrefillTiles(*numbers)
    for numbers in (
        (64, 64, 3, 4), (64, 64, 2, 4), (64, 32, 3, 4), (128, 64, 2, 4), (128, 64, 2, 8, 128), (128, 64, 3, 8),
        (128, 128, 2, 8), (256, 64, 3, 16),
    )
)  # fmt: skip
POINTER_TILES = tuple(
    PrefillTiles(*numbers)
    for numbers in (
        (128, 64, 2, 8, 128), (128, 64, 3, 8, 128), (128, 64, 2, 8), (128, 128, 3, 8), (64, 64, 3, 4), (64, 64, 2, 4),
    )
)  # fmt: skip
HOPPER_STAGES = (4, 3, 2)
DECODE_TILES = tuple(
    DecodeTiles(*numbers)
    for numbers in (
        (64, 5, 4, 16), (64, 3, 4, 16), (64, 8, 4, 16), (64, 5, 4, 4), (64, 5, 4, 32), (64, 5, 8, 16), (32, 3, 2, 16),
        (32, 5, 2, 16), (32, 5, 4, 16), (16, 5, 2, 16), (128, 3, 8, 16),
    )
)  # fmt: skip
PAGE_SIZES = (64, 16)
_DENSE = "dense"
_ROWS = 24
_MAX_ERROR = 2**-6

Launch = Callable[[], object]


@frozen(eq=False)
class Case:
    """
    The inputs of one request.

    Attributes:
        query: ``(tokens, HEADS, SIZE)``.
        key: ``(tokens, KV_HEADS, SIZE)``.
        value: As `key`.
        out: As `query`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out: Tensor

    @classmethod
    def of(cls, tokens: int) -> Case:
        """Return random inputs."""
        generator = torch.Generator(DEVICE).manual_seed(0)
        draw = partial(torch.randn, generator=generator, device=DEVICE, dtype=torch.bfloat16)
        query, key, value = (draw(tokens, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
        return cls(query, key, value, torch.empty_like(query))


def pattern_of(mode: str) -> Pattern:
    """Return the pattern in one of its head modes."""
    return Pattern(BlocksparseParams.of({**PHI, **MODES[mode]}, num_heads=HEADS, num_kv_heads=KV_HEADS), DEVICE)


def prefill_costs(tokens: int, rows: int) -> dict[str, Cost]:
    """Return the cost of each mode for the last rows of a sequence."""
    patterns = {mode: pattern_of(mode).params for mode in MODES} | {_DENSE: None}
    block = PHI["block_size"]
    return {mode: prefill_cost(params, HEADS, SIZE, tokens, rows, block) for mode, params in patterns.items()}


def decode_costs(requests: int, length: int) -> dict[str, Cost]:
    """Return the cost of each mode for a decode of several sequences."""
    patterns = {mode: pattern_of(mode).params for mode in MODES} | {_DENSE: None}
    each = {
        mode: decode_cost(params, (HEADS, KV_HEADS), SIZE, length, PHI["block_size"])
        for mode, params in patterns.items()
    }
    return {mode: evolve(one, bytes=requests * one.bytes, flop=requests * one.flop) for mode, one in each.items()}


def exact(case: Case, mode: str | None, rows: Tensor) -> Tensor:
    """Return some rows ``(rows, HEADS, SIZE)`` in float64; without a mode, attention is dense."""
    tokens = case.key.shape[0]
    keys, positions = torch.arange(tokens), rows.cpu() + tokens - case.query.shape[0]
    found = torch.empty(len(rows), HEADS, SIZE, dtype=torch.float64, device=DEVICE)
    for head in range(HEADS):
        visible = keys[None, :] <= positions[:, None]
        if mode is not None:
            heads = {"num_q_heads": HEADS, "num_kv_heads": KV_HEADS}
            visible &= seen_by(head, {**PHI, **MODES[mode]}, **heads, queries=positions, keys=keys)
        key, value = (part[:, head * KV_HEADS // HEADS].double() for part in (case.key, case.value))
        scores = case.query[rows, head].double() @ key.T * SIZE**-0.5
        found[:, head] = scores.masked_fill(~visible.to(DEVICE), -torch.inf).softmax(-1) @ value
    return found


# --- prefill --------------------------------------------------------------------------------------------------------


def hopper_tiles() -> tuple[HopperTiles, ...]:
    """Return tiles of the warp-specialized kernel for this GPU, the plugin's own first."""
    programs = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    return tuple(HopperTiles(programs, stages) for stages in HOPPER_STAGES)


def split(tiles: PrefillTiles | HopperTiles, *, paged: bool = False) -> tuple[HopperTiles | None, PrefillTiles]:
    """Return the tiles of the warp-specialized kernel, or None, and those of the others."""
    if isinstance(tiles, PrefillTiles):
        return None, tiles
    if not has_specialized_kernel():
        message = "this Triton does not compile the warp-specialized kernel"
        raise ValueError(message)
    return tiles, PrefillTiles.of(SIZE, paged=paged)


def own(case: Case, mode: str, tiles: PrefillTiles | HopperTiles, *, single: bool = True) -> Launch:
    """Return one of the plugin's kernels on contiguous K/V: warp-specialized, TMA descriptors or pointer loads."""
    hopper, tiles = split(tiles)
    tokens = case.query.shape[0]
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
    plan = PrefillPlan(
        pattern=pattern_of(mode),
        tiles=tiles,
        query_starts=starts,
        seq_lens=starts[1:],
        key_starts=starts,
        max_query_len=tokens,
        query_lens=(tokens,) if single else (),
        hopper=hopper,
    )
    scales = Scales(SIZE**-0.5)
    if single and not supports_tma(case.key, case.value, plan.pattern, tiles):
        message = f"TMA descriptors do not support {tiles}"
        raise ValueError(message)
    return lambda: prefill.attend(case.query, case.key, case.value, case.out, None, plan, scales)


def flex(case: Case, mode: str, rows: int, keys: int) -> Launch:
    """Return compiled FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: PLC0415 - used here only

    pattern, tokens = pattern_of(mode), case.query.shape[0]
    residues = torch.tensor([pattern.params.residue(head) for head in range(HEADS)], device=DEVICE)
    size, local, stride, _ = pattern.constants

    def visible(_: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = query // size - key // size < local
        return (key <= query) & (near | (key // size % stride == residues[head]))

    mask = torch.compile(create_block_mask)(
        visible, None, HEADS, tokens, tokens, device=DEVICE, BLOCK_SIZE=(rows, keys)
    )
    inputs = [part.transpose(0, 1)[None].contiguous() for part in (case.query, case.key, case.value)]
    compiled = torch.compile(flex_attention, dynamic=False)

    def run() -> None:
        case.out.copy_(compiled(*inputs, block_mask=mask, enable_gqa=True)[0].transpose(0, 1))

    run()
    return lambda: compiled(*inputs, block_mask=mask, enable_gqa=True)


def fa4(case: Case, mode: str, rows: int, keys: int) -> Launch:
    """Return FlashAttention 4 with lists of full blocks and of masked blocks."""
    from cutlass import cute  # noqa: PLC0415 - where it is installed
    from flash_attn.cute import flash_attn_func, utils  # noqa: PLC0415
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch  # noqa: PLC0415

    pattern, tokens = pattern_of(mode), case.query.shape[0]
    size, local, stride, _ = pattern.constants
    residues = torch.tensor([pattern.params.residue(head) for head in range(HEADS)], dtype=torch.int32, device=DEVICE)
    step, first = abs(pattern.params.head_sliding_step), 1

    @cute.jit
    def visible(batch, head, query, key, seqlen_info, aux):  # noqa: ANN001, ANN202, ARG001 - as the library calls it
        number = utils.scalar_to_ssa
        kind = query.dtype
        i, j = query // number(size, kind), key // number(size, kind)
        near = i - j < number(local, kind)
        vertical = (j + head * number(step, kind) + number(first, kind)) % number(stride, kind) == number(0, kind)
        return (key <= query) & (near | vertical)

    i, j = torch.arange(tokens // size, device=DEVICE)[:, None], torch.arange(tokens // size, device=DEVICE)[None, :]
    blocks = (j <= i) & ((i - j < local) | (j % stride == residues[:, None, None]))
    whole = blocks & (j < i)
    shape = (HEADS, tokens // rows, rows // size, tokens // keys, max(1, keys // size))
    some, all_of = blocks.view(shape).any(4).any(2), whole.view(shape).all(4).all(2)

    def listed(chosen: Tensor) -> tuple[Tensor, Tensor]:
        order = chosen.int().argsort(dim=-1, descending=True, stable=True).int()
        return chosen.sum(-1).int()[None].contiguous(), order[None].contiguous()

    sparse = BlockSparseTensorsTorch(*listed(some & ~all_of), *listed(all_of), block_size=(rows, keys))
    inputs = [part[None] for part in (case.query, case.key, case.value)]
    run = partial(flash_attn_func, *inputs, mask_mod=visible, block_sparse_tensors=sparse)
    case.out.copy_(run()[0][0])
    return run


def flashinfer(case: Case, mode: str) -> Launch:
    """
    Return FlashInfer's wrapper for variable block sizes, with KV heads repeated: each has its own pattern.

    A row of blocks is one query block: the wrapper's causal mask counts from the last key of a row of blocks.
    """
    from flashinfer import VariableBlockSparseAttentionWrapper  # noqa: PLC0415 - where it is installed

    pattern, tokens = pattern_of(mode), case.query.shape[0]
    size, local, stride, _ = pattern.constants
    residues = torch.tensor([pattern.params.residue(head) for head in range(HEADS)], device=DEVICE)
    i, j = torch.arange(tokens // size, device=DEVICE)[:, None], torch.arange(tokens // size, device=DEVICE)[None, :]
    mask = (j <= i) & ((i - j < local) | (j % stride == residues[:, None, None]))
    wrapper = VariableBlockSparseAttentionWrapper(torch.empty(2**29, dtype=torch.uint8, device=DEVICE), backend="auto")
    sizes = torch.full((HEADS, tokens // size), size, dtype=torch.int32, device=DEVICE)
    wrapper.plan(mask, sizes, sizes, HEADS, HEADS, SIZE, causal=True, q_data_type=torch.bfloat16)
    query = case.query.transpose(0, 1).contiguous()
    key, value = (
        part.transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0).contiguous() for part in (case.key, case.value)
    )
    run = partial(wrapper.run, query, key, value)
    case.out.copy_(run().transpose(0, 1))
    return run


def dense(case: Case, backend: str) -> Launch:
    """Return dense attention by a backend."""
    requirements = attnplug.Requirements(
        head_size=SIZE, num_q_heads=HEADS, num_kv_heads=KV_HEADS, dtype="bfloat16", paged=False
    )
    loaded = attnplug.load(requirements, backend=backend)
    impl, tokens = loaded.make_impl(Layer(name="layer")), case.query.shape[0]
    limits = Limits(max_num_reqs=1, max_num_tokens=tokens, max_seq_len=tokens)
    built = loaded.make_builder([impl], loaded.make_state(limits)).build(Batch.from_lengths([tokens], device=DEVICE))
    out = case.out.view(tokens, -1)
    return lambda: impl.forward(case.query, case.key, case.value, None, built, out)


def prefill_launches(tokens: int, facts: dict[str, Any]) -> dict[str, tuple[Callable[[], Launch], str | None]]:
    """Return prefills by name, each with the mode of its reference, None for dense ones."""
    case, mode = Case.of(tokens), "per head"
    facts["case"], facts["costs"] = case, prefill_costs(tokens, tokens)
    launches: dict[str, tuple[Callable[[], Launch], str | None]] = {
        f"warp-specialized {tiles}": (partial(own, case, mode, tiles), mode) for tiles in hopper_tiles()
    }
    launches |= {f"TMA {tiles}": (partial(own, case, mode, tiles), mode) for tiles in TMA_TILES}
    launches |= {
        f"pointer loads {tiles}": (partial(own, case, mode, tiles, single=False), mode) for tiles in POINTER_TILES
    }
    launches |= {
        f"{kernel}, {other}, {tiles}": (partial(own, case, other, tiles), other)
        for other in list(MODES)[1:]
        for kernel, tiles in (("warp-specialized", hopper_tiles()[0]), ("TMA", PrefillTiles.of(SIZE)))
    }
    launches |= {f"FlexAttention {size}": (partial(flex, case, mode, *size), mode) for size in ((128, 64), (128, 128))}
    launches |= {
        f"FlashAttention 4 {size}": (partial(fa4, case, mode, *size), mode) for size in ((128, 64), (128, 128))
    }
    launches["FlashInfer (64, 64)"] = (partial(flashinfer, case, mode), mode)
    for backend in ("flash_attn/fa3_vllm", "flash_attn/fa3", "flash_attn/fa4", "flash_attn/torch"):
        launches[f"dense {backend}"] = (partial(dense, case, backend), None)
    return launches


# --- chunked prefill and decode, paged -------------------------------------------------------------------------------


def paged(case: Case, page: int) -> tuple[Tensor, Tensor]:
    """Return keys and values in shuffled pages, ``(2, pages, page, KV_HEADS, SIZE)``, and the block table."""
    count = case.key.shape[0] // page
    table = 1 + torch.randperm(count, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE).int()
    cache = torch.zeros(2, count + 1, page, KV_HEADS, SIZE, device=DEVICE, dtype=torch.bfloat16)
    cache[0, table.long()] = case.key.view(count, page, KV_HEADS, SIZE)
    cache[1, table.long()] = case.value.view(count, page, KV_HEADS, SIZE)
    return cache, table[None]


def chunk(case: Case, mode: str, tiles: PrefillTiles | HopperTiles, page: int) -> Launch:
    """Return one of the plugin's kernels on pages: the last rows of a sequence."""
    hopper, tiles = split(tiles, paged=True)
    rows, (cache, table) = case.query.shape[0], paged(case, page)
    starts = torch.tensor([0, rows], dtype=torch.int32, device=DEVICE)
    plan = PrefillPlan(
        pattern=pattern_of(mode),
        tiles=tiles,
        query_starts=starts,
        seq_lens=torch.tensor([case.key.shape[0]], dtype=torch.int32, device=DEVICE),
        table=table,
        max_query_len=rows,
        query_lens=() if hopper is None else (rows,),
        key_lens=() if hopper is None else (case.key.shape[0],),
        hopper=hopper,
    )
    return lambda: prefill.attend(case.query, *cache, case.out, None, plan, Scales(SIZE**-0.5))


def chunk_launches(tokens: int, rows: int, facts: dict[str, Any]) -> dict[str, tuple[Callable[[], Launch], str | None]]:
    """Return prefills of the last rows of a sequence by name."""
    whole, mode = Case.of(tokens), "per head"
    case = evolve(whole, query=whole.query[-rows:], out=whole.out[-rows:])
    facts["case"], facts["costs"] = case, prefill_costs(tokens, rows)
    by_page = {page: (*(hopper_tiles() if page % 64 == 0 else ()), *POINTER_TILES) for page in PAGE_SIZES}
    launches: dict[str, tuple[Callable[[], Launch], str | None]] = {
        f"pages of {page} {tiles}": (partial(chunk, case, mode, tiles, page), mode)
        for page, known in by_page.items()
        for tiles in known
    }
    best = {page: hopper_tiles()[0] if page % 64 == 0 else PrefillTiles.of(SIZE, paged=True) for page in PAGE_SIZES}
    return launches | {
        f"pages of {page}, {other}, {tiles}": (partial(chunk, case, other, tiles, page), other)
        for page, tiles in best.items()
        for other in list(MODES)[1:]
    }


@frozen(eq=False)
class Decodes:
    """
    A batch of decodes. All sequences have the same tokens in different pages.

    Attributes:
        case: The keys, and one query row per request.
        cache: ``(2, pages, page, KV_HEADS, SIZE)``.
        table: ``(requests, pages of each)``.
    """

    case: Case
    cache: Tensor
    table: Tensor

    @classmethod
    def of(cls, requests: int, length: int, page: int) -> Decodes:
        """Return random inputs."""
        each = length // page
        order = torch.randperm(requests * each, generator=torch.Generator(DEVICE).manual_seed(2), device=DEVICE)
        table = 1 + order.int().view(requests, each)
        one = Case.of(length)
        cache = torch.empty(2, requests * each + 1, page, KV_HEADS, SIZE, device=DEVICE, dtype=torch.bfloat16)
        for row in table:
            cache[0, row.long()] = one.key.view(each, page, KV_HEADS, SIZE)
            cache[1, row.long()] = one.value.view(each, page, KV_HEADS, SIZE)
        query = one.query[-1:].repeat(requests, 1, 1)
        return cls(Case(query, one.key, one.value, torch.empty_like(query)), cache, table)


def token(batch: Decodes, mode: str, tiles: DecodeTiles, multiprocessors: int) -> Launch:
    """Return the plugin's decode kernels."""
    requests, length = batch.table.shape[0], batch.case.key.shape[0]
    pattern = pattern_of(mode)
    splits = tiles.splits(
        sequences=requests * KV_HEADS, blocks=pattern.max_blocks(length), multiprocessors=multiprocessors
    )
    plan = DecodePlan(
        pattern=pattern,
        tiles=tiles,
        query_starts=torch.arange(requests + 1, dtype=torch.int32, device=DEVICE),
        seq_lens=torch.full((requests,), length, dtype=torch.int32, device=DEVICE),
        table=batch.table,
        num_splits=splits,
        scratch=torch.empty(split_bytes(requests * splits, HEADS, SIZE), dtype=torch.uint8, device=DEVICE),
    )
    case = batch.case
    return lambda: decode.attend(case.query, *batch.cache, case.out, None, plan, Scales(SIZE**-0.5))


def dense_decode(decodes: Decodes, backend: str) -> Launch:
    """Return dense decodes by a backend, on the same pages."""
    page, (requests, _), length = decodes.cache.shape[2], decodes.table.shape, decodes.case.key.shape[0]
    requirements = attnplug.Requirements(
        head_size=SIZE,
        num_q_heads=HEADS,
        num_kv_heads=KV_HEADS,
        dtype="bfloat16",
        paged=True,
        block_size=page,
        kv_layout="NHD",
        kv_cache_form="joint",
    )
    loaded = attnplug.load(requirements, backend=backend)
    impl = loaded.make_impl(Layer(name="layer", cache_write="host"))
    limits = Limits(max_num_reqs=requests, max_num_tokens=requests, max_seq_len=length)
    batch = Batch.from_lengths(
        [1] * requests,
        [length] * requests,
        block_table=decodes.table.cpu(),
        slot_mapping=(decodes.table[:, -1].cpu().long() + 1) * page - 1,
        device=DEVICE,
    )
    built = loaded.make_builder([impl], loaded.make_state(limits)).build(batch)
    case = decodes.case
    new = [part[-1:].expand(requests, -1, -1).contiguous() for part in (case.key, case.value)]
    out = case.out.view(requests, -1)
    cache = loaded.bind_cache(split_kv(decodes.cache, "joint", "NHD", SIZE))
    return lambda: impl.forward(case.query, *new, cache, built, out)


def decode_launches(
    requests: int, length: int, page: int, facts: dict[str, Any]
) -> dict[str, tuple[Callable[[], Launch], str | None]]:
    """Return decodes by name."""
    batch = Decodes.of(requests, length, page)
    facts["case"], facts["costs"] = batch.case, decode_costs(requests, length)
    facts["are_alike"] = True
    count = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    launches: dict[str, tuple[Callable[[], Launch], str | None]] = {
        f"{mode} {tiles}": (partial(token, batch, mode, tiles, count), mode)
        for mode in MODES
        for tiles in (DECODE_TILES if mode == "per head" else DECODE_TILES[:3])
    }
    for backend in ("flash_attn/fa3_vllm", "flash_attn/fa3", "flash_attn/fa4"):
        launches[f"dense {backend}"] = (partial(dense_decode, batch, backend), None)
    return launches


def copy_bandwidth(clock: DeviceClock) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.empty(2**31, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * 2**31 / median(clock.seconds(lambda _: target.copy_(source), None) for _ in range(7))


# --- measuring ------------------------------------------------------------------------------------------------------


def measure(
    launches: dict[str, tuple[Callable[[], Launch], str | None]],
    facts: dict[str, Any],
    clock: DeviceClock,
    options: Any,
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the median of each configuration in microseconds, and the failures."""
    case, found, failures = facts["case"], {}, {}
    are_alike = "are_alike" in facts  # decodes have equal rows
    rows = torch.randperm(case.query.shape[0], device=DEVICE)[: 1 if are_alike else _ROWS].sort().values
    given = evolve(case, query=case.query[:1]) if are_alike else case
    expected: dict[str | None, Tensor] = {}
    for name, (make, mode) in launches.items():
        if time.perf_counter() > options.end:
            failures[name] = "no time was left"
            continue
        try:
            case.out.fill_(float("nan"))
            launch = make()
            launch()
            torch.cuda.synchronize()
            if mode not in expected:
                expected[mode] = exact(given, mode, torch.zeros_like(rows) if are_alike else rows)
            error = float((case.out[rows].double() - expected[mode]).abs().max())
            if not error <= _MAX_ERROR:
                failures[name] = f"wrong: error {error:.3g} against float64"
                continue
            found[name] = launch
        except Exception as failure:  # noqa: BLE001 - the next configuration may run
            failures[name] = f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"
            torch.cuda.synchronize()
    samples = interleaved(
        {name: Contender(lambda _, launch=launch: launch()) for name, launch in found.items()}, clock, options.repeats
    )
    return {name: 1e6 * median(samples.seconds[name]) for name in found}, failures


def _costs(one: dict[str, Any]) -> list[str]:
    """Return a table of the cost of each mode, and its fastest time as a fraction of the fastest dense one."""
    lines = ["| mode | density | GB | TFLOP | fastest, us | fraction of the fastest dense |", "| --- " * 6 + "|"]
    fastest = {
        mode: min((us for name, us in one["us"].items() if one["modes"][name] == mode), default=None)
        for mode in one["costs"]
    }
    for mode, cost in one["costs"].items():
        us, dense = fastest[mode], fastest[_DENSE]
        share = f"{us / dense:.3f}" if us and dense else "-"
        sizes = f"{cost['density']:.3f} | {cost['bytes'] / 1e9:.2f} | {cost['flop'] / 1e12:.3f}"
        lines.append(f"| {mode} | {sizes} | {f'{us:.0f}' if us else '-'} | {share} |")
    return lines


def _rate(one: dict[str, Any], cost: dict[str, Any], us: float, copy: float) -> str:
    """Return the achieved bytes per second of decodes, or operations per second of prefills."""
    if one["are_alike"]:
        return f"{cost['bytes'] / us / 1e6:.2f} TB/s, {1e6 * cost['bytes'] / us / copy:.0%} of copy bandwidth"
    return f"{cost['flop'] / us / 1e6:.0f} TFLOP/s"


def page_of(machine_facts: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """Return the results as Markdown, the fastest first."""
    lines = [
        "# Block-sparse attention",
        "",
        f"Written by `{shlex.join(sys.argv)}`. Medians of device time.",
        "",
    ]
    lines += [f"- {name}: {value}" for name, value in machine_facts.items()]
    for one in results:
        lines += ["", f"## {one['case']}", "", *_costs(one)]
        lines += ["", "| configuration | us | achieved throughput |", "| --- | --- | --- |"]
        for name, us in sorted(one["us"].items(), key=lambda item: item[1]):
            cost = one["costs"].get(one["modes"][name])
            lines.append(
                f"| {name} | {us:.0f} | {_rate(one, cost, us, machine_facts['copy, bytes/s']) if cost else ''} |"
            )
        lines += ["", *(f"- {name}: {why}" for name, why in one["failed"].items())]
    return "\n".join([*lines, ""])


def main() -> int:
    """Measure the requested parts within the time limit."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    options.end = time.perf_counter() + options.seconds
    clock = DeviceClock()
    machine_facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "versions": f"torch {torch.__version__}, CUDA {torch.version.cuda}, triton {__import__('triton').__version__}",
        "processor": machine()["processor"],
        "revision": os.environ.get("REVISION", "unknown"),
        "copy, bytes/s": copy_bandwidth(clock),
    }
    cases: dict[str, list[tuple[str, Callable[[dict[str, Any]], Any]]]] = {
        "prefill": [(f"prefill of {n} tokens", partial(prefill_launches, n)) for n in (32768, 8192)],
        "decode": [(f"64 decodes of 32768, pages of {p}", partial(decode_launches, 64, 32768, p)) for p in PAGE_SIZES],
        "chunk": [("the last 4096 of 32768", partial(chunk_launches, 32768, 4096))],
    }
    results: list[dict[str, Any]] = []
    for part in options.parts:
        for name, make in cases[part]:
            facts: dict[str, Any] = {}
            launches = make(facts)
            us, failed = measure(launches, facts, clock, options)
            modes = {launch: mode or _DENSE for launch, (_, mode) in launches.items()}
            costs = {mode: cost.to_dict() for mode, cost in facts["costs"].items()}
            kinds = {"modes": modes, "costs": costs, "are_alike": "are_alike" in facts}
            results.append({"case": name, "us": us, "failed": failed, **kinds})
            launches.clear()
            (options.out / "blocksparse.json").write_text(json.dumps([machine_facts, results], indent=1, default=str))
            (options.out / "blocksparse.md").write_text(page_of(machine_facts, results))
            facts.clear()
            torch.cuda.empty_cache()
    print((options.out / "blocksparse.md").read_text())
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--parts", nargs="+", default=["prefill", "decode", "chunk"])
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
