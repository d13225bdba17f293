"""The group of ranks is checked before the first exchange, and moves what it is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist

from attnplug.contract import Parallel
from attnplug.errors import LimitsError
from attnplug_flash_attn import collectives
from attnplug_flash_attn.collectives import Ranks

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
