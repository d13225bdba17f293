"""Decode context parallelism: two ranks with hand-made metadata, on FlashAttention's plugin with exact kernels."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace as Names
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-hosts` runs these")

import torch
import torch.distributed as dist
from attrs import frozen
from torch.testing._internal.distributed.fake_pg import FakeStore
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
from vllm.v1.attention.backend import CommonAttentionMetadata

from attnplug.batching import num_local_tokens_per_dcp_rank
from attnplug.ops import ranks
from attnplug_flash_attn import builder as flash_attn_builder
from attnplug_flash_attn import dcp, impl
from attnplug_flash_attn.kernels.interface import Kernels, write_lse
from attnplug_kit.oracle import attend
from attnplug_vllm import facts
from hosts.vllm.tests.cuda_platform import stub_compiled
from hosts.vllm.tests.rig import ORDERS, Rig
from plugins.flash_attn.tests.exact_backend import make_backend
from plugins.flash_attn.tests.launches import Launches
from tests.backends.rank_groups import ThreadGroup, ThreadRanks

RANKS, BLOCK = 2, 4
LOCAL_CPU = next(f.name for f in fields(CommonAttentionMetadata) if f.name.startswith("dcp_local_seq_lens_cpu"))


@frozen
class ExactSelection:
    """A decision for exact kernels, which no manifest declares."""

    requirements: Any
    id: str = "flash_attn/exact"

    @property
    def agreement(self) -> Any:
        late = self.requirements.late
        return Names(cudagraph="never", kv_layout=None) if late else make_backend(self.requirements).agreement

    def bind(self, *, block_size: int) -> ExactSelection:
        return ExactSelection(self.requirements.evolve(block_size=block_size, late=()))

    def load(self) -> Any:
        return make_backend(self.requirements)


@pytest.fixture
def group(monkeypatch):
    """Ranks that are threads of this process."""
    made = ThreadGroup(RANKS)
    monkeypatch.setattr(flash_attn_builder, "Ranks", ThreadRanks)
    choose_exact(monkeypatch, made)
    return made


def choose_exact(monkeypatch, made):
    """Choose exact kernels, on a group of ranks."""
    for name in ("select", "choose"):
        monkeypatch.setattr(facts, name, lambda requirements, choice: ExactSelection(requirements), raising=False)
    monkeypatch.setattr(facts, "reasons", lambda requirements, choice: [])
    monkeypatch.setattr(
        parallel_state, "get_dcp_group", lambda: Names(device_group=made, world_size=RANKS, rank_in_group=0)
    )


class Rank:
    """One rank: a layer with its own query heads, and its shard of the keys of two requests."""

    def __init__(self, rank: int, interleave: int, order: str) -> None:
        self.rank, self.interleave = rank, interleave
        rig = Rig([{}], block_size=BLOCK, order=order, dcp_size=RANKS, dcp_rank=rank, dcp_interleave=interleave)
        self.rig, (self.layer,) = rig, rig.layers.values()
        self.table = torch.arange(1, 33, dtype=torch.int32).view(2, 16).flip(1).contiguous()

    def common(self, new: list[int], lens: list[int]) -> Any:
        slots = []
        for request, (count, length) in enumerate(zip(new, lens, strict=True)):
            for position in range(length - count, length):
                turn, offset = divmod(position, self.interleave)
                place = turn // RANKS * self.interleave + offset
                block = int(self.table[request, place // BLOCK])
                slots.append(block * BLOCK + place % BLOCK if turn % RANKS == self.rank else -1)
        seq_lens = torch.tensor(lens, dtype=torch.int32)
        local = num_local_tokens_per_dcp_rank(seq_lens, RANKS, self.rank, self.interleave)
        starts = torch.tensor([0, *new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return CommonAttentionMetadata(
            query_start_loc=starts,
            query_start_loc_cpu=starts,
            seq_lens=seq_lens,
            seq_lens_cpu_upper_bound=seq_lens,
            num_reqs=len(new),
            num_actual_tokens=sum(new),
            max_query_len=max(new),
            max_seq_len=max(lens),
            block_table_tensor=self.table,
            slot_mapping=torch.tensor(slots),
            dcp_local_seq_lens=local,
            **{LOCAL_CPU: local},
        )

    def run(self, new: list[int], lens: list[int], rows: tuple[Any, Any, Any]) -> torch.Tensor:
        query, key, value = rows
        heads = slice(4 * self.rank, 4 * self.rank + 4)
        output = torch.zeros(sum(new), 4, 16)
        metadata = self.rig.builder.build(0, self.common(new, lens))
        layer = self.layer
        return layer.impl.forward(
            layer, query[:, heads].contiguous(), key, value, layer.kv_cache, metadata, output=output
        )


@pytest.mark.feature("DCP")
@pytest.mark.parametrize("interleave", [1, 4])
@pytest.mark.parametrize("order", ORDERS[:2])
def test_ranks_share_the_keys_of_a_request(group, interleave, order):
    torch.manual_seed(0)
    ranks = [Rank(rank, interleave, order) for rank in range(RANKS)]
    impl = type(ranks[0].layer.impl)
    assert impl.supports_dcp
    assert impl.can_return_lse_for_decode  # vLLM refuses layers that do not
    assert ranks[0].rig.builder.reorder_batch_threshold is None  # one call for requests in any order
    parallel = ranks[1].rig.builder.parts[0].builder.parallel
    assert (parallel.dcp_rank, parallel.dcp_size, parallel.dcp_interleave) == (1, RANKS, interleave)
    keys, values = [torch.empty(0, 2, 16)] * 2, [torch.empty(0, 2, 16)] * 2
    for new in ([5, 20], [1, 1], [1, 6], [1, 1]):
        lens = [len(rows) + count for rows, count in zip(keys, new, strict=True)]
        rows = tuple(torch.randn(sum(new), count, 16) for count in (8, 2, 2))
        outputs = group.call(lambda rank, _, new=new, lens=lens, rows=rows: ranks[rank].run(new, lens, rows))
        start = 0
        for request, count in enumerate(new):
            own = slice(start, start + count)
            keys[request] = torch.cat([keys[request], rows[1][own]])
            values[request] = torch.cat([values[request], rows[2][own]])
            for rank, output in enumerate(outputs):
                query = rows[0][own, 4 * rank : 4 * rank + 4]
                expected = attend(query, keys[request], values[request], scale=0.25).output
                assert float((output[own].double() - expected).abs().max()) < 1e-5
            start += count


@pytest.fixture
def fake_group(monkeypatch):
    """A group of two ranks, of which this process is one, and whose exchanges move nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    choose_exact(monkeypatch, dist.group.WORLD)
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.needs_vllm("~=0.32.0")
def test_a_layer_launches_no_more_than_vllms_own(monkeypatch, fake_group):
    ours, theirs = launches_of_a_layer(monkeypatch), launches_of_vllm(monkeypatch, fake_group)
    collectives = ("_allgather_base_", "_reduce_scatter_base_")
    assert [ours[name] for name in collectives] == [theirs[name] for name in collectives] == [2, 1]
    assert ours["clone"] <= theirs["clone"]
    assert sum(ours.values()) + 1 <= sum(theirs.values())  # a graph masks the values of padding, too


