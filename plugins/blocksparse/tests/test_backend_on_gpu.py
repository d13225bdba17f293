"""The backend through its public interface: the kernels of each batch, ranks, limits, warm-up, and refusals."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attnplug
from attnplug import Device, Requirements
from attnplug.contract import Batch, GraphShape, Layer, Limits, Parallel, split_kv
from attnplug.errors import LayerError, LimitsError
from attnplug.ops import Kernel
from attnplug_blocksparse.backend import BlocksparseBackend
from attnplug_blocksparse.builder import BlocksparseBuilder
from attnplug_blocksparse.tiles import HopperTiles
from plugins.blocksparse.tests.requests import CANARY, Requests, check
from tests.backends import gluon_emulator
from tests.backends.triton_on_cpu import DEVICE, INTERPRETED, MARKS

pytestmark = [*MARKS, pytest.mark.usefixtures("registered")]

PATTERN = {"max_seqlen": 2048, "block_size": 16, "local_blocks": 2, "vert_stride": 4}
PAGE = 32


def load(pattern=PATTERN, **requested):
    fields = {"paged": True, "block_size": PAGE, "kv_layout": "NHD", "return_lse": True, **requested}
    if not fields["paged"]:
        fields = {"paged": False, "return_lse": True}
    requirements = Requirements(
        head_size=64, num_q_heads=4, num_kv_heads=2, dtype="bfloat16", block_sparse=pattern, **fields
    )
    return attnplug.load(requirements, Device.cpu() if INTERPRETED else None, backend="blocksparse")


class Step:
    """A backend with one layer, and requests whose context is in its KV cache."""

    def __init__(self, case, parallel=None, max_num_splits=None, page=PAGE, **requested):
        self.case, self.page, self.backend = case, page, load(case.pattern, block_size=page, **requested)
        self.impl = self.backend.make_impl(Layer(name="layer"))
        tokens = sum(case.query_lens)
        most = {"max_num_tokens": max(8, tokens), "max_num_splits": max_num_splits}
        limits = Limits(max_num_reqs=8, max_seq_len=1024, **most)
        self.state = self.backend.make_state(limits, parallel)
        self.builder = self.backend.make_builder([self.impl], self.state)
        self.new = [slice(end - count, end) for end, count in zip(case.seq_lens, case.query_lens, strict=True)]

    def batch(self):
        case = self.case
        self.cache, table = case.pages(self.page)
        places = [torch.arange(length)[new] for length, new in zip(case.seq_lens, self.new, strict=True)]
        slots = [table[r, at // self.page].cpu().long() * self.page + at % self.page for r, at in enumerate(places)]
        for request, new in enumerate(self.new):  # the new rows are not written yet
            at = torch.arange(case.seq_lens[request])[new]
            self.cache[:, table[request, at // self.page].long(), at % self.page] = torch.nan
        given = {"block_table": table.cpu(), "slot_mapping": torch.cat(slots)}
        return Batch.from_lengths(case.query_lens, case.seq_lens, device=DEVICE, **given)

    def run(self, metadata):
        case = self.case
        query = torch.cat(case.queries)
        key, value = (torch.cat([rows[new] for rows, new in zip(part, self.new, strict=True)])
                      for part in (case.keys, case.values))  # fmt: skip
        out, lse = torch.full_like(query, CANARY), torch.full(query.shape[:2], CANARY, device=DEVICE)
        cache = self.backend.bind_cache(split_kv(self.cache, "joint", "NHD", 64))
        self.impl.forward(query, key, value, cache, metadata, out.view(len(query), -1), lse=lse)
        return out, lse


@pytest.fixture
def calls(monkeypatch):
    """The names of the kernels that ran."""
    names = []
    run = Kernel.run

    def record(kernel, *given, **options):
        names.append(kernel.function.fn.__name__)
        run(kernel, *given, **options)

    monkeypatch.setattr(Kernel, "run", record)
    return names


def test_mixed_batch(calls):
    step = Step(Requests([1, 1, 20, 33], [50, 1, 70, 33], pattern=PATTERN))

    check(*step.run(step.builder.build(step.batch())), step.case.expected())
    assert "_decode" in calls
    assert "_prefill" in calls


def test_prefills_without_context_read_contiguous_kv(calls):
    step = Step(Requests([1, 40, 7], [60, 40, 7], pattern=PATTERN))
    metadata = step.builder.build(step.batch())

    assert step.impl.wrapped.plan_of(metadata).contiguous_kv
    check(*step.run(metadata), step.case.expected())
    assert "_prefill_tma" not in calls


def test_long_prefills_use_tma_descriptors(monkeypatch, calls):
    monkeypatch.setattr(BlocksparseBuilder, "min_single_launch", 64)
    step = Step(Requests([1, 150, 70], [60, 150, 70], pattern=PATTERN))

    check(*step.run(step.builder.build(step.batch())), step.case.expected())
    assert calls.count("_prefill_tma") == 2
    assert "_prefill" not in calls


def test_long_prefills_use_the_warp_specialized_kernel(monkeypatch, calls):
    monkeypatch.setattr(BlocksparseBuilder, "min_single_launch", 64)
    if INTERPRETED:
        monkeypatch.setattr(BlocksparseBackend, "hopper_tiles", HopperTiles(2, 2))
    step = Step(Requests([1, 150, 270], [60, 150, 270], pattern={**PATTERN, "block_size": 64}))
    is_specialized = step.backend.wrapped.hopper_tiles is not None

    with gluon_emulator.emulated("attnplug_blocksparse.gluon_prefill") if INTERPRETED else nullcontext():
        check(*step.run(step.builder.build(step.batch())), step.case.expected())

    assert calls.count("_warp_specialized_prefill") == (2 if is_specialized else 0)
    assert calls.count("_prefill_tma") == (0 if is_specialized else 2)


def test_long_chunks_use_the_warp_specialized_kernel(monkeypatch, calls):
    monkeypatch.setattr(BlocksparseBuilder, "min_single_launch", 64)
    if INTERPRETED:
        monkeypatch.setattr(BlocksparseBackend, "hopper_tiles", HopperTiles(2, 2))
    is_specialized = Step(Requests([1], [1], pattern=PATTERN)).backend.wrapped.hopper_tiles is not None

    for page, expected in ((64, is_specialized), (PAGE, False)):
        calls.clear()
        step = Step(Requests([1, 150, 130], [60, 350, 130], pattern={**PATTERN, "block_size": 64}), page=page)
        with gluon_emulator.emulated("attnplug_blocksparse.gluon_prefill") if INTERPRETED else nullcontext():
            check(*step.run(step.builder.build(step.batch())), step.case.expected())

        assert calls.count("_warp_specialized_prefill") == (2 if expected else 0)
        assert calls.count("_prefill") == (0 if expected else 1)


def test_fp8_kv_cache_is_read_in_the_first_step():
    step = Step(Requests([40, 7], [40, 7], pattern=PATTERN), kv_cache_dtype="fp8_e4m3")

    assert not step.impl.wrapped.plan_of(step.builder.build(step.batch())).contiguous_kv


def test_few_sequences_are_split(calls):
    step = Step(Requests([1], [400], pattern=PATTERN))
    metadata = step.builder.build(step.batch())

    assert step.impl.wrapped.plan_of(metadata).decode.num_splits > 2
    check(*step.run(metadata), step.case.expected())
    assert calls == ["_decode", "_merge"]


@pytest.mark.parametrize("most", [1, 2])
def test_splits_observe_the_split_kv_limit(calls, most):
    step = Step(Requests([1], [400], pattern=PATTERN), max_num_splits=most)
    metadata = step.builder.build(step.batch())

    assert step.impl.wrapped.plan_of(metadata).decode.num_splits == most
    check(*step.run(metadata), step.case.expected())
    assert calls == ["_decode", "_merge"][:most]


class RecordedOps(TorchDispatchMode):
    """Records the names of the operators that run inside."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_the_first_forward_allocates_no_tables():
    step = Step(Requests([1, 20], [50, 70], pattern=PATTERN))
    metadata = step.builder.build(step.batch())

    with RecordedOps() as ops:
        step.run(metadata)

    assert "full_like" in ops.names  # the output of this test
    assert not ops.names & {"zeros", "lift_fresh", "_to_copy"}


