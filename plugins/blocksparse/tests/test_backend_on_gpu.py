"""The backend as hosts see it: which kernel runs on what, ranks, limits, and what is refused when a layer is made."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import attnplug
from attnplug import Device, Requirements
from attnplug.contract import Batch, GraphShape, Layer, Limits, Parallel
from attnplug.errors import LayerError, LimitsError
from attnplug.ops import Kernel
from attnplug_blocksparse.backend import BlocksparseBackend
from attnplug_blocksparse.builder import BlocksparseBuilder
from attnplug_blocksparse.tiles import HopperTiles
from plugins.blocksparse.tests.dense import CANARY, Requests, check
from tests.backends import gluon_emulator
from tests.backends.triton_on_cpu import DEVICE, INTERPRETED, MARKS

pytestmark = [*MARKS, pytest.mark.usefixtures("offered")]

PATTERN = {"max_seqlen": 2048, "block_size": 16, "local_blocks": 2, "vert_stride": 4}
PAGE = 32


def load(pattern=PATTERN, **asked):
    terms = {"paged": True, "block_size": PAGE, "kv_layout": "NHD", "return_lse": True, **asked}
    if not terms["paged"]:
        terms = {"paged": False, "return_lse": True}
    requirements = Requirements(
        head_size=64, num_q_heads=4, num_kv_heads=2, dtype="bfloat16", block_sparse=pattern, **terms
    )
    return attnplug.load(requirements, Device.cpu() if INTERPRETED else None, backend="blocksparse")


class Step:
    """A backend with one layer, and requests whose context is in its cache."""

    def __init__(self, case, parallel=None, max_num_splits=None, page=PAGE, **asked):
        self.case, self.page, self.backend = case, page, load(case.pattern, block_size=page, **asked)
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
        for request, new in enumerate(self.new):  # what comes with the call is not there yet
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
        self.impl.forward(query, key, value, self.cache, metadata, out.view(len(query), -1), lse=lse)
        return out, lse


@pytest.fixture
def calls(monkeypatch):
    """The kernels that ran, by name."""
    made = []
    run = Kernel.run

    def noted(kernel, *given, **options):
        made.append(kernel.function.fn.__name__)
        run(kernel, *given, **options)

    monkeypatch.setattr(Kernel, "run", noted)
    return made


def test_decodes_and_chunks_in_one_batch(calls):
    step = Step(Requests(PATTERN, [1, 1, 20, 33], [50, 1, 70, 33]))

    check(*step.run(step.builder.build(step.batch())), step.case.expected())
    assert "_decode" in calls
    assert "_prefill" in calls


def test_prompts_in_one_piece_read_the_rows_that_come_with_the_call(monkeypatch, calls):
    step = Step(Requests(PATTERN, [1, 40, 7], [60, 40, 7]))
    metadata = step.builder.build(step.batch())

    assert step.impl.plan_of(metadata).reads_rows
    check(*step.run(metadata), step.case.expected())
    assert "_prompt" not in calls


def test_long_prompts_are_loaded_by_descriptors_one_after_another(monkeypatch, calls):
    monkeypatch.setattr(BlocksparseBuilder, "worth_a_launch", 64)
    step = Step(Requests(PATTERN, [1, 150, 70], [60, 150, 70]))

    check(*step.run(step.builder.build(step.batch())), step.case.expected())
    assert calls.count("_prompt") == 2
    assert "_prefill" not in calls


def test_long_prompts_are_computed_by_roles_where_the_gpu_has_warpgroups(monkeypatch, calls):
    monkeypatch.setattr(BlocksparseBuilder, "worth_a_launch", 64)
    if INTERPRETED:
        monkeypatch.setattr(BlocksparseBackend, "hopper_tiles", HopperTiles(2, 2))
    step = Step(Requests({**PATTERN, "block_size": 64}, [1, 150, 270], [60, 150, 270]))
    has_roles = step.backend.hopper_tiles is not None

    with gluon_emulator.emulated("attnplug_blocksparse.gluon_prompt") if INTERPRETED else nullcontext():
        check(*step.run(step.builder.build(step.batch())), step.case.expected())

    assert calls.count("_prompt_by_roles") == (2 if has_roles else 0)
    assert calls.count("_prompt") == (0 if has_roles else 2)


def test_long_chunks_are_computed_by_roles_where_pages_are_tiles(monkeypatch, calls):
    monkeypatch.setattr(BlocksparseBuilder, "worth_a_launch", 64)
    if INTERPRETED:
        monkeypatch.setattr(BlocksparseBackend, "hopper_tiles", HopperTiles(2, 2))
    has_roles = Step(Requests(PATTERN, [1], [1])).backend.hopper_tiles is not None

    for page, by_roles in ((64, has_roles), (PAGE, False)):
        calls.clear()
        step = Step(Requests({**PATTERN, "block_size": 64}, [1, 150, 130], [60, 350, 130]), page=page)
        with gluon_emulator.emulated("attnplug_blocksparse.gluon_prompt") if INTERPRETED else nullcontext():
            check(*step.run(step.builder.build(step.batch())), step.case.expected())

        assert calls.count("_prompt_by_roles") == (2 if by_roles else 0)
        assert calls.count("_prefill") == (0 if by_roles else 1)


def test_an_8_bit_cache_is_read_in_the_first_step_too(calls):
    step = Step(Requests(PATTERN, [40, 7], [40, 7]), kv_cache_dtype="fp8_e4m3")

    assert not step.impl.plan_of(step.builder.build(step.batch())).reads_rows


def test_a_sequence_is_split_where_there_are_few(calls):
    step = Step(Requests(PATTERN, [1], [400]))
    metadata = step.builder.build(step.batch())

    assert step.impl.plan_of(metadata).tokens.num_splits > 2
    check(*step.run(metadata), step.case.expected())
    assert calls == ["_decode", "_merge"]


@pytest.mark.parametrize("most", [1, 2])
def test_a_sequence_is_split_into_no_more_parts_than_the_host_allows(calls, most):
    step = Step(Requests(PATTERN, [1], [400]), max_num_splits=most)
    metadata = step.builder.build(step.batch())

    assert step.impl.plan_of(metadata).tokens.num_splits == most
    check(*step.run(metadata), step.case.expected())
    assert calls == ["_decode", "_merge"][:most]


class Made(TorchDispatchMode):
    """The names of what was computed inside."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(function.overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def test_the_first_forward_makes_no_tables_which_a_capture_would_forbid():
    step = Step(Requests(PATTERN, [1, 20], [50, 70]))
    metadata = step.builder.build(step.batch())

    with Made() as made:
        step.run(metadata)

    assert "full_like" in made.names  # the output, of this test
    assert not made.names & {"zeros", "lift_fresh", "_to_copy"}


