"""Decode context parallelism on real processes gives the results of one rank, and the tests find mistakes."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from attrs import evolve
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

from attnplug.contract import Layer
from attnplug.ops import Ranks, ranks
from attnplug_flash_attn import builder, dcp, impl
from attnplug_flash_attn.kernels.interface import Kernels, write_lse
from plugins.flash_attn.tests import dcp_steps
from plugins.flash_attn.tests.dcp_mutants import MUTANTS
from plugins.flash_attn.tests.launches import Launches
from plugins.flash_attn.tests.real import DCP, SINKS
from tests.backends.dcp_steps import (
    DcpStep,
    RankPages,
    Result,
    StepTensors,
    assert_results,
    captured,
    expected,
    limits_of,
    parallel_of,
)
from tests.backends.rank_groups import ProcessGroup, ThreadGroup, ThreadRanks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PHASES = [Phase.explicit, Phase.reuse, Phase.generate]  # without shrinking: ranks that hang cost their time-out each

_running: list[ProcessGroup] = []


@pytest.fixture(scope="module")
def processes() -> Iterator[list[ProcessGroup]]:
    """Four processes, started when a test first needs them, and anew after one has failed."""
    yield _running
    while _running:
        _running.pop().close()


def on_ranks(step: DcpStep, mutant: str | None = None, *, replayed: bool = False) -> list[Result]:
    return call(partial(dcp_steps.run, replayed=replayed), step, mutant)


def call(function: Callable[..., Result], step: DcpStep, *arguments: Any) -> list[Result]:
    if not (_running and _running[-1].live):
        _running.append(ProcessGroup(4))
    return _running[-1].call(function, step, *arguments, size=step.ranks)


def assert_as_one_rank(step: DcpStep, results: list[Result], *, replayed: bool = False) -> None:
    """Output and LSE are the oracle's and those of one rank; each new token is in its holder's KV cache only."""
    alone = dcp_steps.run(0, None, step.alone())
    known = [(alone.output.double(), alone.lse.double())]
    known += [] if step.is_narrow else [expected(step)]  # other tests cover rounded queries and keys
    assert_results(step, results, known, replayed=replayed)


@st.composite
def random_steps(draw: st.DrawFn, ranks: int) -> DcpStep:
    """Steps of few requests: decodes and prefills, some shorter than a run of tokens, some with nothing cached."""
    interleave = draw(st.sampled_from([1, 2, 3, 5, 16, 32]))
    cached = st.sampled_from([0, 1, interleave, 3 * interleave - 1, 2 * ranks * interleave]) | st.integers(0, 70)
    decodes = draw(st.lists(cached, max_size=3))
    prefills = draw(st.lists(st.tuples(st.integers(2, 9), cached), min_size=not decodes, max_size=2))
    return DcpStep(
        ranks=ranks,
        interleave=interleave,
        new=(*[1] * len(decodes), *[new for new, _ in prefills]),
        cached=(*decodes, *[before for _, before in prefills]),
        kv_heads=draw(st.sampled_from([1, 2])),
        group=draw(st.sampled_from([1, 3])),
        sinks=draw(st.booleans()),
        cap=draw(st.sampled_from([None, 2.0])),
        seq_lens_cpu_kind=draw(st.sampled_from(["exact", "exact", "upper_bound", "absent"])),
        host_writes=draw(st.booleans()),
        batch_invariant=draw(st.booleans()),
        return_lse=draw(st.sampled_from([True, True, False])),
        kernel_kind=draw(st.sampled_from(["pages", "cumulative", "packed", "padded"])),
        layout=draw(st.sampled_from(["NHD", "HND"])),
        seed=draw(st.integers(0, 99)),
        padding=draw(st.sampled_from([0, 2])),
        max_packed_keys=draw(st.sampled_from([None, 1, 40])),
    )


@pytest.fixture(scope="module")
def threads() -> Iterator[None]:
    """Ranks exchange through a `ThreadGroup`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "Ranks", ThreadRanks)
        yield


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("ranks", [2, 4])
@settings(max_examples=15, phases=PHASES)
@given(st.data())
def test_threads_match_one_rank(ranks, data):
    step = evolve(data.draw(random_steps(ranks)), max_packed_keys=None)  # it is a patch of the process
    assert_as_one_rank(step, ThreadGroup(ranks).call(dcp_steps.run, step))