@pytest.mark.parametrize("mode", [{}, {"homo_head_group": True}], ids=["per head", "per group"])
def test_one_rank_of_two(mode):
    pattern = {**PATTERN, "vert_stride": 16, **mode}
    whole = Requests([1, 60], [90, 60], pattern=pattern, kv_heads=4)
    output, sums = whole.expected()
    own = Requests([1, 60], [90, 60], pattern=pattern)
    for name, heads in (("queries", slice(4, 8)), ("keys", slice(2, 4)), ("values", slice(2, 4))):
        own.put(name, [rows[:, heads].contiguous() for rows in getattr(whole, name)])
    step = Step(own, Parallel(tp_rank=1, tp_size=2))

    check(*step.run(step.builder.build(step.batch())), (output[:, 4:], sums[:, 4:]))


def test_chunked_prefill_matches_one_prefill():
    whole = Requests([100], [100], pattern=PATTERN)
    output, sums = whole.expected()
    for first, last in ((0, 37), (37, 38), (38, 100)):
        part = Requests([last - first], [last], pattern=PATTERN)
        for name in ("keys", "values"):
            part.put(name, [getattr(whole, name)[0][:last]])
        part.put("queries", [whole.queries[0][first:last]])
        step = Step(part)

        check(*step.run(step.builder.build(step.batch())), (output[first:last], sums[first:last]))


