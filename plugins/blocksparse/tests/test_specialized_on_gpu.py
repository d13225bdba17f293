"""The kernel whose warps have roles against dense attention in float64. On a CPU a double of Gluon runs it."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug_blocksparse import hopper
from attnplug_blocksparse.params import BlocksparseParams
from attnplug_blocksparse.pattern import Pattern
from attnplug_blocksparse.scales import Scales
from attnplug_blocksparse.tiles import HopperTiles
from attnplug_kit.oracle.sparsity import seen_by
from plugins.blocksparse.tests.dense import CANARY, DTYPES, Requests, check
from tests.backends import gluon_emulator
from tests.backends.triton_on_cpu import DEVICE, INTERPRETED, MARKS

KERNEL = "attnplug_blocksparse.gluon_prompt"
EXAMPLES = 20 if INTERPRETED else 12
MODES = ({}, {"homo_head": True}, {"homo_head_group": True})
PHI = {"max_seqlen": 8192, "block_size": 64, "local_blocks": 2, "vert_stride": 3}

pytestmark = [
    *MARKS,
    pytest.mark.skipif(
        not INTERPRETED and not (torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)),
        reason="the GPU has no warpgroups",
    ),
]


LAYOUTS = {
    "NHD": lambda cache: cache,
    "HND": lambda cache: cache.transpose(2, 3).contiguous().transpose(2, 3),
    "pages of both": lambda cache: cache.transpose(0, 1).contiguous().transpose(0, 1),
}
"""How ``(2, pages, page_size, kv_heads, head_size)`` lies in memory."""


def by_roles(case, programs=3, stages=2, seed=0, page=0, layout="NHD", change=("", "")):
    """Output and LSE of one prompt, or of one chunk in pages, computed by the double or on the GPU."""
    (query,), (key,), (value,), pages = case.queries, case.keys, case.values, {}
    out, lse = torch.full_like(query, CANARY), torch.full(query.shape[:2], CANARY, device=DEVICE)
    params = BlocksparseParams.of(case.pattern, num_heads=query.shape[1], num_kv_heads=key.shape[1])
    pattern = Pattern(params, torch.device(DEVICE))
    if page:
        cache, table = case.pages(page)
        key, value = LAYOUTS[layout](cache)
        pages = {"table": table[0], "length": case.seq_lens[0]}
    line, instead = change
    assert hopper.is_for(query, key, value, out, pattern)
    with gluon_emulator.emulated(KERNEL, seed=seed, line=line, instead=instead) if INTERPRETED else nullcontext():
        tiles = HopperTiles(programs, stages)
        hopper.attend(query, key, value, out, lse, pattern, Scales(case.scale), tiles, **pages)
    return out, lse


ways = st.fixed_dictionaries(
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
    way=ways,
)
def test_prompts(pattern, length, heads, size, dtype, way):
    kv_heads, group = heads
    case = Requests(pattern, [length], [length], kv_heads=kv_heads, group=group, size=size, dtype=dtype)

    check(*by_roles(case, **way), case.expected())


@settings(max_examples=EXAMPLES)
@given(
    pattern=patterns(),
    rows=st.sampled_from([1, 63, 64, 100, 130, 300]),
    context=st.sampled_from([0, 1, 64, 100, 128, 200, 333]),
    heads=st.sampled_from([(1, 1), (2, 2), (1, 3)]),
    size=st.sampled_from([64, 128]),
    dtype=st.sampled_from(DTYPES),
    pages=st.fixed_dictionaries({"page": st.sampled_from([64, 128, 192]), "layout": st.sampled_from(sorted(LAYOUTS))}),
    way=ways,
)
def test_chunks(pattern, rows, context, heads, size, dtype, pages, way):
    """Pages are NaN where no token is, and page 0 is."""
    kv_heads, group = heads
    case = Requests(pattern, [rows], [context + rows], kv_heads=kv_heads, group=group, size=size, dtype=dtype)

    check(*by_roles(case, **pages, **way), case.expected())


WAIT = "            mbarrier.wait(full[{}].index({}), ({} // stages) & 1)\n"
FREE = "            mbarrier.arrive(empty[{}].index({}), count=1)\n"
MISTAKES = {
    "keys are read before they are there": (WAIT.format(1, "slot", "tile"), ""),
    "values are read before they are there": (WAIT.format(2, "before", "(tile - 1)"), ""),
    "a wait is for the phase before": (WAIT.format(1, "slot", "tile"), WAIT.format(1, "slot", "(tile + stages)")),
    "keys are given back before they are read": (
        "        scores = warpgroup_mma_wait(0, deps=(scores,))\n" + FREE.format(1, "slot").removeprefix("    "),
        FREE.format(1, "slot").removeprefix("    ") + "        scores = warpgroup_mma_wait(0, deps=(scores,))\n",
    ),
    "values are given back before they are read": (
        "            sum_of_values = warpgroup_mma_wait(0, deps=(running,))\n" + FREE.format(2, "before"),
        FREE.format(2, "before") + "            sum_of_values = warpgroup_mma_wait(0, deps=(running,))\n",
    ),
    "keys are not given back": (FREE.format(1, "slot"), ""),
    "queries are not given back": (FREE.format(0, "which").removeprefix("    "), ""),
    "values are used before they are weighed": (
        "warpgroup_mma_wait(0, deps=(running,))",
        "warpgroup_mma_wait(1, deps=(running,))",
    ),
    "what is left out is not given back": ("        _leave_out(full, empty, end, after, stages)\n", ""),
    "what is left out is given back early": (
        "            mbarrier.wait(full[ring].index(at % stages), (at // stages) & 1)\n",
        "",
    ),
    "one warpgroup is enough to give a place back": (
        "mbarrier.init(keys_empty.index(slot), count=2)",
        "mbarrier.init(keys_empty.index(slot), count=1)",
    ),
    "keys are loaded where others still are": ("            mbarrier.wait(empty[1].index(slot), phase ^ 1)\n", ""),
    "queries are loaded where others still are": (
        "            mbarrier.wait(empty[0].index(which), (turn & 1) ^ 1)\n",
        "",
    ),
    "outputs are written where others still are": (
        "            tma.store_wait(0)  # of the item before, from the same place\n",
        "",
    ),
    "outputs are not stored when the program ends": ("    tma.store_wait(0)\n\n\n", "\n\n"),
    "outputs are stored before they are seen": ("            fence_async_shared()\n", ""),
    "pages are read behind the end of a sequence": (
        "if page_size > 0 and place + which * TILE + TILE > length:",
        "if 0:",
    ),
    "values are seen before they are zero": ("    fence_async_shared()\n\n\n", "\n\n"),
    "rows before a chunk are stored by descriptor": ("if page_size > 0 and row < 0:", "if 0:"),
    "rows before a chunk are stored": ("mine = (of_chunk >= 0) &", "mine ="),
    "tiles behind the end have a page": ("mask=begin < length, other=-1", "mask=True, other=-1"),
    "the diagonal is not masked": ('gl.where(seen, scores, float("-inf"))', "scores"),
    "sums do not shrink": ("sums = sums * shrink +", "sums = sums +"),
}


@pytest.mark.skipif(not INTERPRETED, reason="a GPU takes all of it in silence, or waits forever")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake):
    """Where one prompt is long, and where the loader is ahead by whole items."""
    cases = [Requests(PHI, [length], [length], kv_heads=1, group=group) for length, group in ((700, 2), (100, 4))]
    chunk = Requests(PHI, [100], [300], kv_heads=1, group=2)
    for seed, (case, page) in product(range(6), [(cases[0], 0), (cases[1], 0), (chunk, 64)]):
        try:
            check(*by_roles(case, programs=2, seed=seed, page=page, change=MISTAKES[mistake]), case.expected())
        except AssertionError:
            return
    pytest.fail(f"nobody saw that {mistake}")


@pytest.mark.parametrize("mode", [{}, {"homo_head_group": True}], ids=["per head", "per group"])
def test_a_token_moves_those_who_attend_it_and_nobody_else(mode):
    case = Requests({**PHI, **mode}, [600], [600])
    keys, heads = torch.arange(600), case.kv_heads * case.group
    seen = [seen_by(head, case.pattern, num_q_heads=heads, num_kv_heads=2, queries=keys, keys=keys)
            for head in range(heads)]  # fmt: skip
    wanted = torch.stack([rows[:, 137] & (keys >= 137) for rows in seen], 1)
    before, _ = by_roles(case)

    case.keys[0][137] += 1
    case.values[0][137] += 1000
    after, _ = by_roles(case)

    assert 0 < int(wanted.sum()) < wanted.numel()
    assert torch.equal((after != before).any(2).cpu(), wanted)


def test_what_it_does_not_compute_is_left_to_others():
    case = Requests(PHI, [70], [70], size=64)
    (query,), (key,), (value,) = case.queries, case.keys, case.values

    def takes(query=query, key=key, value=value, out=query, **pattern):
        params = BlocksparseParams.of({**PHI, **pattern}, num_heads=4, num_kv_heads=2)
        return hopper.is_for(query, key, value, out, Pattern(params, torch.device(DEVICE)))

    assert takes()
    assert takes(block_size=128, local_blocks=1)
    assert not takes(block_size=64, local_blocks=1)
    assert not takes(block_size=192, local_blocks=1)
    assert not takes(local_blocks=0)
    assert not takes(block_size=32)
    assert not takes(query=query[..., :32], key=key[..., :32], value=value[..., :32], out=query[..., :32])
    assert not takes(query=query.float(), key=key.float(), value=value.float(), out=query.float())
    assert not takes(key=key.half())
    assert not takes(out=query.new_empty(70, 4, 65)[..., 1:])
    assert not takes(value=value.mT.contiguous().mT)
    for page, is_taken in ((64, True), (128, True), (16, False), (96, False)):
        pages, _ = case.pages(page)
        assert takes(key=pages[0], value=pages[1]) is is_taken
