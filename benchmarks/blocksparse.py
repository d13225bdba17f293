"""
Compares ways to compute block-sparse attention on one GPU: the plugin's kernels in several configurations,
FlexAttention, the block masks of FlashAttention 4, FlashInfer's block-sparse wrapper, and dense attention.

    PYTHONPATH=core/src:plugins/blocksparse/src:plugins/flash_attn/src \
        python benchmarks/blocksparse.py --out DIR [--seconds 500] [--repeats 7] [--parts prefill decode chunk]

All ways of a part run on the same inputs in turn, in one process; times are medians of the device's, between two
events. Each result is first compared with a few rows in float64. What fails, or is not installed, is told beside what
was measured. The pattern is Phi-3-small's: 32 query and 8 KV heads of 128, blocks of 64, 16 local, a stride of 8.

Beside the times stands what each mode needs, density and bytes and operations, and how the fastest way of it compares
with the fastest dense one: that share is to follow the density.

It writes blocksparse.json and blocksparse.md into the folder, anew after each case.
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
from sparsity import Need, of_decodes, of_prompt
from torch import Tensor

import attnplug
from attnplug.contract import Batch, Layer, Limits
from attnplug_blocksparse import decode, hopper, prefill
from attnplug_blocksparse.params import BlocksparseParams
from attnplug_blocksparse.pattern import Pattern
from attnplug_blocksparse.prompt import is_for
from attnplug_blocksparse.scales import Scales
from attnplug_blocksparse.tiles import DecodeTiles, HopperTiles, PrefillTiles
from attnplug_kit.bench.clock import DeviceClock
from attnplug_kit.bench.interleaved import Contender, interleaved
from attnplug_kit.bench.machine import machine
from attnplug_kit.oracle.sparsity import seen_by

DEVICE = torch.device("cuda")
HEADS, KV_HEADS, SIZE = 32, 8, 128
PHI = {"max_seqlen": 131072, "block_size": 64, "local_blocks": 16, "vert_stride": 8}
MODES: dict[str, dict[str, bool]] = {
    "per head": {},
    "homo_head_group": {"homo_head_group": True},
    "homo_head": {"homo_head": True},
}
BY_DESCRIPTORS = tuple(
    PrefillTiles(*numbers)
    for numbers in (
        (64, 64, 3, 4), (64, 64, 2, 4), (64, 32, 3, 4), (128, 64, 2, 4), (128, 64, 2, 8, 128), (128, 64, 3, 8),
        (128, 128, 2, 8), (256, 64, 3, 16),
    )
)  # fmt: skip
BY_POINTERS = tuple(
    PrefillTiles(*numbers)
    for numbers in (
        (128, 64, 2, 8, 128), (128, 64, 3, 8, 128), (128, 64, 2, 8), (128, 128, 3, 8), (64, 64, 3, 4), (64, 64, 2, 4),
    )
)  # fmt: skip
ROLE_STAGES = (4, 3, 2)
OF_DECODES = tuple(
    DecodeTiles(*numbers)
    for numbers in (
        (64, 5, 4, 16), (64, 3, 4, 16), (64, 8, 4, 16), (64, 5, 4, 4), (64, 5, 4, 32), (64, 5, 8, 16), (32, 3, 2, 16),
        (32, 5, 2, 16), (32, 5, 4, 16), (16, 5, 2, 16), (128, 3, 8, 16),
    )
)  # fmt: skip
PAGE_SIZES = (64, 16)
_DENSE = "dense"
_ROWS = 24
_APART = 2**-6

Way = Callable[[], object]


@frozen(eq=False)
class Prompt:
    """
    One prompt.

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
    def of(cls, tokens: int) -> Prompt:
        """Return random inputs."""
        generator = torch.Generator(DEVICE).manual_seed(0)
        draw = partial(torch.randn, generator=generator, device=DEVICE, dtype=torch.bfloat16)
        query, key, value = (draw(tokens, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS))
        return cls(query, key, value, torch.empty_like(query))