def test_non_paged_call():
    backend = load(paged=False)
    impl = backend.make_impl(Layer(name="layer"))
    case = Requests([40, 9], [40, 70], pattern=PATTERN)
    limits = Limits(max_num_reqs=2, max_num_tokens=64, max_seq_len=128)
    metadata = backend.make_builder([impl], backend.make_state(limits)).build(
        Batch.from_lengths([40, 9], [40, 70], device=DEVICE)
    )
    query = torch.cat(case.queries)
    out, lse = torch.full_like(query, CANARY), torch.full(query.shape[:2], CANARY, device=DEVICE)

    keys, values = torch.cat(case.keys), torch.cat(case.values)
    impl.forward(query, keys, values, None, metadata, out.view(49, -1), lse=lse)

    check(out, lse, case.expected())


@pytest.mark.parametrize("ranks", [{}, {"homo_head_group": True, "total_kv_heads": 6}], ids=["1 rank", "1 of 3"])
def test_warmup_runs_every_kernel(monkeypatch, calls, ranks):
    monkeypatch.setattr(BlocksparseBuilder, "min_single_launch", 64)
    backend = load({**PATTERN, **ranks})

    backend.warmup([GraphShape(1, 1, 1)])

    assert set(calls) == {"_decode", "_merge", "_prefill"} | ({"_prefill_tma"} if backend.wrapped.has_tma else set())


def test_warmup_observes_max_seqlen(calls):
    load({**PATTERN, "max_seqlen": 2}).warmup([GraphShape(1, 1, 1)])

    assert set(calls) == {"_decode", "_prefill"}


def test_limits_beyond_the_pattern_are_refused():
    backend = load()

    backend.make_state(Limits(max_num_reqs=1, max_num_tokens=64, max_seq_len=2048))
    with pytest.raises(LimitsError, match=r"the pattern covers 2048 tokens \(max_seqlen\)"):
        backend.make_state(Limits(max_num_reqs=1, max_num_tokens=64, max_seq_len=2049))


def test_a_shared_state_does_not_extend_a_pattern():
    longer, own = load(), load({**PATTERN, "max_seqlen": 1024})
    state = longer.make_state(Limits(max_num_reqs=1, max_num_tokens=64, max_seq_len=2048))

    with pytest.raises(LimitsError, match=r"the pattern covers 1024 tokens \(max_seqlen\)"):
        own.make_builder([own.make_impl(Layer(name="layer"))], state)


def test_ranks_without_all_kv_heads_are_refused():
    backend = load({**PATTERN, "total_kv_heads": 4})
    limits = Limits(max_num_reqs=1, max_num_tokens=64, max_seq_len=64)

    backend.make_state(limits, Parallel(tp_rank=1, tp_size=2))
    with pytest.raises(
        LimitsError, match=r"tp_size=1 is invalid[\s\S]*total_kv_heads=4[\s\S]*pass the ranks in Parallel"
    ):
        backend.make_state(limits)


def test_an_incomplete_pattern_is_refused_with_the_layer():
    backend = load({"max_seqlen": 2048, "block_size": 16, "local_blocks": 2})

    with pytest.raises(LayerError, match="vert_stride is an integer of at least 1"):
        backend.make_impl(Layer(name="layer"))
