"""The group of ranks is checked before the first exchange, and moves what it is given."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from attnplug.contract import Parallel
from attnplug.errors import LimitsError
from attnplug.ops import ranks as collectives
from attnplug.ops.ranks import Ranks
from tests.backends.triton_on_cpu import NEEDS_TRITON, compile_kernel, run_interpreted

if TYPE_CHECKING:
    from collections.abc import Iterator

CPU = torch.device("cpu")


@pytest.fixture
def group() -> Iterator[Any]:
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_there_has_to_be_a_group():
    with pytest.raises(LimitsError, match=r"(?s)dcp_group=None .* dcp_size=2.*process group.*new_group"):
        Ranks(Parallel(dcp_size=2), CPU)


def test_a_group_of_another_size_is_refused(group):
    with pytest.raises(LimitsError, match=r"(?s)dcp_size=2 and dcp_rank=1 were given.*1 ranks.*its rank 0"):
        Ranks(Parallel(dcp_size=2, dcp_rank=1, dcp_group=group), CPU)


def test_a_cpu_process_group_is_refused_for_a_gpu(group):
    with pytest.raises(LimitsError, match=r"(?s)for a cuda device.*gloo copies tensors to the CPU"):
        Ranks(Parallel(dcp_group=group), torch.device("cuda"))


def test_a_group_without_the_device_is_refused(group):
    with pytest.raises(LimitsError, match="it has no backend for xpu"):
        Ranks(Parallel(dcp_group=group), torch.device("xpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_tensors_of_any_dtype_are_gathered(group, dtype):
    ranks = Ranks(Parallel(dcp_group=group), CPU)
    tensor = torch.randn(6, 4).to(dtype)[:, ::2]  # not contiguous
    (found,) = ranks.all_gather(tensor)
    assert found.dtype == dtype
    assert torch.equal(found.float(), tensor.float())


@pytest.mark.parametrize("reduces", [False, True])
@pytest.mark.parametrize("in_order", [False, True])
def test_parts_are_added_up(group, reduces, in_order):
    ranks = Ranks(Parallel(dcp_group=group), CPU)
    ranks._reduces = reduces  # the gloo of this torch can, too
    parts = torch.randn(1, 3, 2)
    assert torch.equal(ranks.reduce_scatter(parts, in_order=in_order), parts[0])


def test_functions_have_their_names_of_earlier_releases(monkeypatch):
    monkeypatch.setattr(dist, "of_today", max, raising=False)
    assert collectives._call("of_today", "barrier") is max
    assert collectives._call("of_tomorrow", "barrier") is dist.barrier


@pytest.mark.slow
def test_the_kernel_interpreted() -> None:
    run_interpreted(Path(__file__).with_name("test_weigh_on_gpu.py"))


@NEEDS_TRITON
@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_kernel_compiles(dtype: str, capability: int) -> None:
    from attnplug.ops.triton_ranks import _weigh  # noqa: PLC0415 - needs Triton

    kinds = {"out": f"*{dtype}", "lses": "*fp32", "parts": f"*{dtype}", "total": "*fp32"}
    sizes = {"rank": 1, "ranks": 2, "kv_heads": 1, "group": 16, "size": 128, "tile": 8, "width": 128}

    code = compile_kernel(_weigh, kinds, sizes, unaligned=("tokens",), capability=capability, num_warps=4).asm["ptx"]

    assert "ld.global.v4" in code  # 16 bytes at a time
    assert "st.global.v4" in code
