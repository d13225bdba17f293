"""Decode context parallelism, beside attention in float64: ranks are threads of one GPU, or of the interpreter."""

from __future__ import annotations

from functools import partial
from threading import Lock

import pytest
import torch
from attrs import evolve

import attnplug
from attnplug import Device
from attnplug.ops import Kernel
from attnplug_triton import builder, impl
from attnplug_triton.builder import TritonBuilder
from tests.backends.dcp_steps import DcpStep, assert_results, expected, requirements_of, run_on
from tests.backends.rank_groups import ProcessGroup, ThreadGroup, ThreadRanks
from tests.backends.triton_on_cpu import INTERPRETED, MARKS

pytestmark = [*MARKS, pytest.mark.usefixtures("registered")]

STEP = DcpStep(
    ranks=2, interleave=4, new=(1, 1, 1, 24), cached=(90, 3, 0, 50), dtype="float16", head_size=16, sinks=True
)
"""Decodes and a prefill: long, shorter than a run of 4 tokens, with nothing cached, and in the middle of its prompt."""


def run(rank, group, step, *, replayed=False, backend=None):
    """Run a step on one rank."""
    if backend is None:
        backend = load(step, replayed=replayed)
    return run_on(backend, rank, group, step, replayed=replayed)


def load(step, *, replayed=False):
    fields = evolve(requirements_of(step), cudagraph="always" if replayed else "never")
    return attnplug.load(fields, Device.cpu() if INTERPRETED else None, backend="triton")


@pytest.fixture
def threads(monkeypatch):
    """Ranks are threads, of which one launches at a time: Triton's interpreter patches modules."""
    launch, lock = Kernel.run, Lock()

    def run_alone(*given, **options):
        with lock:
            launch(*given, **options)

    monkeypatch.setattr(Kernel, "run", run_alone)
    monkeypatch.setattr(builder, "Ranks", ThreadRanks)


def on_threads(step, *, replayed=False):
    backend = load(step, replayed=replayed)
    return ThreadGroup(step.ranks).call(partial(run, backend=backend, replayed=replayed), step)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    "step",
    [
        pytest.param(STEP, id="mixed"),
        pytest.param(evolve(STEP, ranks=4, interleave=1, return_lse=False), id="four ranks"),
        pytest.param(evolve(STEP, interleave=16, new=(1, 1), cached=(3, 15)), id="a rank holds nothing"),
        pytest.param(evolve(STEP, new=(20, 3), cached=(0, 0), padding=2), id="nothing is cached"),
        *(
            pytest.param(
                evolve(STEP, interleave=64, new=(24, 1), cached=(0, 5), block_size=64, seq_lens_cpu_kind=kind),
                id=f"descriptors and a rank without keys, {kind}",
            )
            for kind in ("exact", "upper_bound")
        ),
        pytest.param(evolve(STEP, new=(1, 70), cached=(300, 200), block_size=64), id="descriptors"),
        pytest.param(evolve(STEP, window=20, interleave=3, sinks=False), id="window"),
        pytest.param(evolve(STEP, window=3, interleave=16), id="a window on one rank"),
        pytest.param(evolve(STEP, chunk=32, interleave=5, seq_lens_cpu_kind="absent"), id="chunk"),
        pytest.param(evolve(STEP, cap=3.0, sinks=False, seq_lens_cpu_kind="upper_bound"), id="soft cap"),
        pytest.param(evolve(STEP, causal=False), id="not causal"),
        pytest.param(evolve(STEP, host_writes=True, layout="HND", batch_invariant=True), id="the host writes"),
        pytest.param(evolve(STEP, group=40, kv_heads=1, new=(1, 2), cached=(70, 9)), id="rows of several tiles"),
        pytest.param(evolve(STEP, new=(1,), cached=(1500,), block_size=64), id="splits"),
    ],
)
def test_ranks_are_as_one(step):
    assert_results(step, on_threads(step), [expected(step)])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("cache", ["fp8_e5m2", "fp8_per_token_head"])
def test_ranks_are_as_one_over_a_quantized_kv_cache(cache):
    step = evolve(STEP, dtype="bfloat16", kv_cache_dtype=cache)
    alone = run(0, None, step.alone())

    assert_results(step, on_threads(step), [(alone.output.double(), alone.lse.double())])


@pytest.mark.usefixtures("threads")
def test_a_replay_is_as_one_rank():
    if not INTERPRETED:
        pytest.skip("threads cannot exchange inside a CUDA graph; processes do below")
    step = evolve(STEP, padding=2)

    assert_results(step, on_threads(step, replayed=True), [expected(step)], replayed=True)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("mistake", ["another rank's keys", "runs of one token", "weights of 1", "a sink of each rank"])
def test_a_mistake_is_found(mistake, monkeypatch):
    made = TritonBuilder.__init__

    def changed(self, *given):
        made(self, *given)
        rank, ranks, interleave = self._shard
        if mistake == "another rank's keys":
            self._shard = (rank + 1) % ranks, ranks, interleave
        elif mistake == "runs of one token":
            self._shard = rank, ranks, 1

    def unscaled(out, lse, *given, **options):
        return combine(out, lse * 0, *given, **options)

    combine, merged = impl.combine, impl.TritonImpl.parameters_changed

    def counted_twice(self):
        merged(self)
        self._sinks = self._sinks + 0.7  # log 2

    monkeypatch.setattr(TritonBuilder, "__init__", changed)
    if mistake == "weights of 1":
        monkeypatch.setattr(impl, "combine", unscaled)
    if mistake == "a sink of each rank":
        monkeypatch.setattr(impl.TritonImpl, "parameters_changed", counted_twice)

    step = evolve(STEP, new=(1, 20), cached=(61, 7))  # ranks do not hold equally many keys
    results = on_threads(step)

    with pytest.raises(AssertionError):
        assert_results(step, results, [expected(step)])


@pytest.mark.parametrize("replayed", [False, True])
def test_two_gpus_are_as_one(replayed):
    if INTERPRETED or torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are needed")
    step = evolve(STEP, interleave=16, head_size=128, group=4, dtype="bfloat16", cached=(700, 3, 0, 130))
    group = ProcessGroup(2, "nccl", limit=400.0)
    try:
        results = group.call(partial(run, replayed=replayed), step)
    finally:
        group.close()

    assert_results(step, results, [expected(step)], replayed=replayed)
