"""The kernels against dense attention in float64: any pattern, any lengths, rows and pages."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from attnplug.ops import Kernel
from attnplug_blocksparse import decode, prefill, prompt
from attnplug_blocksparse.params import BlocksparseParams
from attnplug_blocksparse.pattern import Pattern
from attnplug_blocksparse.scales import Scales
from attnplug_blocksparse.tiles import DecodeTiles, PrefillTiles
from attnplug_kit.oracle.sparsity import seen_by
from plugins.blocksparse.tests.dense import CANARY, DTYPES, Requests, check, lens, starts
from tests.backends.triton_on_cpu import DEVICE, INTERPRETED, MARKS, bounds_checked

pytestmark = MARKS

EXAMPLES = 12 if INTERPRETED else 8  # each is interpreted slowly, or compiled
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
def requests(draw, first=False, count=(1, 3), **fixed):
    number = draw(st.integers(*count))
    queries = draw(st.lists(st.sampled_from([1, 2, 17, 64, 100, 0]), min_size=number, max_size=number))
    context = draw(st.lists(st.sampled_from([0, 3, 16, 50, 130]), min_size=number, max_size=number))
    lengths = queries if first else [query + before for query, before in zip(queries, context, strict=True)]
    return Requests(
        pattern=fixed.get("pattern") or draw(patterns()),
        query_lens=queries,
        seq_lens=lengths,
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


def run_prefill(given_requests, tiles=None, page=0, pattern=None, lengths=()):
    query = torch.cat(given_requests.queries)
    out, lse = torch.full_like(query, CANARY), torch.full(query.shape[:2], CANARY, device=DEVICE)
    prompts = prefill.Prompts(
        pattern=pattern or pattern_of(given_requests),
        tiles=tiles or PrefillTiles(32, 32, 2, 4),
        query_starts=starts(given_requests.query_lens),
        seq_lens=lens(given_requests.seq_lens),
        longest_query=max(given_requests.query_lens),
        key_starts=starts(given_requests.seq_lens),
        lengths=lengths,
    )
    keys, values = torch.cat(given_requests.keys), torch.cat(given_requests.values)
    if page:
        (keys, values), table = given_requests.pages(page)
        prompts = evolve(prompts, table=table, key_starts=None)
    prefill.attend(query, keys, values, out, lse, prompts, Scales(given_requests.scale))
    return out, lse


def run_decode(given_requests, tiles=None, page=16, splits=1, cache=None, pattern=None):
    queries = [rows[-1:] for rows in given_requests.queries]
    counts = [rows.shape[0] for rows in queries]
    query = torch.cat(queries)
    out, lse = torch.full_like(query, CANARY), torch.full(query.shape[:2], CANARY, device=DEVICE)
    pages, table = given_requests.pages(page)
    keys, values = pages if cache is None else cache
    parts = splits * len(counts)
    scratch = torch.full((decode.scratch_bytes(parts, *query.shape[1:]),), 255, dtype=torch.uint8, device=DEVICE)
    tokens = decode.Tokens(
        pattern=pattern or pattern_of(given_requests),
        tiles=tiles or DecodeTiles(),
        query_starts=starts(counts),
        seq_lens=lens(given_requests.seq_lens),
        table=table,
        num_splits=splits,
        scratch=scratch,
    )
    decode.attend(query, keys, values, out, lse, tokens, Scales(given_requests.scale))
    return out, lse


@settings(max_examples=EXAMPLES)
@given(case=requests(), rows=st.sampled_from([16, 32, 64]), keys=st.sampled_from([16, 32, 64]))
def test_prompts_and_chunks_on_rows(case, rows, keys):
    check(*run_prefill(case, PrefillTiles(rows, keys, 2, 4)), case.expected())


def test_rows_that_are_far_apart_are_counted_in_64_bits(monkeypatch):
    found, run = [], Kernel.run

    def noted(kernel, *given, **options):
        constants = given[-1]
        found.append(dict(zip(kernel.function.arg_names[-len(constants) :], constants, strict=True))["is_wide"])
        run(kernel, *given, **options)

    monkeypatch.setattr(Kernel, "run", noted)
    case = Requests(PHI, [100], [230])  # tiles of two blocks, which are 4 x 16 tokens apart
    for limit in (2**31, 32 * 4 * 128 + 1, 32 * 4 * 128):
        monkeypatch.setattr(prefill, "_FAR", limit)
        check(*run_prefill(case, PrefillTiles(32, 32, 2, 4)), case.expected())

    assert found == [False, False, True]


@settings(max_examples=EXAMPLES)
@given(
    case=requests(),
    rows=st.sampled_from([16, 32, 64]),
    keys=st.sampled_from([16, 32, 64]),
    page=st.sampled_from([16, 32, 48]),
)
def test_prompts_and_chunks_on_pages(case, rows, keys, page):
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
def test_prompts_by_descriptors(pattern, length, rows, keys, size, dtype):
    case = Requests(pattern, [length], [length], size=size, dtype=dtype)
    (query,), (key,), (value,), tiles = case.queries, case.keys, case.values, PrefillTiles(rows, keys, 2, 4)
    out, lse = torch.full_like(query, CANARY), torch.full(query.shape[:2], CANARY, device=DEVICE)

    assert prompt.is_for(key, value, pattern_of(case), tiles)
    prompt.attend(query, key, value, out, lse, pattern_of(case), Scales(case.scale), tiles)

    check(out, lse, case.expected())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are no two GPUs")
def test_long_prompts_run_where_their_tensors_are():
    case = Requests(PHI, [300, 70], [300, 70])
    query, key, value = (torch.cat(rows).to("cuda:1") for rows in (case.queries, case.keys, case.values))
    out, lse = torch.full_like(query, CANARY), torch.full(query.shape[:2], CANARY, device="cuda:1")
    prompts = prefill.Prompts(
        pattern=pattern_of(case),
        tiles=PrefillTiles(),
        query_starts=starts(case.query_lens),
        seq_lens=lens(case.seq_lens),
        lengths=(300, 70),
    )

    assert torch.cuda.current_device() == 0
    prefill.attend(query, key, value, out, lse, prompts, Scales(case.scale))

    check(out, lse, case.expected())
    assert torch.cuda.current_device() == 0


@settings(max_examples=EXAMPLES)
@given(
    case=requests(),
    keys=st.sampled_from([16, 32, 64]),
    page=st.sampled_from([16, 32, 48]),
    splits=st.sampled_from([1, 2, 3, 9]),
)
def test_decodes(case, keys, page, splits):
    output, sums = case.expected()
    last = [end - 1 for end, count in zip(starts(case.query_lens)[1:].tolist(), case.query_lens, strict=True) if count]

    check(*run_decode(case, DecodeTiles(keys=keys), page, splits), (output[last], sums[last]))


@pytest.mark.parametrize("splits", [1, 3])
def test_tiles_of_a_last_block_that_are_beyond_the_sequence(splits):
    case = Requests({**PHI, "block_size": 64}, [1], [74])

    check(*run_decode(case, DecodeTiles(keys=16), 16, splits), case.expected())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [64, 96, 128, 256])
def test_the_tiles_of_each_head_size(size, dtype):
    length = 300 if INTERPRETED else 1900
    own = PHI if INTERPRETED else {**PHI, "block_size": 64, "vert_stride": 8}
    case = Requests(own, [length], [length], kv_heads=1, size=size, dtype=dtype)
    expected = output, sums = case.expected()

    check(*run_prefill(case, PrefillTiles.of(size)), expected)
    check(*run_prefill(case, PrefillTiles.of(size, shared_memory=99 * 1024)), expected)
    check(*run_prefill(case, PrefillTiles.of(size, paged=True, shared_memory=99 * 1024), page=32), expected)
    check(*run_prefill(case, PrefillTiles.of(size, paged=True), page=16), expected)
    check(*run_prefill(case, PrefillTiles.of(size), lengths=(length,)), expected)
    check(*run_decode(case, DecodeTiles.of(size), splits=5), (output[-1:], sums[-1:]))


@pytest.mark.parametrize("mode", MODES, ids=["per head", "homo_head", "homo_head_group"])
@pytest.mark.parametrize(("tp_size", "kv_heads"), [(2, 2), (3, 3), (4, 2)])
def test_ranks_together_are_the_model(mode, tp_size, kv_heads):
    group = 2 * tp_size // kv_heads
    whole = Requests({**PHI, "vert_stride": 12, **mode}, [70, 5], [70, 140], kv_heads=kv_heads, group=group)
    output, sums = whole.expected()
    for rank in range(tp_size):
        heads, kv_head = slice(2 * rank, 2 * rank + 2), 2 * rank // group
        own = Requests(whole.pattern, [70, 5], [70, 140], kv_heads=1, group=2)
        one = slice(kv_head, kv_head + 1)
        for name, part in (("queries", heads), ("keys", one), ("values", one)):
            object.__setattr__(own, name, [rows[:, part].contiguous() for rows in getattr(whole, name)])
        pattern = pattern_of(own, tp_size=tp_size, tp_rank=rank, total=kv_heads)

        check(*run_prefill(own, pattern=pattern), (output[:, heads], sums[:, heads]))
        check(*run_decode(own, pattern=pattern, splits=2), (output[[69, 74], heads], sums[[69, 74], heads]))


def outside(case, request=0):
    """``(keys,)``: which keys no head of the first KV head's group attends for the last token."""
    keys = torch.arange(case.seq_lens[request])
    heads = {"num_q_heads": case.kv_heads * case.group, "num_kv_heads": case.kv_heads}
    seen = [seen_by(head, case.pattern, **heads, queries=keys[-1:], keys=keys)[0] for head in range(case.group)]
    return ~torch.stack(seen).any(0)