def launches_of_a_layer(monkeypatch):
    """Count what a layer launches in an eager step, without the write of its K/V."""
    launches = Launches()

    class Hollow(Kernels):
        fills_output = True

        def attend(self, query, key, value, out, call, params, lse):
            launches.found["attend"] += 1
            write_lse(lse, torch.empty(lse.T.shape))

    for module, name in ((dcp, "merge_into"), (ranks, "weigh")):  # one launch each on a GPU
        monkeypatch.setattr(module, name, launches.one(name))
    monkeypatch.setattr(impl, "write_kv", lambda *given: None)
    rank = Rank(0, 1, ORDERS[0])
    attn = rank.layer.impl.binding.attn.wrapped
    attn.kernels = Hollow(attn.agreement)
    metadata = rank.rig.builder.build(0, rank.common([1, 1], [6, 9]))
    rows, layer = [torch.empty(2, heads, 16) for heads in (4, 2, 2, 4)], rank.layer
    layer.impl.forward(layer, *rows[:3], layer.kv_cache, metadata, output=rows[3])  # which binds the pool
    launches.found.clear()
    with launches:
        layer.impl.forward(layer, *rows[:3], layer.kv_cache, metadata, output=rows[3])
    return launches.found


def launches_of_vllm(monkeypatch, group):
    """Count what vLLM's FlashAttention launches in the same step."""
    stub_compiled(monkeypatch)  # an import without them would stay, and fail where others have them
    from vllm.v1.attention.backends import flash_attn  # noqa: PLC0415 - its private parts are those of 0.32
    from vllm.v1.attention.ops import dcp as dcp_of_vllm  # noqa: PLC0415

    launches = Launches()

    def attend(q, out, **named):
        launches.found["attend"] += 1
        return out, torch.empty(q.shape[1], q.shape[0])

    def correct(out, lses, *rest, **named):
        launches.found["correct"] += 1
        return out, lses.new_empty(lses.shape[1:])

    members = Names(world_size=RANKS, rank_in_group=0, device_group=group)
    for name in ("all_gather", "reduce_scatter"):
        setattr(members, name, getattr(DeviceCommunicatorBase, name).__get__(members))
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", attend, raising=False)
    monkeypatch.setattr(flash_attn, "merge_attn_states", launches.one("merge"))
    monkeypatch.setattr(flash_attn, "get_dcp_group", lambda: members)
    monkeypatch.setattr(flash_attn, "should_split_fa2_dcp_context_attention", lambda *given: False)
    workspace = Names(get_simultaneous=lambda spec: (torch.empty(spec[0], dtype=spec[1]),))
    monkeypatch.setattr(flash_attn, "current_workspace_manager", lambda: workspace)
    monkeypatch.setattr(dcp_of_vllm, "correct_attn_out", correct)
    layer = Names(
        vllm_flash_attn_version=3,
        scale=0.25,
        alibi_slopes=None,
        sliding_window=None,
        logits_soft_cap=0.0,
        num_heads=4,
        head_size=16,
        dcp_world_size=RANKS,
        dcp_combine=dcp_of_vllm.cp_lse_ag_out_rs,
        _dcp_dtype=torch.float32,
        _dcp_max_num_tokens=2,
    )
    metadata = Names(
        query_start_loc=torch.tensor([0, 1, 2]),
        max_query_len=1,
        block_table=None,
        causal=True,
        max_num_splits=0,
        max_dcp_context_kv_len=8,
        dcp_context_kv_lens=None,
        scheduler_metadata=None,
        num_decode_reqs=2,
        num_prefill_reqs=0,
        num_decode_tokens=2,
        num_prefill_tokens=0,
    )
    query, key, value, output = (torch.empty(2, heads, 16) for heads in (4, 2, 2, 4))
    with launches:
        flash_attn.FlashAttentionImpl._forward_with_dcp(layer, query, key, value, key, value, output, metadata)
    return launches.found