@pytest.mark.slow
@pytest.mark.usefixtures("processes")
class TestOnProcesses:
    @settings(max_examples=80, phases=PHASES)
    @given(random_steps(2))
    @example(DcpStep(ranks=2, interleave=16, new=(1, 1), cached=(3, 15)))  # rank 1 holds nothing
    @example(DcpStep(ranks=2, interleave=4, new=(7,), cached=(0,)))  # nothing is cached
    @example(DcpStep(ranks=2, interleave=4, new=(1, 7), cached=(18, 2), return_lse=False))
    @example(DcpStep(ranks=2, interleave=4, new=(1, 6), cached=(9, 0), kernel_kind="packed"))
    @example(
        DcpStep(
            ranks=2,
            interleave=4,
            new=(1, 1, 1, 6),
            cached=(65, 60, 64, 70),
            kernel_kind="packed",
            max_packed_keys=1,
            sinks=True,
        )
    )
    def test_two_ranks_are_as_one(self, step):
        assert_as_one_rank(step, on_ranks(step))

    @settings(max_examples=50, phases=PHASES)
    @given(random_steps(4))
    @example(DcpStep(ranks=4, interleave=32, new=(1, 4), cached=(20, 0), sinks=True))  # ranks 1 to 3 hold nothing
    @example(
        DcpStep(
            ranks=4, interleave=1, new=(1, 1, 3), cached=(2, 0, 5), seq_lens_cpu_kind="absent", kernel_kind="packed"
        )
    )
    def test_four_ranks_are_as_one(self, step):
        assert_as_one_rank(step, on_ranks(step))

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    def test_ranks_are_as_one_in_half_precision(self, dtype):
        step = DcpStep(ranks=2, interleave=4, new=(1, 5), cached=(61, 30), dtype=dtype, sinks=True)
        assert_as_one_rank(step, on_ranks(step))

    @pytest.mark.parametrize("kernel_kind", ["pages", "packed"])
    def test_ranks_are_as_one_over_an_fp8_kv_cache(self, kernel_kind):
        step = DcpStep(
            ranks=2,
            interleave=4,
            new=(1, 5),
            cached=(61, 30),
            dtype="bfloat16",
            kv_cache_dtype="fp8_e4m3",
            kernel_kind=kernel_kind,
        )
        assert_as_one_rank(step, on_ranks(step))

    @pytest.mark.parametrize("ranks", [2, 4])
    def test_batch_invariance_keeps_every_bit(self, ranks):
        by_itself = DcpStep(ranks=ranks, interleave=2, new=(1,), cached=(37,), batch_invariant=True, sinks=True)
        beside = evolve(by_itself, new=(1, 1, 6), cached=(37, 90, 0))
        for alone, among in zip(on_ranks(by_itself), on_ranks(beside), strict=True):
            assert torch.equal(alone.output, among.output[:1])
            assert torch.equal(alone.lse, among.lse[:1])

    @pytest.mark.usefixtures("fakes")
    @pytest.mark.parametrize("ranks", [2, 4])
    @pytest.mark.parametrize("variant", DCP)
    def test_the_libraries_take_the_calls(self, variant, ranks):
        fields = {
            "new": (1, 1, 1, 9),
            "cached": (70, 3, 0, 20),
            "dtype": "bfloat16",
            "head_size": 16,
            "sinks": variant in SINKS,
        }
        step = DcpStep(ranks=ranks, interleave=4, **fields)
        assert_as_one_rank(step, call(dcp_steps.run_fake, step, variant))

    @pytest.mark.parametrize("ranks", [2, 4])
    @pytest.mark.parametrize("cached", [(40, 3, 7), (0, 0, 0), (2, 0, 1)])
    @pytest.mark.parametrize("kernel_kind", ["pages", "cumulative", "padded", "tiles"])
    def test_a_replay_is_as_one_rank(self, ranks, cached, kernel_kind):
        step = DcpStep(
            ranks=ranks, interleave=4, new=(1, 1, 3), cached=cached, kernel_kind=kernel_kind, sinks=True, padding=2
        )
        assert_as_one_rank(step, on_ranks(step, replayed=True), replayed=True)

    @pytest.mark.parametrize("mutant", MUTANTS)
    @pytest.mark.parametrize("ranks", [2, 4])
    def test_a_mutant_is_detected(self, mutant, ranks):
        step = DcpStep(ranks=ranks, interleave=3, new=(1, 1, 4), cached=(33, 4, 25), sinks=True)
        assert_as_one_rank(step, on_ranks(step))
        wrong = on_ranks(step, mutant)
        with pytest.raises(AssertionError):
            assert_as_one_rank(step, wrong)


@pytest.fixture
def fake_group() -> Iterator[Any]:
    """A group of two ranks, of which this process is one, and whose exchanges move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("is_replayed", [False, True])
@pytest.mark.parametrize("return_lse", [False, True])
def test_a_layer_launches_little(fake_group, monkeypatch, is_replayed, return_lse):
    launches = Launches()

    class Hollow(Kernels):
        fills_output = True

        def attend(self, query, key, value, out, call, params, lse):
            launches.found["attend"] += 1
            write_lse(lse, torch.empty(lse.T.shape))

    monkeypatch.setattr(builder, "Ranks", Ranks)  # which threads of other tests replace
    for module, name in ((dcp, "merge_into"), (ranks, "weigh"), (impl, "write_kv")):  # one launch each on a GPU
        monkeypatch.setattr(module, name, launches.one(name))
    step = DcpStep(ranks=2, interleave=4, new=(1, 1), cached=(9, 14), group=4, return_lse=return_lse, padding=1)
    backend = dcp_steps.backend_of(step, replayed=is_replayed)
    backend.wrapped.kernels = Hollow(backend.agreement)
    attn, pages = backend.make_impl(Layer(name="layer")), RankPages(step, 0)
    state = backend.make_state(limits_of(step, pages), parallel_of(step, 0, fake_group))
    prepared = backend.make_builder([attn], state)
    cache = pages.fill(backend, StepTensors(step), state.device)
    query, new = (torch.zeros(3, heads, step.head_size) for heads in (step.q_heads, step.kv_heads))
    output, lse = torch.empty(query.shape).flatten(1), torch.empty(query.shape[:2]) if return_lse else None

    def forward(metadata: Any) -> None:
        with launches:
            attn.forward(query, new, new, cache, metadata, output, lse=lse)

    if is_replayed:
        captured(prepared, step, forward)
    else:
        forward(prepared.build(pages.batch(state.device)))

    assert launches.found == {
        "write_kv": 1,
        **({"masked_fill": 1} if is_replayed else {}),  # the values of padding, which kernels multiply by 0
        "_allgather_base_": 2,  # queries and LSEs
        "clone": 1,  # the queries of all ranks, by KV head
        "attend": 2,
        "nan_to_num": 2,  # the LSE of each
        "weigh": 1,
        "_reduce_scatter_base_": 1,
        "merge_into": 1,
    }
