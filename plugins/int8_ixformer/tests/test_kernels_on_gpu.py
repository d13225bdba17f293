"""The kernels against attention of the same rounded numbers in float64: any lengths, pages, levels and terms."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug_int8_ixformer.tiles import DecodeTiles, PrefillTiles
from attnplug_int8_ixformer.triton_provider import TritonProvider
from plugins.int8_ixformer.tests.dense import (
    CANARY,
    DTYPES,
    Requests,
    by_channel,
    by_row,
    check,
    with_byte_weights,
)
from plugins.int8_ixformer.tests.running import run_decode, run_prefill
from tests.backends.triton_on_cpu import DEVICE, INTERPRETED, MARKS, bounds_checked

pytestmark = MARKS

EXAMPLES = 10 if INTERPRETED else 8  # each is compiled
TERMS = (
    {},
    {"window": 20},
    {"soft_cap": 2.0},
    {"alibi": "linear"},
    {"alibi": "sqrt", "window": 70},
    {"alibi": "linear", "window": 33, "soft_cap": 2.0},
)


@pytest.fixture(autouse=True, scope="module")
def _in_bounds():
    with bounds_checked() if INTERPRETED else nullcontext():
        yield


@st.composite
def requests(draw, queries, **fixed):
    number = draw(st.integers(1, 3))
    counts = draw(st.lists(st.sampled_from(queries), min_size=number, max_size=number))
    context = draw(st.lists(st.sampled_from([0, 3, 16, 50, 130]), min_size=number, max_size=number))
    return Requests(
        query_lens=counts,
        seq_lens=[count + before for count, before in zip(counts, context, strict=True)],
        level=draw(st.sampled_from([1, 2])),
        kv_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 2, 3, 7])),
        size=draw(st.sampled_from([64, 48])),
        page=draw(st.sampled_from([16, 32, 64])),
        dtype=draw(st.sampled_from(DTYPES)),
        **draw(st.sampled_from(TERMS)),
        **fixed,
    )


def same(mine, theirs):
    """Whether two caches hold the same bytes."""
    pairs = zip((mine.keys, mine.values, mine.key_scales), (theirs.keys, theirs.values, theirs.key_scales), strict=True)
    return [torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in pairs]


@settings(max_examples=EXAMPLES)
@given(
    case=requests((1, 1, 0)),
    splits=st.sampled_from([1, 2, 9]),
    keys=st.sampled_from([16, 32, 64]),
    writes=st.booleans(),
)
def test_decodes(case, splits, keys, writes):
    if not any(case.query_lens):
        return
    out, _ = run_decode(case, tiles=DecodeTiles(keys=keys), splits=splits, writes=writes)

    check(out, case.expected())


@settings(max_examples=EXAMPLES)
@given(case=requests((1, 2, 5, 0)), splits=st.sampled_from([1, 3]))
def test_decodes_of_several_tokens(case, splits):
    if not any(case.query_lens):
        return
    out, _ = run_decode(case, splits=splits)

    check(out, case.expected())


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("splits", [1, 4])
def test_a_decode_writes_what_it_attends_and_nothing_else(level, splits):
    case = Requests([1, 3, 0, 2], [40, 90, 20, 2], level=level)

    _, pages = run_decode(case, splits=splits)
    before, wanted = case.cache(written=False), case.cache(written=True)
    live = [(r, place) for r, n in enumerate(case.seq_lens) if case.query_lens[r] for place in range(n)]

    for request, place in live:
        block, slot = divmod(int(case.slots(request, torch.tensor([place]))), case.page)
        assert torch.equal(pages.keys[block, slot], wanted.keys[block, slot])
        assert torch.equal(pages.values[block, slot], wanted.values[block, slot])
        torch.testing.assert_close(
            pages.key_scales[block, :, slot], wanted.key_scales[block, :, slot], rtol=1e-6, atol=0
        )
    untouched = set(range(case.num_blocks * case.page)) - {int(slot) for slot in case.new_slots()}
    flat = [tensor.contiguous().flatten(0, 1) for tensor in (pages.keys, before.keys)]
    assert all(torch.equal(flat[0][slot], flat[1][slot]) for slot in untouched)
    assert same(before, case.cache(written=False)) == [True] * 3


@pytest.mark.parametrize("level", [1, 2])
def test_a_write_of_its_own_puts_the_same_into_the_pages(level):
    case = Requests([20, 1, 40], [20, 70, 41], level=level, kv_heads=3, size=48)
    pages, slots = case.cache(written=False), case.new_slots()
    slots[3] = -1

    TritonProvider.write(None, *case.new(), pages, slots)

    wanted, kept = case.cache(written=True), case.cache(written=False)
    block, slot = divmod(int(case.slots(0, torch.tensor([3]))), case.page)
    for mine, theirs in ((wanted.keys, kept.keys), (wanted.values, kept.values)):
        mine[block, slot] = theirs[block, slot]
    wanted.key_scales[block, :, slot] = torch.nan
    assert same(pages, wanted) == [True] * 3


@settings(max_examples=EXAMPLES)
@given(case=requests((1, 17, 64, 100, 0)), rows=st.sampled_from([16, 32, 64]), keys=st.sampled_from([32, 64, 128]))
def test_prompts_and_chunks(case, rows, keys):
    if not any(case.query_lens):
        return
    wanted = with_byte_weights(case, keys) if case.level == 1 else case.expected()

    check(run_prefill(case, PrefillTiles(rows, keys, 2, 4)), wanted)


@settings(max_examples=EXAMPLES)
@given(case=requests((1, 17, 64, 100, 0)), size=st.sampled_from([64, 80, 128]))
def test_prompts_by_descriptors(case, size):
    if not any(case.query_lens):
        return
    case, tiles = evolve(case, size=size, level=1), PrefillTiles.of(size)

    apart = (run_prefill(case, tiles, by_descriptors=True).cpu().double() - with_byte_weights(case, tiles.keys)).abs()

    assert float(apart.max()) < 2**-5  # now and then a weight is rounded the other way, which shows where keys are few
    assert float(apart.mean()) < (2**-8 if case.dtype == torch.bfloat16 else 2**-10)


def test_the_weights_of_level_1_prompts_are_bytes():
    case = Requests([70, 33], [70, 90], dtype=torch.float16, kv_heads=1)
    wanted = with_byte_weights(case, 32)
    found = run_prefill(case).cpu().double()

    apart = (found - wanted).abs()
    assert float(apart.max()) < 2**-8  # now and then a weight is rounded the other way
    assert float(apart.mean()) < (found - case.expected()).abs().mean() / 4


@pytest.mark.parametrize("size", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("level", [1, 2])
def test_the_tiles_of_each_head_size(size, level):
    length = 200 if INTERPRETED else 1900
    case = Requests([length], [length], level=level, kv_heads=1, size=size)
    expected = case.expected()

    wanted = with_byte_weights(case, PrefillTiles.of(size).keys) if level == 1 else expected
    check(run_prefill(case, PrefillTiles.of(size), 2048), wanted)
    last = Requests([1], [length], level=level, kv_heads=1, size=size)
    object.__setattr__(last, "queries", [case.queries[0][-1:]])
    object.__setattr__(last, "keys", case.keys)
    object.__setattr__(last, "values", case.values)
    object.__setattr__(last, "value_scales", case.value_scales)
    out, _ = run_decode(last, tiles=DecodeTiles.of(size), splits=2)
    check(out, expected[-1:])


def test_zeros_have_a_scale_and_no_nan():
    case = Requests([1, 20], [30, 20])
    for part in (case.queries, case.keys, case.values):
        part[0].zero_()
        part[1][3].zero_()

    out, pages = run_decode(Requests([1], [1]), splits=1)
    assert out.isfinite().all()
    check(run_prefill(case), with_byte_weights(case, 32))
    zeros = torch.zeros(2, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    TritonProvider.write(None, zeros, zeros, pages, torch.tensor([0, 5], device=DEVICE))
    assert (pages.key_scales[0, :, 0] > 0).all()
    assert not pages.keys[0, 5].any()


def test_nothing_beyond_the_window_is_read():
    case = Requests([1, 2], [200, 150], level=2, window=24)
    before, _ = run_decode(case, splits=3)
    pages = case.cache(written=False)
    for request, (length, count) in enumerate(zip(case.seq_lens, case.query_lens, strict=True)):
        hidden = torch.arange((length - count - 23) // 32 * 32)
        block, slot = case.table[request].long()[hidden // 16], hidden % 16
        pages.values[block, slot] = torch.nan
        pages.key_scales[block, :, slot] = torch.nan

    after, _ = run_decode(case, splits=3, cache=pages)

    assert torch.equal(before, after)


@pytest.mark.parametrize("window", [1, 24])
@pytest.mark.parametrize("level", [1, 2])
def test_blocks_that_left_the_window_may_be_gone(level, window):
    """Their hosts have given them to others: the table names no block there."""
    decodes, prompts = (
        Requests(query_lens, seq_lens, level=level, window=window, kv_heads=1)
        for query_lens, seq_lens in (([1, 2], [200, 150]), ([40, 3], [200, 150]))
    )
    for case in (decodes, prompts):
        expected, pages = case.expected(), case.cache(written=case is prompts)
        if case is prompts and level == 1:
            expected = with_byte_weights(case, 64)
        for request, (length, count) in enumerate(zip(case.seq_lens, case.query_lens, strict=True)):
            case.table[request, : (length - count - window + 1) // case.page] = 10**6

        if case is decodes:
            for splits in (1, 3):
                check(run_decode(case, tiles=DecodeTiles(keys=64), splits=splits, cache=pages)[0], expected)
        else:
            check(run_prefill(case, PrefillTiles(32, 64, 2, 4), cache=pages), expected)


def test_padding_is_neither_read_nor_written():
    case = Requests([1, 0, 1, 0], [40, 0, 90, 30])
    query = torch.cat(case.queries)
    object.__setattr__(case, "queries", [*case.queries, torch.full_like(query, torch.nan)])
    object.__setattr__(case, "keys", [*case.keys])

    out, _ = run_decode(case, splits=2)

    assert (out[2:] == CANARY).all()
    object.__setattr__(case, "queries", case.queries[:4])
    check(out[:2], case.expected())


def test_rounding_is_to_the_nearest_and_even_where_two_are_as_near():
    rows = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -127.0] + [3.49] * 24, device=DEVICE)
    key = rows.view(1, 1, 32).to(torch.float32)
    case = Requests([1], [1], kv_heads=1, size=32)
    pages = case.cache(written=False)
    value = key / 16

    TritonProvider.write(None, key, value, pages, torch.tensor([0], device=DEVICE))

    assert pages.keys[0, 0, 0].tolist() == by_row(key.cpu())[0].flatten().tolist()
    assert pages.values[0, 0, 0].tolist() == by_channel(value.cpu(), case.value_scales.cpu()).flatten().tolist()
    assert [a for a, _ in pairwise(pages.keys[0, 0, 0].tolist())][:8] == [127, 0, 2, 2, 0, -2, 126, -127]