def pattern_of(mode: str) -> Pattern:
    """Return the pattern in one of its head modes."""
    return Pattern(BlocksparseParams.of({**PHI, **MODES[mode]}, num_heads=HEADS, num_kv_heads=KV_HEADS), DEVICE)


def needs_of_prompt(tokens: int, rows: int) -> dict[str, Need]:
    """Return what each mode needs for the last rows of a sequence."""
    patterns = {mode: pattern_of(mode).params for mode in MODES} | {_DENSE: None}
    return {mode: of_prompt(params, HEADS, SIZE, tokens, rows, PHI["block_size"]) for mode, params in patterns.items()}


def needs_of_decodes(requests: int, length: int) -> dict[str, Need]:
    """Return what each mode needs for the last token of so many sequences."""
    patterns = {mode: pattern_of(mode).params for mode in MODES} | {_DENSE: None}
    each = {
        mode: of_decodes(params, (HEADS, KV_HEADS), SIZE, length, PHI["block_size"])
        for mode, params in patterns.items()
    }
    return {mode: evolve(one, bytes=requests * one.bytes, flop=requests * one.flop) for mode, one in each.items()}


def exact(prompt: Prompt, mode: str | None, rows: Tensor) -> Tensor:
    """Return ``(rows, HEADS, SIZE)`` of some rows in float64; without a mode all earlier keys are attended."""
    tokens = prompt.key.shape[0]
    keys, places = torch.arange(tokens), rows.cpu() + tokens - prompt.query.shape[0]
    found = torch.empty(len(rows), HEADS, SIZE, dtype=torch.float64, device=DEVICE)
    for head in range(HEADS):
        seen = keys[None, :] <= places[:, None]
        if mode is not None:
            heads = {"num_q_heads": HEADS, "num_kv_heads": KV_HEADS}
            seen &= seen_by(head, {**PHI, **MODES[mode]}, **heads, queries=places, keys=keys)
        key, value = (part[:, head * KV_HEADS // HEADS].double() for part in (prompt.key, prompt.value))
        scores = prompt.query[rows, head].double() @ key.T * SIZE**-0.5
        found[:, head] = scores.masked_fill(~seen.to(DEVICE), -torch.inf).softmax(-1) @ value
    return found


# --- ways to compute a prompt ---------------------------------------------------------------------------------------


def by_roles() -> tuple[HopperTiles, ...]:
    """Return tiles of warps with roles for this GPU, those of the plugin first."""
    programs = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    return tuple(HopperTiles(programs, stages) for stages in ROLE_STAGES)


def split(tiles: PrefillTiles | HopperTiles, *, paged: bool = False) -> tuple[HopperTiles | None, PrefillTiles]:
    """Return tiles of warps with roles, if these are, and those of warps without."""
    if isinstance(tiles, PrefillTiles):
        return None, tiles
    if not hopper.is_there():
        message = "Triton here does not compile warps with roles"
        raise ValueError(message)
    return tiles, PrefillTiles.of(SIZE, paged=paged)


def own(prompt: Prompt, mode: str, tiles: PrefillTiles | HopperTiles, *, descriptors: bool = True) -> Way:
    """Return one of the plugin's kernels on rows: by roles, by descriptors or by pointers."""
    roles, tiles = split(tiles)
    tokens = prompt.query.shape[0]
    starts = torch.tensor([0, tokens], dtype=torch.int32, device=DEVICE)
    prompts = prefill.Prompts(
        pattern=pattern_of(mode),
        tiles=tiles,
        query_starts=starts,
        seq_lens=starts[1:],
        key_starts=starts,
        longest_query=tokens,
        lengths=(tokens,) if descriptors else (),
        hopper=roles,
    )
    scales = Scales(SIZE**-0.5)
    if descriptors and not is_for(prompt.key, prompt.value, prompts.pattern, tiles):
        message = f"no descriptors fit {tiles}"
        raise ValueError(message)
    return lambda: prefill.attend(prompt.query, prompt.key, prompt.value, prompt.out, None, prompts, scales)


def flex(prompt: Prompt, mode: str, rows: int, keys: int) -> Way:
    """Return compiled FlexAttention."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention  # noqa: PLC0415 - others do without

    pattern, tokens = pattern_of(mode), prompt.query.shape[0]
    residues = torch.tensor([pattern.params.residue(head) for head in range(HEADS)], device=DEVICE)
    size, local, stride, _ = pattern.constants

    def seen(_: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = query // size - key // size < local
        return (key <= query) & (near | (key // size % stride == residues[head]))

    mask = torch.compile(create_block_mask)(seen, None, HEADS, tokens, tokens, device=DEVICE, BLOCK_SIZE=(rows, keys))
    inputs = [part.transpose(0, 1)[None].contiguous() for part in (prompt.query, prompt.key, prompt.value)]
    compiled = torch.compile(flex_attention, dynamic=False)

    def run() -> None:
        prompt.out.copy_(compiled(*inputs, block_mask=mask, enable_gqa=True)[0].transpose(0, 1))

    run()
    return lambda: compiled(*inputs, block_mask=mask, enable_gqa=True)


def fa4(prompt: Prompt, mode: str, rows: int, keys: int) -> Way:
    """Return FlashAttention 4 with lists of blocks that are attended whole, and of others with a mask."""
    from cutlass import cute  # noqa: PLC0415 - where it is installed
    from flash_attn.cute import flash_attn_func, utils  # noqa: PLC0415
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch  # noqa: PLC0415

    pattern, tokens = pattern_of(mode), prompt.query.shape[0]
    size, local, stride, _ = pattern.constants
    residues = torch.tensor([pattern.params.residue(head) for head in range(HEADS)], dtype=torch.int32, device=DEVICE)
    step, first = abs(pattern.params.head_sliding_step), 1

    @cute.jit
    def seen(batch, head, query, key, seqlen_info, aux):  # noqa: ANN001, ANN202, ARG001 - as the library calls it
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
    inputs = [part[None] for part in (prompt.query, prompt.key, prompt.value)]
    run = partial(flash_attn_func, *inputs, mask_mod=seen, block_sparse_tensors=sparse)
    prompt.out.copy_(run()[0][0])
    return run


def flashinfer(prompt: Prompt, mode: str) -> Way:
    """
    Return FlashInfer's wrapper for blocks of any size, with KV heads repeated: each has a pattern of its own.

    Rows are as many as a block has: its causal mask counts from the last key that a row of blocks attends.
    """
    from flashinfer import VariableBlockSparseAttentionWrapper  # noqa: PLC0415 - where it is installed

    pattern, tokens = pattern_of(mode), prompt.query.shape[0]
    size, local, stride, _ = pattern.constants
    residues = torch.tensor([pattern.params.residue(head) for head in range(HEADS)], device=DEVICE)
    i, j = torch.arange(tokens // size, device=DEVICE)[:, None], torch.arange(tokens // size, device=DEVICE)[None, :]
    mask = (j <= i) & ((i - j < local) | (j % stride == residues[:, None, None]))
    wrapper = VariableBlockSparseAttentionWrapper(torch.empty(2**29, dtype=torch.uint8, device=DEVICE), backend="auto")
    sizes = torch.full((HEADS, tokens // size), size, dtype=torch.int32, device=DEVICE)
    wrapper.plan(mask, sizes, sizes, HEADS, HEADS, SIZE, causal=True, q_data_type=torch.bfloat16)
    query = prompt.query.transpose(0, 1).contiguous()
    key, value = (
        part.transpose(0, 1).repeat_interleave(HEADS // KV_HEADS, 0).contiguous() for part in (prompt.key, prompt.value)
    )
    run = partial(wrapper.run, query, key, value)
    prompt.out.copy_(run().transpose(0, 1))
    return run


def dense(prompt: Prompt, backend: str) -> Way:
    """Return dense attention of a backend of attnplug."""
    asked = attnplug.Requirements(
        head_size=SIZE, num_q_heads=HEADS, num_kv_heads=KV_HEADS, dtype="bfloat16", paged=False
    )
    loaded = attnplug.load(asked, backend=backend)
    impl, tokens = loaded.make_impl(Layer(name="layer")), prompt.query.shape[0]
    limits = Limits(max_num_reqs=1, max_num_tokens=tokens, max_seq_len=tokens)
    built = loaded.make_builder([impl], loaded.make_state(limits)).build(Batch.from_lengths([tokens], device=DEVICE))
    out = prompt.out.view(tokens, -1)
    return lambda: impl.forward(prompt.query, prompt.key, prompt.value, None, built, out)


def prompts(tokens: int, facts: dict[str, Any]) -> dict[str, tuple[Callable[[], Way], str | None]]:
    """Return the ways to compute a prompt, each with the mode in which it is right, None for dense ones."""
    prompt, mode = Prompt.of(tokens), "per head"
    facts["prompt"], facts["needs"] = prompt, needs_of_prompt(tokens, tokens)
    ways: dict[str, tuple[Callable[[], Way], str | None]] = {
        f"roles {tiles}": (partial(own, prompt, mode, tiles), mode) for tiles in by_roles()
    }
    ways |= {f"descriptors {tiles}": (partial(own, prompt, mode, tiles), mode) for tiles in BY_DESCRIPTORS}
    ways |= {f"pointers {tiles}": (partial(own, prompt, mode, tiles, descriptors=False), mode) for tiles in BY_POINTERS}
    ways |= {
        f"{way}, {other}, {tiles}": (partial(own, prompt, other, tiles), other)
        for other in list(MODES)[1:]
        for way, tiles in (("roles", by_roles()[0]), ("descriptors", PrefillTiles.of(SIZE)))
    }
    ways |= {f"FlexAttention {size}": (partial(flex, prompt, mode, *size), mode) for size in ((128, 64), (128, 128))}
    ways |= {f"FlashAttention 4 {size}": (partial(fa4, prompt, mode, *size), mode) for size in ((128, 64), (128, 128))}
    ways["FlashInfer (64, 64)"] = (partial(flashinfer, prompt, mode), mode)
    for backend in ("flash_attn/fa3_vllm", "flash_attn/fa3", "flash_attn/fa4", "flash_attn/torch"):
        ways[f"dense {backend}"] = (partial(dense, prompt, backend), None)
    return ways


# --- chunks and decodes, on pages -----------------------------------------------------------------------------------


def paged(prompt: Prompt, page: int) -> tuple[Tensor, Tensor]:
    """Return the keys and values of a prompt in shuffled pages, ``(2, pages, page, KV_HEADS, SIZE)``, and the table."""
    count = prompt.key.shape[0] // page
    table = 1 + torch.randperm(count, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE).int()
    cache = torch.zeros(2, count + 1, page, KV_HEADS, SIZE, device=DEVICE, dtype=torch.bfloat16)
    cache[0, table.long()] = prompt.key.view(count, page, KV_HEADS, SIZE)
    cache[1, table.long()] = prompt.value.view(count, page, KV_HEADS, SIZE)
    return cache, table[None]


def chunk(prompt: Prompt, mode: str, tiles: PrefillTiles | HopperTiles, page: int) -> Way:
    """Return one of the plugin's kernels on pages: the last rows of a sequence."""
    roles, tiles = split(tiles, paged=True)
    rows, (cache, table) = prompt.query.shape[0], paged(prompt, page)
    starts = torch.tensor([0, rows], dtype=torch.int32, device=DEVICE)
    found = prefill.Prompts(
        pattern=pattern_of(mode),
        tiles=tiles,
        query_starts=starts,
        seq_lens=torch.tensor([prompt.key.shape[0]], dtype=torch.int32, device=DEVICE),
        table=table,
        longest_query=rows,
        lengths=() if roles is None else (rows,),
        key_lengths=() if roles is None else (prompt.key.shape[0],),
        hopper=roles,
    )
    return lambda: prefill.attend(prompt.query, *cache, prompt.out, None, found, Scales(SIZE**-0.5))


def chunks(tokens: int, rows: int, facts: dict[str, Any]) -> dict[str, tuple[Callable[[], Way], str | None]]:
    """Return the ways to compute the last rows of a sequence."""
    whole, mode = Prompt.of(tokens), "per head"
    prompt = evolve(whole, query=whole.query[-rows:], out=whole.out[-rows:])
    facts["prompt"], facts["needs"] = prompt, needs_of_prompt(tokens, rows)
    by_page = {page: (*(by_roles() if page % 64 == 0 else ()), *BY_POINTERS) for page in PAGE_SIZES}
    ways: dict[str, tuple[Callable[[], Way], str | None]] = {
        f"pages of {page} {tiles}": (partial(chunk, prompt, mode, tiles, page), mode)
        for page, known in by_page.items()
        for tiles in known
    }
    best = {page: by_roles()[0] if page % 64 == 0 else PrefillTiles.of(SIZE, paged=True) for page in PAGE_SIZES}
    return ways | {
        f"pages of {page}, {other}, {tiles}": (partial(chunk, prompt, other, tiles, page), other)
        for page, tiles in best.items()
        for other in list(MODES)[1:]
    }


@frozen(eq=False)
class Decodes:
    """
    A batch of decodes, whose sequences are all alike but for their pages.

    Attributes:
        prompt: The keys, and one query row per request.
        cache: ``(2, pages, page, KV_HEADS, SIZE)``.
        table: ``(requests, pages of each)``.
    """

    prompt: Prompt
    cache: Tensor
    table: Tensor

    @classmethod
    def of(cls, requests: int, length: int, page: int) -> Decodes:
        """Return random inputs."""
        each = length // page
        order = torch.randperm(requests * each, generator=torch.Generator(DEVICE).manual_seed(2), device=DEVICE)
        table = 1 + order.int().view(requests, each)
        one = Prompt.of(length)
        cache = torch.empty(2, requests * each + 1, page, KV_HEADS, SIZE, device=DEVICE, dtype=torch.bfloat16)
        for row in table:
            cache[0, row.long()] = one.key.view(each, page, KV_HEADS, SIZE)
            cache[1, row.long()] = one.value.view(each, page, KV_HEADS, SIZE)
        query = one.query[-1:].repeat(requests, 1, 1)
        return cls(Prompt(query, one.key, one.value, torch.empty_like(query)), cache, table)


def token(inputs: Decodes, mode: str, tiles: DecodeTiles, multiprocessors: int) -> Way:
    """Return the plugin's kernels for decodes."""
    requests, length = inputs.table.shape[0], inputs.prompt.key.shape[0]
    pattern = pattern_of(mode)
    splits = tiles.splits(
        sequences=requests * KV_HEADS, blocks=pattern.most_blocks(length), multiprocessors=multiprocessors
    )
    tokens = decode.Tokens(
        pattern=pattern,
        tiles=tiles,
        query_starts=torch.arange(requests + 1, dtype=torch.int32, device=DEVICE),
        seq_lens=torch.full((requests,), length, dtype=torch.int32, device=DEVICE),
        table=inputs.table,
        num_splits=splits,
        scratch=torch.empty(decode.scratch_bytes(requests * splits, HEADS, SIZE), dtype=torch.uint8, device=DEVICE),
    )
    prompt = inputs.prompt
    return lambda: decode.attend(prompt.query, *inputs.cache, prompt.out, None, tokens, Scales(SIZE**-0.5))


def dense_decode(inputs: Decodes, backend: str) -> Way:
    """Return dense decodes of a backend of attnplug, on the same pages."""
    page, (requests, _), length = inputs.cache.shape[2], inputs.table.shape, inputs.prompt.key.shape[0]
    asked = attnplug.Requirements(
        head_size=SIZE,
        num_q_heads=HEADS,
        num_kv_heads=KV_HEADS,
        dtype="bfloat16",
        paged=True,
        block_size=page,
        kv_layout="NHD",
    )
    loaded = attnplug.load(asked, backend=backend)
    impl = loaded.make_impl(Layer(name="layer", cache_write="host"))
    limits = Limits(max_num_reqs=requests, max_num_tokens=requests, max_seq_len=length)
    batch = Batch.from_lengths(
        [1] * requests,
        [length] * requests,
        block_table=inputs.table.cpu(),
        slot_mapping=(inputs.table[:, -1].cpu().long() + 1) * page - 1,
        device=DEVICE,
    )
    built = loaded.make_builder([impl], loaded.make_state(limits)).build(batch)
    prompt = inputs.prompt
    new = [part[-1:].expand(requests, -1, -1).contiguous() for part in (prompt.key, prompt.value)]
    out = prompt.out.view(requests, -1)
    return lambda: impl.forward(prompt.query, *new, inputs.cache, built, out)


def decodes(
    requests: int, length: int, page: int, facts: dict[str, Any]
) -> dict[str, tuple[Callable[[], Way], str | None]]:
    """Return the ways to compute decodes."""
    inputs = Decodes.of(requests, length, page)
    facts["prompt"], facts["needs"] = inputs.prompt, needs_of_decodes(requests, length)
    facts["are_alike"] = True
    count = torch.cuda.get_device_properties(DEVICE).multi_processor_count
    ways: dict[str, tuple[Callable[[], Way], str | None]] = {
        f"{mode} {tiles}": (partial(token, inputs, mode, tiles, count), mode)
        for mode in MODES
        for tiles in (OF_DECODES if mode == "per head" else OF_DECODES[:3])
    }
    for backend in ("flash_attn/fa3_vllm", "flash_attn/fa3", "flash_attn/fa4"):
        ways[f"dense {backend}"] = (partial(dense_decode, inputs, backend), None)
    return ways


def copy_bandwidth(clock: DeviceClock) -> float:
    """Return the bytes per second that a copy reads and writes."""
    source = torch.empty(2**31, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * 2**31 / median(clock.seconds(lambda _: target.copy_(source), None) for _ in range(7))


# --- measuring ------------------------------------------------------------------------------------------------------


def measure(
    ways: dict[str, tuple[Callable[[], Way], str | None]], facts: dict[str, Any], clock: DeviceClock, options: Any
) -> tuple[dict[str, float], dict[str, str]]:
    """Return the median of each way in microseconds, and what failed."""
    prompt, found, failures = facts["prompt"], {}, {}
    are_alike = "are_alike" in facts  # of decodes one row is enough
    rows = torch.randperm(prompt.query.shape[0], device=DEVICE)[: 1 if are_alike else _ROWS].sort().values
    given = evolve(prompt, query=prompt.query[:1]) if are_alike else prompt
    wanted: dict[str | None, Tensor] = {}
    for name, (make, mode) in ways.items():
        if time.perf_counter() > options.end:
            failures[name] = "no time was left"
            continue
        try:
            prompt.out.fill_(float("nan"))
            way = make()
            way()
            torch.cuda.synchronize()
            if mode not in wanted:
                wanted[mode] = exact(given, mode, torch.zeros_like(rows) if are_alike else rows)
            apart = float((prompt.out[rows].double() - wanted[mode]).abs().max())
            if not apart <= _APART:
                failures[name] = f"wrong: {apart:.3g} apart from float64"
                continue
            found[name] = way
        except Exception as error:  # noqa: BLE001 - the next way may do better
            failures[name] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            torch.cuda.synchronize()
    samples = interleaved(
        {name: Contender(lambda _, way=way: way()) for name, way in found.items()}, clock, options.repeats
    )
    return {name: 1e6 * median(samples.seconds[name]) for name in found}, failures


def _needs(one: dict[str, Any]) -> list[str]:
    """Return a table of what each mode needs and of its fastest way, beside the fastest dense one."""
    lines = ["| mode | density | GB | TFLOP | fastest, us | of the fastest dense |", "| --- " * 6 + "|"]
    fastest = {
        mode: min((us for name, us in one["us"].items() if one["modes"][name] == mode), default=None)
        for mode in one["needs"]
    }
    for mode, need in one["needs"].items():
        us, dense = fastest[mode], fastest[_DENSE]
        share = f"{us / dense:.3f}" if us and dense else "-"
        sizes = f"{need['density']:.3f} | {need['bytes'] / 1e9:.2f} | {need['flop'] / 1e12:.3f}"
        lines.append(f"| {mode} | {sizes} | {f'{us:.0f}' if us else '-'} | {share} |")
    return lines


def _rate(one: dict[str, Any], need: dict[str, Any], us: float, copy: float) -> str:
    """Return bytes per second of decodes, and operations per second of prompts, of what has to be done."""
    if one["are_alike"]:
        return f"{need['bytes'] / us / 1e6:.2f} TB/s, {1e6 * need['bytes'] / us / copy:.0%} of a copy"
    return f"{need['flop'] / us / 1e6:.0f} TFLOP/s"


def page_of(machine_facts: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """Return all of it as Markdown, the fastest ways first."""
    lines = [
        "# Block-sparse attention",
        "",
        f"Written by `{shlex.join(sys.argv)}`. Medians of the device's time.",
        "",
    ]
    lines += [f"- {name}: {value}" for name, value in machine_facts.items()]
    for one in results:
        lines += ["", f"## {one['case']}", "", *_needs(one)]
        lines += ["", "| way | us | of what it needs |", "| --- | --- | --- |"]
        for name, us in sorted(one["us"].items(), key=lambda item: item[1]):
            need = one["needs"].get(one["modes"][name])
            lines.append(
                f"| {name} | {us:.0f} | {_rate(one, need, us, machine_facts['copy, bytes/s']) if need else ''} |"
            )
        lines += ["", *(f"- {name}: {why}" for name, why in one["failed"].items())]
    return "\n".join([*lines, ""])


def main() -> int:
    """Measure what was asked for within the time that there is."""
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    options.end = time.perf_counter() + options.seconds
    clock = DeviceClock()
    machine_facts: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "versions": f"torch {torch.__version__}, CUDA {torch.version.cuda}, triton {__import__('triton').__version__}",
        "processor": machine()["processor"],
        "revision": os.environ.get("REVISION", "not told"),
        "copy, bytes/s": copy_bandwidth(clock),
    }
    cases: dict[str, list[tuple[str, Callable[[dict[str, Any]], Any]]]] = {
        "prefill": [(f"one prompt of {n}", partial(prompts, n)) for n in (32768, 8192)],
        "decode": [(f"64 decodes of 32768, pages of {p}", partial(decodes, 64, 32768, p)) for p in PAGE_SIZES],
        "chunk": [("the last 4096 of 32768", partial(chunks, 32768, 4096))],
    }
    results: list[dict[str, Any]] = []
    for part in options.parts:
        for name, make in cases[part]:
            facts: dict[str, Any] = {}
            ways = make(facts)
            us, failed = measure(ways, facts, clock, options)
            modes = {way: mode or _DENSE for way, (_, mode) in ways.items()}
            needs = {mode: need.to_dict() for mode, need in facts["needs"].items()}
            told = {"modes": modes, "needs": needs, "are_alike": "are_alike" in facts}
            results.append({"case": name, "us": us, "failed": failed, **told})
            ways.clear()
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
