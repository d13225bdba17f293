"""The warp-specialized kernel against dense attention in float64: on a GPU, or on a CPU in the emulator of Gluon."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug_blocksparse import prefill_single
from attnplug_blocksparse.pattern import BlocksparseParams, Pattern
from attnplug_blocksparse.plan import Scales
from attnplug_blocksparse.tiles import HopperTiles
from attnplug_kit.oracle import seen_by
from plugins.blocksparse.tests.requests import CANARY, DTYPES, Requests, check
from tests.backends import gluon_emulator
from tests.backends.triton_on_cpu import DEVICE, INTERPRETED, MARKS

KERNEL = "attnplug_blocksparse.gluon_prefill"
EXAMPLES = 20 if INTERPRETED else 12
MODES = ({}, {"homo_head": True}, {"homo_head_group": True})
PHI = {"max_seqlen": 8192, "block_size": 64, "local_blocks": 2, "vert_stride": 3}

pytestmark = [
    *MARKS,
    pytest.mark.skipif(
        not INTERPRETED and not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)),
        reason="the kernel requires compute capability 9.0",
    ),
]


LAYOUTS = {
    "NHD": lambda cache: cache,
    "HND": lambda cache: cache.transpose(2, 3).contiguous().transpose(2, 3),
    "K and V per block": lambda cache: cache.transpose(0, 1).contiguous().transpose(0, 1),
}
"""Memory layouts of ``(2, pages, page_size, kv_heads, head_size)``."""


def run_specialized(case, programs=3, stages=2, seed=0, page=0, layout="NHD", change=("", "")):
    """Return output and LSE of one request with contiguous or paged K/V, from the emulator or the GPU."""
    (query,), (key,), (value,), pages = case.queries, case.keys, case.values, {}
    out, lse = torch.full_like(query, CANARY), torch.full(query.shape[:2], CANARY, device=DEVICE)
    params = BlocksparseParams.of(case.pattern, num_heads=query.shape[1], num_kv_heads=key.shape[1])
    pattern = Pattern(params, torch.device(DEVICE))
    if page:
        cache, table = case.pages(page)
        key, value = LAYOUTS[layout](cache)
        pages = {"table": table[0], "length": case.seq_lens[0]}
    line, instead = change
    assert prefill_single.supports_specialized(query, key, value, out, pattern)
    with gluon_emulator.emulated(KERNEL, seed=seed, line=line, instead=instead) if INTERPRETED else nullcontext():
        tiles = HopperTiles(programs, stages)
        prefill_single.attend_specialized(query, key, value, out, lse, pattern, Scales(case.scale), tiles, **pages)
    return out, lse


launches = st.fixed_dictionaries(
    {"programs": st.integers(1, 5), "stages": st.integers(2, 5), "seed": st.integers(0, 2**32)}
)


@st.composite
def patterns(draw):
    block = draw(st.sampled_from([64, 128, 192, 256]))
    return {
        "max_seqlen": 8192,
        "block_size": block,
        "local_blocks": draw(st.integers(1 if block % 128 == 0 else 2, 5)),
        "vert_stride": draw(st.integers(1, 5)),
        **draw(st.sampled_from(MODES)),
    }


@settings(max_examples=EXAMPLES)
@given(
    pattern=patterns(),
    length=st.sampled_from([1, 40, 64, 65, 128, 130, 257, 400, 640]),
    heads=st.sampled_from([(1, 1), (2, 2), (1, 3)]),
    size=st.sampled_from([64, 128]),
    dtype=st.sampled_from(DTYPES),
    launch=launches,
)
def test_prefill_contiguous(pattern, length, heads, size, dtype, launch):
    kv_heads, group = heads
    case = Requests([length], [length], pattern=pattern, kv_heads=kv_heads, group=group, size=size, dtype=dtype)

    check(*run_specialized(case, **launch), case.expected())


@settings(max_examples=EXAMPLES)
@given(
    pattern=patterns(),
    rows=st.sampled_from([1, 63, 64, 100, 130, 300]),
    context=st.sampled_from([0, 1, 64, 100, 128, 200, 333]),
    heads=st.sampled_from([(1, 1), (2, 2), (1, 3)]),
    size=st.sampled_from([64, 128]),
    dtype=st.sampled_from(DTYPES),
    pages=st.fixed_dictionaries({"page": st.sampled_from([64, 128, 192]), "layout": st.sampled_from(sorted(LAYOUTS))}),
    launch=launches,
)
def test_prefill_paged(pattern, rows, context, heads, size, dtype, pages, launch):
    """Slots without a token, and page 0, are NaN."""
    kv_heads, group = heads
    case = Requests([rows], [context + rows], pattern=pattern, kv_heads=kv_heads, group=group, size=size, dtype=dtype)

    check(*run_specialized(case, **pages, **launch), case.expected())


WAIT = "            mbarrier.wait(full[{}].index({}), ({} // stages) & 1)\n"
RELEASE = "            mbarrier.arrive(empty[{}].index({}), count=1)\n"
FAULTS = {
    "keys are read before they are loaded": (WAIT.format(1, "stage", "tile"), ""),
    "values are read before they are loaded": (WAIT.format(2, "before", "(tile - 1)"), ""),
    "a wait is for the wrong phase": (WAIT.format(1, "stage", "tile"), WAIT.format(1, "stage", "(tile + stages)")),
    "keys are released before they are read": (
        "        scores = warpgroup_mma_wait(0, deps=(scores,))\n" + RELEASE.format(1, "stage").removeprefix("    "),
        RELEASE.format(1, "stage").removeprefix("    ") + "        scores = warpgroup_mma_wait(0, deps=(scores,))\n",
    ),
    "values are released before they are read": (
        "            acc = warpgroup_mma_wait(0, deps=(next_acc,))\n" + RELEASE.format(2, "before"),
        RELEASE.format(2, "before") + "            acc = warpgroup_mma_wait(0, deps=(next_acc,))\n",
    ),
    "keys are not released": (RELEASE.format(1, "stage"), ""),
    "queries are not released": (RELEASE.format(0, "warpgroup").removeprefix("    "), ""),
    "the accumulator is used before the PV matmul ends": (
        "warpgroup_mma_wait(0, deps=(next_acc,))",
        "warpgroup_mma_wait(1, deps=(next_acc,))",
    ),
    "skipped tiles are not released": ("        _skip_tiles(full, empty, end, after, stages)\n", ""),
    "skipped tiles are released before they are loaded": (
        "            mbarrier.wait(full[operand].index(ring_index % stages), (ring_index // stages) & 1)\n",
        "",
    ),
    "one warpgroup releases a stage": (
        "mbarrier.init(keys_empty.index(stage), count=2)",
        "mbarrier.init(keys_empty.index(stage), count=1)",
    ),
    "keys are loaded into a full stage": ("            mbarrier.wait(empty[1].index(stage), phase ^ 1)\n", ""),
    "queries are loaded into a full buffer": (
        "            mbarrier.wait(empty[0].index(warpgroup), (item_index & 1) ^ 1)\n",
        "",
    ),
    "outputs are written to a buffer with a pending store": (
        "            tma.store_wait(0)  # of the item before, from the same buffer\n",
        "",
    ),
    "stores are pending when the program ends": ("    tma.store_wait(0)\n\n\n", "\n\n"),
    "outputs are stored without a fence": ("            fence_async_shared()\n", ""),
    "pages are read beyond the end of a sequence": (
        "if page_size > 0 and tile_begin + warpgroup * TILE + TILE > length:",
        "if 0:",
    ),
    "zeroed values are read without a fence": ("    fence_async_shared()\n\n\n", "\n\n"),
    "rows before a chunk are stored by TMA": ("if page_size > 0 and row < 0:", "if 0:"),
    "rows before a chunk are stored": ("row_mask = (chunk_rows >= 0) &", "row_mask ="),
    "tiles beyond the end have a page": ("mask=begin < length, other=-1", "mask=True, other=-1"),
    "the diagonal is not masked": ('gl.where(causal, scores, float("-inf"))', "scores"),
    "sums are not rescaled": ("row_sum = row_sum * rescale +", "row_sum = row_sum +"),
}


@pytest.mark.skipif(not INTERPRETED, reason="a GPU reports no error, or waits forever")
@pytest.mark.parametrize("fault", FAULTS)
def test_the_emulator_detects_faults(fault):
    """With a long request, and with short ones where the loader is whole work items ahead."""
    cases = [
        Requests([length], [length], pattern=PHI, kv_heads=1, group=group) for length, group in ((700, 2), (100, 4))
    ]
    chunk = Requests([100], [300], pattern=PHI, kv_heads=1, group=2)
    for seed, (case, page) in product(range(6), [(cases[0], 0), (cases[1], 0), (chunk, 64)]):
        try:
            check(*run_specialized(case, programs=2, seed=seed, page=page, change=FAULTS[fault]), case.expected())
        except AssertionError:
            return
    pytest.fail(f"not detected: {fault}")


@pytest.mark.parametrize("mode", [{}, {"homo_head_group": True}], ids=["per head", "per group"])
def test_a_token_affects_only_rows_that_attend_to_it(mode):
    case = Requests([600], [600], pattern={**PHI, **mode})
    keys, heads = torch.arange(600), case.kv_heads * case.group
    seen = [seen_by(head, case.pattern, num_q_heads=heads, num_kv_heads=2, queries=keys, keys=keys)
            for head in range(heads)]  # fmt: skip
    expected = torch.stack([rows[:, 137] & (keys >= 137) for rows in seen], 1)
    before, _ = run_specialized(case)

    case.keys[0][137] += 1
    case.values[0][137] += 1000
    after, _ = run_specialized(case)

    assert 0 < int(expected.sum()) < expected.numel()
    assert torch.equal((after != before).any(2).cpu(), expected)


def test_unsupported_calls_use_other_kernels():
    case = Requests([70], [70], pattern=PHI, size=64)
    (query,), (key,), (value,) = case.queries, case.keys, case.values

    def supported(query=query, key=key, value=value, out=query, **pattern):
        params = BlocksparseParams.of({**PHI, **pattern}, num_heads=4, num_kv_heads=2)
        return prefill_single.supports_specialized(query, key, value, out, Pattern(params, torch.device(DEVICE)))

    assert supported()
    assert supported(block_size=128, local_blocks=1)
    assert not supported(block_size=64, local_blocks=1)
    assert not supported(block_size=192, local_blocks=1)
    assert not supported(local_blocks=0)
    assert not supported(block_size=32)
    assert not supported(query=query[..., :32], key=key[..., :32], value=value[..., :32], out=query[..., :32])
    assert not supported(query=query.float(), key=key.float(), value=value.float(), out=query.float())
    assert not supported(key=key.half())
    assert not supported(out=query.new_empty(70, 4, 65)[..., 1:])
    assert not supported(value=value.mT.contiguous().mT)
    for page, expected in ((64, True), (128, True), (16, False), (96, False)):
        pages, _ = case.pages(page)
        assert supported(key=pages[0], value=pages[1]) is expected
