"""The Triton kernels against dense attention in float64, for random patterns and lengths, contiguous and paged K/V."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug.ops import Kernel, split_bytes
from attnplug_blocksparse import decode, prefill, prefill_single
from attnplug_blocksparse.pattern import BlocksparseParams, Pattern
from attnplug_blocksparse.plan import DecodePlan, PrefillPlan, Scales
from attnplug_blocksparse.tiles import DecodeTiles, PrefillTiles
from attnplug_kit.oracle import seen_by
from plugins.blocksparse.tests.requests import CANARY, DTYPES, Requests, check, lens, starts
from tests.backends.triton_on_cpu import DEVICE, INTERPRETED, MARKS, bounds_checked

pytestmark = MARKS

EXAMPLES = 12 if INTERPRETED else 8  # an example takes seconds, to interpret or to compile
MODES = ({}, {"homo_head": True}, {"homo_head_group": True})
PHI = {"max_seqlen": 8192, "block_size": 16, "local_blocks": 2, "vert_stride": 4}


@pytest.fixture(autouse=True, scope="module")
def _in_bounds():
    with bounds_checked() if INTERPRETED else nullcontext():
        yield


@st.composite
def patterns(draw, blocks=(16, 32, 5, 48, 64)):
    return {
        "max_seqlen": 8192,
        "block_size": draw(st.sampled_from(blocks)),
        "local_blocks": draw(st.integers(0, 5)),
        "vert_stride": draw(st.integers(1, 5)),
        **draw(st.sampled_from(MODES)),
    }


@st.composite
def requests(draw):
    number = draw(st.integers(1, 3))
    queries = draw(st.lists(st.sampled_from([1, 2, 17, 64, 100, 0]), min_size=number, max_size=number))
    context = draw(st.lists(st.sampled_from([0, 3, 16, 50, 130]), min_size=number, max_size=number))
    return Requests(
        pattern=draw(patterns()),
        query_lens=queries,
        seq_lens=[query + before for query, before in zip(queries, context, strict=True)],
        kv_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 2, 3])),
        size=draw(st.sampled_from([64, 96])),
        dtype=draw(st.sampled_from(DTYPES)),
    )


def pattern_of(given_requests, *, total=None, **ranks):
    heads = given_requests.kv_heads * given_requests.group
    named = given_requests.pattern if total is None else {**given_requests.pattern, "total_kv_heads": total}
    params = BlocksparseParams.of(named, num_heads=heads, num_kv_heads=given_requests.kv_heads, **ranks)
    return Pattern(params, torch.device(DEVICE))


def run_prefill(given_requests, tiles=None, page=0, pattern=None, query_lens=()):
    query = torch.cat(given_requests.queries)
    out, lse = torch.full_like(query, CANARY), torch.full(query.shape[:2], CANARY, device=DEVICE)
    plan = PrefillPlan(
        pattern=pattern or pattern_of(given_requests),
        tiles=tiles or PrefillTiles(32, 32, 2, 4),
        query_starts=starts(given_requests.query_lens),
        seq_lens=lens(given_requests.seq_lens),
        max_query_len=max(given_requests.query_lens),
        key_starts=starts(given_requests.seq_lens),
        query_lens=query_lens,
    )
    keys, values = torch.cat(given_requests.keys), torch.cat(given_requests.values)
    if page:
        (keys, values), table = given_requests.pages(page)
        plan = evolve(plan, table=table, key_starts=None)
    prefill.attend(query, keys, values, out, lse, plan, Scales(given_requests.scale))
    return out, lse


def run_decode(given_requests, tiles=None, page=16, splits=1, cache=None, pattern=None):
    queries = [rows[-1:] for rows in given_requests.queries]
    counts = [rows.shape[0] for rows in queries]
    query = torch.cat(queries)
    out, lse = torch.full_like(query, CANARY), torch.full(query.shape[:2], CANARY, device=DEVICE)
    pages, table = given_requests.pages(page)
    keys, values = pages if cache is None else cache
    size = split_bytes(splits * len(query), *query.shape[1:])
    scratch = torch.full((size,), 255, dtype=torch.uint8, device=DEVICE)
    plan = DecodePlan(
        pattern=pattern or pattern_of(given_requests),
        tiles=tiles or DecodeTiles(),
        query_starts=starts(counts),
        seq_lens=lens(given_requests.seq_lens),
        table=table,
        num_splits=splits,
        scratch=scratch,
    )
    decode.attend(query, keys, values, out, lse, plan, Scales(given_requests.scale))
    return out, lse


@settings(max_examples=EXAMPLES)
@given(case=requests(), rows=st.sampled_from([16, 32, 64]), keys=st.sampled_from([16, 32, 64]))
def test_prefill_contiguous(case, rows, keys):
    check(*run_prefill(case, PrefillTiles(rows, keys, 2, 4)), case.expected())


def test_wide_strides_use_64_bit_offsets(monkeypatch):
    found, run = [], Kernel.run

    def record(kernel, *given, **options):
        constants = given[-1]
        found.append(dict(zip(kernel.function.arg_names[-len(constants) :], constants, strict=True))["is_wide"])
        run(kernel, *given, **options)

    monkeypatch.setattr(Kernel, "run", record)
    case = Requests([100], [230], pattern=PHI)  # tiles of two vertical blocks, 4 x 16 tokens apart
    for limit in (2**31, 32 * 4 * 128 + 1, 32 * 4 * 128):
        monkeypatch.setattr(prefill, "_INT32_ELEMENTS", limit)
        check(*run_prefill(case, PrefillTiles(32, 32, 2, 4)), case.expected())

    assert found == [False, False, True]


@settings(max_examples=EXAMPLES)
@given(
    case=requests(),
    rows=st.sampled_from([16, 32, 64]),
    keys=st.sampled_from([16, 32, 64]),
    page=st.sampled_from([16, 32, 48]),
)
def test_prefill_paged(case, rows, keys, page):
    check(*run_prefill(case, PrefillTiles(rows, keys, 2, 4), page), case.expected())


@settings(max_examples=EXAMPLES)
@given(
    pattern=patterns(blocks=(16, 32, 64)),
    length=st.sampled_from([1, 40, 64, 130, 257, 400]),
    rows=st.sampled_from([16, 64]),
    keys=st.sampled_from([32, 64, 128]),
    size=st.sampled_from([64, 128]),
    dtype=st.sampled_from(DTYPES),
)
def test_prefill_tma(pattern, length, rows, keys, size, dtype):
    case = Requests([length], [length], pattern=pattern, size=size, dtype=dtype)
    (query,), (key,), (value,), tiles = case.queries, case.keys, case.values, PrefillTiles(rows, keys, 2, 4)
    out, lse = torch.full_like(query, CANARY), torch.full(query.shape[:2], CANARY, device=DEVICE)

    assert prefill_single.supports_tma(key, value, pattern_of(case), tiles)
    prefill_single.attend_tma(query, key, value, out, lse, pattern_of(case), Scales(case.scale), tiles)

    check(out, lse, case.expected())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")
def test_single_launches_run_on_their_tensors_device():
    case = Requests([300, 70], [300, 70], pattern=PHI)
    query, key, value = (torch.cat(rows).to("cuda:1") for rows in (case.queries, case.keys, case.values))
    out, lse = torch.full_like(query, CANARY), torch.full(query.shape[:2], CANARY, device="cuda:1")
    plan = PrefillPlan(
        pattern=pattern_of(case),
        tiles=PrefillTiles(),
        query_starts=starts(case.query_lens),
        seq_lens=lens(case.seq_lens),
        query_lens=(300, 70),
    )

    assert torch.cuda.current_device() == 0
    prefill.attend(query, key, value, out, lse, plan, Scales(case.scale))

    check(out, lse, case.expected())
    assert torch.cuda.current_device() == 0


@settings(max_examples=EXAMPLES)
@given(
    case=requests(),
    keys=st.sampled_from([16, 32, 64]),
    page=st.sampled_from([16, 32, 48]),
    splits=st.sampled_from([1, 2, 3, 9]),
)
def test_decode(case, keys, page, splits):
    output, sums = case.expected()
    last = [end - 1 for end, count in zip(starts(case.query_lens)[1:].tolist(), case.query_lens, strict=True) if count]

    check(*run_decode(case, DecodeTiles(keys=keys), page, splits), (output[last], sums[last]))


@pytest.mark.parametrize("splits", [1, 3])
def test_last_block_beyond_the_sequence(splits):
    case = Requests([1], [74], pattern={**PHI, "block_size": 64})

    check(*run_decode(case, DecodeTiles(keys=16), 16, splits), case.expected())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 96, 128, 256])
def test_tiles_of_each_head_size(size, dtype):
    length = 300 if INTERPRETED else 1900
    own = PHI if INTERPRETED else {**PHI, "block_size": 64, "vert_stride": 8}
    case = Requests([length], [length], pattern=own, kv_heads=1, size=size, dtype=dtype)
    expected = output, sums = case.expected()

    check(*run_prefill(case, PrefillTiles.of(size)), expected)
    check(*run_prefill(case, PrefillTiles.of(size, shared_memory=99 * 1024)), expected)
    check(*run_prefill(case, PrefillTiles.of(size, paged=True, shared_memory=99 * 1024), page=32), expected)
    check(*run_prefill(case, PrefillTiles.of(size, paged=True), page=16), expected)
    check(*run_prefill(case, PrefillTiles.of(size), query_lens=(length,)), expected)
    check(*run_decode(case, DecodeTiles.of(size), splits=5), (output[-1:], sums[-1:]))


@pytest.mark.parametrize("mode", MODES, ids=["per head", "homo_head", "homo_head_group"])
@pytest.mark.parametrize(("tp_size", "kv_heads"), [(2, 2), (3, 3), (4, 2)])
def test_ranks_match_the_model(mode, tp_size, kv_heads):
    group = 2 * tp_size // kv_heads
    whole = Requests([70, 5], [70, 140], pattern={**PHI, "vert_stride": 12, **mode}, kv_heads=kv_heads, group=group)
    output, sums = whole.expected()
    for rank in range(tp_size):
        heads, kv_head = slice(2 * rank, 2 * rank + 2), 2 * rank // group
        own = Requests([70, 5], [70, 140], pattern=whole.pattern, kv_heads=1, group=2)
        one = slice(kv_head, kv_head + 1)
        for name, part in (("queries", heads), ("keys", one), ("values", one)):
            own.put(name, [rows[:, part].contiguous() for rows in getattr(whole, name)])
        pattern = pattern_of(own, tp_size=tp_size, tp_rank=rank, total=kv_heads)

        check(*run_prefill(own, pattern=pattern), (output[:, heads], sums[:, heads]))
        check(*run_decode(own, pattern=pattern, splits=2), (output[[69, 74], heads], sums[[69, 74], heads]))


def outside(case, request=0):
    """Return the keys that no head of the first KV head attends to for the last token, ``(keys,)``."""
    keys = torch.arange(case.seq_lens[request])
    heads = {"num_q_heads": case.kv_heads * case.group, "num_kv_heads": case.kv_heads}
    seen = [seen_by(head, case.pattern, **heads, queries=keys[-1:], keys=keys)[0] for head in range(case.group)]
    return ~torch.stack(seen).any(0)


@pytest.mark.parametrize("splits", [1, 3])
def test_decode_reads_no_key_outside_the_pattern(splits):
    case = Requests([1], [200], pattern={**PHI, "vert_stride": 8}, kv_heads=1, group=2)
    before, hidden = run_decode(case, splits=splits), outside(case)
    assert 60 < int(hidden.sum()) < 160

    case.keys[0][hidden] = torch.nan
    case.values[0][hidden] = torch.nan

    for found, expected in zip(run_decode(case, splits=splits), before, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("page", [0, 16])
def test_prefill_reads_no_key_outside_the_pattern(page):
    case = Requests([16], [208], pattern={**PHI, "vert_stride": 8}, kv_heads=1, group=1)
    before, hidden = run_prefill(case, PrefillTiles(16, 16, 2, 4), page), outside(case)
    assert 60 < int(hidden.sum()) < 190

    case.keys[0][hidden] = torch.nan
    case.values[0][hidden] = torch.nan

    for found, expected in zip(run_prefill(case, PrefillTiles(16, 16, 2, 4), page), before, strict=True):
        assert torch.equal(found, expected)


LAUNCHES = {
    "contiguous": lambda case: run_prefill(case, PrefillTiles(32, 32, 2, 4)),
    "paged": lambda case: run_prefill(case, PrefillTiles(32, 32, 2, 4), page=32),
    "TMA": lambda case: run_prefill(case, PrefillTiles(32, 64, 2, 4), query_lens=tuple(case.query_lens)),
    "decode": lambda case: run_decode(case, splits=2),
}


@pytest.mark.parametrize("mode", [{}, {"homo_head_group": True}], ids=["per head", "per group"])
@pytest.mark.parametrize("launch", LAUNCHES)
def test_a_token_affects_only_rows_that_attend_to_it(launch, mode):
    case = Requests([130], [130], pattern={**PHI, **mode})
    keys, heads = torch.arange(130), case.kv_heads * case.group
    seen = [seen_by(head, case.pattern, num_q_heads=heads, num_kv_heads=2, queries=keys, keys=keys)
            for head in range(heads)]  # fmt: skip
    expected = torch.stack([rows[:, 37] & (keys >= 37) for rows in seen], 1)
    before, _ = LAUNCHES[launch](case)

    case.keys[0][37] += 1
    case.values[0][37] += 1000
    after, _ = LAUNCHES[launch](case)

    changed = (after != before).any(2).cpu()
    assert 0 < int(expected.sum()) < expected.numel()
    assert torch.equal(changed, expected[-len(changed) :])


def test_a_key_of_one_head_affects_only_that_head():
    case = Requests([1], [130], pattern={**PHI, "local_blocks": 1, "vert_stride": 4}, kv_heads=1, group=3)
    before, _ = run_decode(case)
    residue = pattern_of(case).params.residue(1)

    case.values[0][residue * 16 : residue * 16 + 16] += 4
    after, _ = run_decode(case)

    assert (after != before).flatten(2).any(2)[0].tolist() == [False, True, False]


def test_padding_is_not_read_or_written():
    case = Requests([1, 0, 1, 0], [40, 0, 90, 30], pattern=PHI)
    out, lse = run_decode(case, splits=2)

    check(out, lse, case.expected())


class LargeCacheRequests(Requests):
    """Requests whose pages are beyond 2**31 elements; the pages before them are never touched."""

    def pages(self, size):
        (keys, values), table = super().pages(size)
        shift = -(-(2**31) // (2 * values[0].numel()))
        cache = torch.empty(shift + len(values), 2, *values.shape[1:], dtype=self.dtype, device=DEVICE)
        cache[shift:, 0], cache[shift:, 1] = keys, values
        return (cache[:, 0], cache[:, 1]), table + shift


def test_pages_beyond_32_bit_offsets():
    case = LargeCacheRequests([20, 1], [90, 40], pattern=PHI)
    output, sums = case.expected()

    check(*run_prefill(case, page=32), (output, sums))
    check(*run_decode(case, page=32, splits=2), (output[19:], sums[19:]))