@pytest.mark.parametrize("mode", [{}, {"homo_head_group": True}], ids=["per head", "per group"])
def test_a_rank_has_its_own_heads(mode):
    pattern = {**PATTERN, "vert_stride": 16, **mode}
    whole = Requests(pattern, [1, 60], [90, 60], kv_heads=4)
    output, sums = whole.expected()
    own = Requests(pattern, [1, 60], [90, 60])
    for name, heads in (("queries", slice(4, 8)), ("keys", slice(2, 4)), ("values", slice(2, 4))):
        object.__setattr__(own, name, [rows[:, heads].contiguous() for rows in getattr(whole, name)])
    step = Step(own, Parallel(tp_rank=1, tp_size=2))

    check(*step.run(step.builder.build(step.batch())), (output[:, 4:], sums[:, 4:]))


def test_a_prompt_in_chunks_is_the_prompt_in_one_piece():
    whole = Requests(PATTERN, [100], [100])
    output, sums = whole.expected()
    for first, last in ((0, 37), (37, 38), (38, 100)):
        part = Requests(PATTERN, [last - first], [last])
        for name in ("keys", "values"):
            object.__setattr__(part, name, [getattr(whole, name)[0][:last]])
        object.__setattr__(part, "queries", [whole.queries[0][first:last]])
        step = Step(part)

        check(*step.run(step.builder.build(step.batch())), (output[first:last], sums[first:last]))


def test_all_keys_may_come_with_the_call():
    backend = load(paged=False)
    impl = backend.make_impl(Layer(name="layer"))
    case = Requests(PATTERN, [40, 9], [40, 70])
    limits = Limits(max_num_reqs=2, max_num_tokens=64, max_seq_len=128)
    metadata = backend.make_builder([impl], backend.make_state(limits)).build(
        Batch.from_lengths([40, 9], [40, 70], device=DEVICE)
    )
    query = torch.cat(case.queries)
    out, lse = torch.full_like(query, CANARY), torch.full(query.shape[:2], CANARY, device=DEVICE)

    keys, values = torch.cat(case.keys), torch.cat(case.values)
    impl.forward(query, keys, values, None, metadata, out.view(49, -1), lse=lse)

    check(out, lse, case.expected())


@pytest.mark.parametrize("ranks", [{}, {"homo_head_group": True, "total_kv_heads": 6}], ids=["one rank", "of three"])
def test_a_warm_up_runs_every_kernel(monkeypatch, calls, ranks):
    monkeypatch.setattr(BlocksparseBuilder, "worth_a_launch", 64)
    backend = load({**PATTERN, **ranks})

    backend.warmup([GraphShape(1, 1, 1)])

    assert set(calls) == {"_decode", "_merge", "_prefill"} | ({"_prompt"} if backend.has_descriptors else set())


def test_a_warm_up_keeps_to_what_the_pattern_covers(calls):
    load({**PATTERN, "max_seqlen": 2}).warmup([GraphShape(1, 1, 1)])

    assert set(calls) == {"_decode", "_prefill"}


def test_sequences_beyond_the_pattern_are_refused():
    backend = load()

    backend.make_state(Limits(max_num_reqs=1, max_num_tokens=64, max_seq_len=2048))
    with pytest.raises(LimitsError, match=r"the pattern covers 2048 tokens \(max_seqlen\)"):
        backend.make_state(Limits(max_num_reqs=1, max_num_tokens=64, max_seq_len=2049))


def test_a_state_of_another_pattern_does_not_extend_this_one():
    longer, own = load(), load({**PATTERN, "max_seqlen": 1024})
    state = longer.make_state(Limits(max_num_reqs=1, max_num_tokens=64, max_seq_len=2048))

    with pytest.raises(LimitsError, match=r"the pattern covers 1024 tokens \(max_seqlen\)"):
        own.make_builder([own.make_impl(Layer(name="layer"))], state)


def test_ranks_that_do_not_hold_the_heads_of_the_model_are_refused():
    backend = load({**PATTERN, "total_kv_heads": 4})
    limits = Limits(max_num_reqs=1, max_num_tokens=64, max_seq_len=64)

    backend.make_state(limits, Parallel(tp_rank=1, tp_size=2))
    with pytest.raises(
        LimitsError, match=r"tp_size=1 was given[\s\S]*total_kv_heads=4[\s\S]*pass the ranks in Parallel"
    ):
        backend.make_state(limits)


def test_a_pattern_that_lacks_a_parameter_is_refused_where_a_layer_is_made():
    backend = load({"max_seqlen": 2048, "block_size": 16, "local_blocks": 2})

    with pytest.raises(LayerError, match="vert_stride is a whole number of at least 1"):
        backend.make_impl(Layer(name="layer"))
