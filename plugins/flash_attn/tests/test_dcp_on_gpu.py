"""Decode context parallelism over two GPUs, which exchange through NCCL, on each kernel library that serves them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch

from attnplug_kit.oracle import assert_close
from plugins.flash_attn.tests import dcp_steps
from plugins.flash_attn.tests.real import DCP, FLASH_ATTN, GRAPHS_OF_ALL_STEPS, SINKS, SOFT_CAP
from tests.backends.dcp_steps import DcpStep, StepTensors, expected, heads_of
from tests.backends.rank_groups import ProcessGroup

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.gpu

MIXED = {
    "ranks": 2,
    "new": (1, 1, 1, 40),
    "cached": (700, 3, 0, 130),
    "head_size": 128,
    "dtype": "bfloat16",
    "group": 4,
}
"""Decodes and a prefill: long, shorter than a run of 16, with nothing cached, and in the middle of its prompt."""


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessGroup]:
    """Two processes with a GPU each."""
    if torch.cuda.device_count() < 2:
        pytest.skip(f"two GPUs are needed, and {torch.cuda.device_count()} is here")
    started = ProcessGroup(2, "nccl", limit=400.0)
    yield started
    started.close()


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize("variant", DCP)
def test_two_gpus_are_as_one(variant, interleave, processes):
    has_sinks, has_cap = variant in SINKS, variant in SOFT_CAP
    step = DcpStep(interleave=interleave, sinks=has_sinks, cap=None if has_sinks or not has_cap else 5.0, **MIXED)
    check(processes, variant, step)


@pytest.mark.parametrize("variant", DCP)
def test_two_gpus_fill_empty_caches(variant, processes):
    check(processes, variant, DcpStep(interleave=16, **MIXED | {"new": (20, 40), "cached": (0, 0)}))


@pytest.mark.parametrize("variant", GRAPHS_OF_ALL_STEPS)
def test_a_graph_has_the_exchange_inside(variant, processes):
    check(processes, variant, DcpStep(interleave=16, padding=3, **MIXED), replayed=True)


def check(processes: ProcessGroup, variant: str, step: DcpStep, *, replayed: bool = False) -> None:
    FLASH_ATTN.skip_if_missing(variant)
    output, lse = expected(step)
    largest = max(float(rows.abs().max()) for rows in StepTensors(step).values)
    for rank, found in enumerate(processes.call(partial(dcp_steps.run_real, replayed=replayed), step, variant)):
        heads = heads_of(step, rank)
        assert_close(found.output, output[:, heads], dtype=found.output.dtype, scale=largest)
        assert_close(found.lse, lse[:, heads], dtype=found.output.dtype, what="lse")
        assert not found.strays
