"""The Triton kernels against attention over the same quantized numbers in float64, for random lengths and features."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import pairwise

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug_int8_ixformer.tiles import DecodeTiles, PrefillTiles
from attnplug_int8_ixformer.triton_launch import write_rows
from plugins.int8_ixformer.tests.requests import (
    CANARY,
    DTYPES,
    Requests,
    check,
    quantize_channels,
    quantize_rows,
    run_decode,
    run_prefill,
    with_int8_probs,
)
from tests.backends.triton_on_cpu import DEVICE, INTERPRETED, MARKS, bounds_checked

pytestmark = MARKS

EXAMPLES = 10 if INTERPRETED else 8  # an example takes seconds, to interpret or to compile
FEATURES = (
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
def requests(draw, queries):
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
        **draw(st.sampled_from(FEATURES)),
    )


def same(one, other):
    """Return whether keys, values and key scales of two caches are equal, byte by byte."""
    pairs = zip((one.keys, one.values, one.key_scales), (other.keys, other.values, other.key_scales), strict=True)
    return [torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in pairs]


@settings(max_examples=EXAMPLES)
@given(
    case=requests((1, 1, 0)),
    splits=st.sampled_from([1, 2, 9]),
    keys=st.sampled_from([16, 32, 64]),
    writes=st.booleans(),
)
def test_decode(case, splits, keys, writes):
    if not any(case.query_lens):
        return
    out, _ = run_decode(case, tiles=DecodeTiles(keys=keys), splits=splits, writes=writes)

    check(out, case.expected())


@settings(max_examples=EXAMPLES)
@given(case=requests((1, 2, 5, 0)), splits=st.sampled_from([1, 3]))
def test_decode_of_several_tokens(case, splits):
    if not any(case.query_lens):
        return
    out, _ = run_decode(case, splits=splits)

    check(out, case.expected())


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize("splits", [1, 4])
def test_decode_writes_its_own_slots_only(level, splits):
    case = Requests([1, 3, 0, 2], [40, 90, 20, 2], level=level)

    _, pages = run_decode(case, splits=splits)
    before, expected = case.cache(written=False), case.cache(written=True)
    live = [(r, place) for r, n in enumerate(case.seq_lens) if case.query_lens[r] for place in range(n)]

    for request, place in live:
        block, slot = divmod(int(case.slots(request, torch.tensor([place]))), case.page)
        assert torch.equal(pages.keys[block, slot], expected.keys[block, slot])
        assert torch.equal(pages.values[block, slot], expected.values[block, slot])
        torch.testing.assert_close(
            pages.key_scales[block, :, slot], expected.key_scales[block, :, slot], rtol=1e-6, atol=0
        )
    untouched = set(range(case.num_blocks * case.page)) - {int(slot) for slot in case.new_slots()}
    flat = [tensor.contiguous().flatten(0, 1) for tensor in (pages.keys, before.keys)]
    assert all(torch.equal(flat[0][slot], flat[1][slot]) for slot in untouched)
    assert same(before, case.cache(written=False)) == [True] * 3


@pytest.mark.parametrize("level", [1, 2])
def test_a_separate_write_is_equal(level):
    case = Requests([20, 1, 40], [20, 70, 41], level=level, kv_heads=3, size=48)
    pages, slots = case.cache(written=False), case.new_slots()
    slots[3] = -1

    write_rows(*case.new(), pages, slots)

    expected, kept = case.cache(written=True), case.cache(written=False)
    block, slot = divmod(int(case.slots(0, torch.tensor([3]))), case.page)
    for pages_of, kept_of in ((expected.keys, kept.keys), (expected.values, kept.values)):
        pages_of[block, slot] = kept_of[block, slot]
    expected.key_scales[block, :, slot] = torch.nan
    assert same(pages, expected) == [True] * 3


@settings(max_examples=EXAMPLES)
@given(case=requests((1, 17, 64, 100, 0)), rows=st.sampled_from([16, 32, 64]), keys=st.sampled_from([32, 64, 128]))
def test_prefill(case, rows, keys):
    if not any(case.query_lens):
        return
    expected = with_int8_probs(case, keys) if case.level == 1 else case.expected()

    check(run_prefill(case, PrefillTiles(rows, keys, 2, 4)), expected)


@settings(max_examples=EXAMPLES)
@given(case=requests((1, 17, 64, 100, 0)), size=st.sampled_from([64, 80, 128]))
def test_prefill_tma(case, size):
    if not any(case.query_lens):
        return
    case, tiles = evolve(case, size=size, level=1), PrefillTiles.of(size)

    error = (run_prefill(case, tiles, uses_tma=True).cpu().double() - with_int8_probs(case, tiles.keys)).abs()

    assert float(error.max()) < 2**-5  # a probability may round the other way, which matters with few keys
    assert float(error.mean()) < (2**-8 if case.dtype == torch.bfloat16 else 2**-10)


def test_level_1_prefill_has_int8_probabilities():
    case = Requests([70, 33], [70, 90], dtype=torch.float16, kv_heads=1)
    expected = with_int8_probs(case, 32)
    found = run_prefill(case).cpu().double()

    error = (found - expected).abs()
    assert float(error.max()) < 2**-8  # a probability may round the other way
    assert float(error.mean()) < (found - case.expected()).abs().mean() / 4


@pytest.mark.parametrize("size", [32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("level", [1, 2])
def test_tiles_of_each_head_size(size, level):
    length = 200 if INTERPRETED else 1900
    case = Requests([length], [length], level=level, kv_heads=1, size=size)
    expected = case.expected()

    expected = with_int8_probs(case, PrefillTiles.of(size).keys) if level == 1 else expected
    check(run_prefill(case, PrefillTiles.of(size), 2048), expected)
    last = Requests([1], [length], level=level, kv_heads=1, size=size)
    last.put("queries", [case.queries[0][-1:]])
    for name in ("keys", "values", "value_scales"):
        last.put(name, getattr(case, name))
    out, _ = run_decode(last, tiles=DecodeTiles.of(size), splits=2)
    check(out, expected[-1:])


def test_zero_rows_have_a_scale_and_no_nan():
    case = Requests([1, 20], [30, 20])
    for part in (case.queries, case.keys, case.values):
        part[0].zero_()
        part[1][3].zero_()

    out, pages = run_decode(Requests([1], [1]), splits=1)
    assert out.isfinite().all()
    check(run_prefill(case), with_int8_probs(case, 32))
    zeros = torch.zeros(2, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    write_rows(zeros, zeros, pages, torch.tensor([0, 5], device=DEVICE))
    assert (pages.key_scales[0, :, 0] > 0).all()
    assert not pages.keys[0, 5].any()


def test_keys_beyond_the_window_are_not_read():
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
def test_blocks_beyond_the_window_may_be_freed(level, window):
    """The host reuses them, and its block table has invalid entries there."""
    decodes, prefills = (
        Requests(query_lens, seq_lens, level=level, window=window, kv_heads=1)
        for query_lens, seq_lens in (([1, 2], [200, 150]), ([40, 3], [200, 150]))
    )
    for case in (decodes, prefills):
        expected, pages = case.expected(), case.cache(written=case is prefills)
        if case is prefills and level == 1:
            expected = with_int8_probs(case, 64)
        for request, (length, count) in enumerate(zip(case.seq_lens, case.query_lens, strict=True)):
            case.table[request, : (length - count - window + 1) // case.page] = 10**6

        if case is decodes:
            for splits in (1, 3):
                check(run_decode(case, tiles=DecodeTiles(keys=64), splits=splits, cache=pages)[0], expected)
        else:
            check(run_prefill(case, PrefillTiles(32, 64, 2, 4), cache=pages), expected)


def test_padding_is_not_read_or_written():
    case = Requests([1, 0, 1, 0], [40, 0, 90, 30])
    query = torch.cat(case.queries)
    case.put("queries", [*case.queries, torch.full_like(query, torch.nan)])

    out, _ = run_decode(case, splits=2)

    assert (out[2:] == CANARY).all()
    case.put("queries", case.queries[:4])
    check(out[:2], case.expected())


def test_rounding_is_to_nearest_with_ties_to_even():
    rows = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, -127.0] + [3.49] * 24, device=DEVICE)
    key = rows.view(1, 1, 32).to(torch.float32)
    case = Requests([1], [1], kv_heads=1, size=32)
    pages = case.cache(written=False)
    value = key / 16

    write_rows(key, value, pages, torch.tensor([0], device=DEVICE))

    assert pages.keys[0, 0, 0].tolist() == quantize_rows(key.cpu())[0].flatten().tolist()
    assert pages.values[0, 0, 0].tolist() == quantize_channels(value.cpu(), case.value_scales.cpu()).flatten().tolist()
    assert [a for a, _ in pairwise(pages.keys[0, 0, 0].tolist())][:8] == [127, 0, 2, 2, 0, -2, 126, -127]