@pytest.mark.parametrize("splits", [1, 3])
def test_what_is_outside_the_pattern_of_a_group_is_never_read(splits):
    case = Requests({**PHI, "vert_stride": 8}, [1], [200], kv_heads=1, group=2)
    before, hidden = run_decode(case, splits=splits), outside(case)
    assert 60 < int(hidden.sum()) < 160

    case.keys[0][hidden] = torch.nan
    case.values[0][hidden] = torch.nan

    for found, wanted in zip(run_decode(case, splits=splits), before, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("page", [0, 16])
def test_what_is_outside_the_pattern_of_a_tile_is_never_read(page):
    case = Requests({**PHI, "vert_stride": 8}, [16], [208], kv_heads=1, group=1)
    before, hidden = run_prefill(case, PrefillTiles(16, 16, 2, 4), page), outside(case)
    assert 60 < int(hidden.sum()) < 190

    case.keys[0][hidden] = torch.nan
    case.values[0][hidden] = torch.nan

    for found, wanted in zip(run_prefill(case, PrefillTiles(16, 16, 2, 4), page), before, strict=True):
        assert torch.equal(found, wanted)


WAYS = {
    "rows": lambda case: run_prefill(case, PrefillTiles(32, 32, 2, 4)),
    "pages": lambda case: run_prefill(case, PrefillTiles(32, 32, 2, 4), page=32),
    "descriptors": lambda case: run_prefill(case, PrefillTiles(32, 64, 2, 4), lengths=tuple(case.query_lens)),
    "decode": lambda case: run_decode(case, splits=2),
}


@pytest.mark.parametrize("mode", [{}, {"homo_head_group": True}], ids=["per head", "per group"])
@pytest.mark.parametrize("way", WAYS)
def test_a_token_moves_those_who_attend_it_and_nobody_else(way, mode):
    case = Requests({**PHI, **mode}, [130], [130])
    keys, heads = torch.arange(130), case.kv_heads * case.group
    seen = [seen_by(head, case.pattern, num_q_heads=heads, num_kv_heads=2, queries=keys, keys=keys)
            for head in range(heads)]  # fmt: skip
    wanted = torch.stack([rows[:, 37] & (keys >= 37) for rows in seen], 1)
    before, _ = WAYS[way](case)

    case.keys[0][37] += 1
    case.values[0][37] += 1000
    after, _ = WAYS[way](case)

    moved = (after != before).any(2).cpu()
    assert 0 < int(wanted.sum()) < wanted.numel()
    assert torch.equal(moved, wanted[-len(moved) :])


def test_a_key_that_one_head_alone_attends_moves_that_head_alone():
    case = Requests({**PHI, "local_blocks": 1, "vert_stride": 4}, [1], [130], kv_heads=1, group=3)
    before, _ = run_decode(case)
    residue = pattern_of(case).params.residue(1)

    case.values[0][residue * 16 : residue * 16 + 16] += 4
    after, _ = run_decode(case)

    assert (after != before).flatten(2).any(2)[0].tolist() == [False, True, False]


def test_padding_is_neither_read_nor_written():
    case = Requests(PHI, [1, 0, 1, 0], [40, 0, 90, 30])
    out, lse = run_decode(case, splits=2)
    alone = Requests(PHI, [1, 0, 1, 0], [40, 0, 90, 30]).expected()

    check(out, lse, alone)


class AtTheEnd(Requests):
    """Requests whose pages are behind 2^31 elements, which are never touched and take no memory on a CPU."""

    def pages(self, size):
        (keys, values), table = super().pages(size)
        shift = -(-(2**31) // (2 * values[0].numel()))
        cache = torch.empty(shift + len(values), 2, *values.shape[1:], dtype=self.dtype, device=DEVICE)
        cache[shift:, 0], cache[shift:, 1] = keys, values
        return (cache[:, 0], cache[:, 1]), table + shift


def test_pages_behind_what_32_bits_count():
    case = AtTheEnd(PHI, [20, 1], [90, 40])
    output, sums = case.expected()

    check(*run_prefill(case, page=32), (output, sums))
    check(*run_decode(case, page=32, splits=2), (output[19:], sums[19:]))
