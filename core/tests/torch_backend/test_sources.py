"""Which groups are gathered in whole blocks and in parts; nothing after a request's last key is read."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from attrs import evolve
from hypothesis import strategies as st

import attnplug
from attnplug.request.device import Device
from attnplug.torch_backend import builder, sdpa, sources
from attnplug.torch_backend.builder import Sizes
from attnplug.torch_backend.sources import BlockKeys, SlotKeys, _partial_blocks
from attnplug_kit.oracle import Case, check, limits_of, materialize
from core.tests.torch_backend.tiers import in_two_tiers

if TYPE_CHECKING:
    from collections.abc import Callable

    from attnplug.contract import Backend
    from attnplug.torch_backend.plan import Plan

WIDE = Sizes(gathered=2**23, mask=2**22, scores=2**21, rows=256, call=1e12)
"""Calls cost so much that requests of any lengths share one."""


def load(case: Case, layout: str = "NHD") -> Backend:
    requested = case.requirements(block_size=case.block_size, kv_layout=layout, return_lse=True)
    return attnplug.load(requested, Device.cpu(), backend="torch/sdpa")


def plan_of(case: Case) -> Plan:
    backend, scene = load(case), materialize(case)
    impl = backend.make_impl(scene.layer())
    builder = backend.make_builder([impl], backend.make_state(limits_of(scene)))
    return impl.wrapped.plan_of(builder.build(scene.paged(backend).batch))  # type: ignore[no-any-return]


def check_shared_call(
    contexts: list[int], rows: int, block_size: int, layout: str, unfused: bool, requested: dict[str, object]
) -> None:
    case = Case(
        query_lens=(rows,) * len(contexts), context_lens=tuple(contexts), block_size=block_size, sinks=True, **requested
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "sizes_on", lambda _: WIDE)
        if unfused:
            patch.setattr(builder, "choose_kernel", lambda *_: sdpa.UNFUSED)
        check(load(case, layout), materialize(case))


test_requests_of_any_lengths_share_a_call, test_requests_share_a_call_at_length = in_two_tiers(
    check_shared_call,
    st.lists(st.integers(0, 70), min_size=1, max_size=6),
    st.sampled_from([1, 2, 7]),
    st.sampled_from([1, 4, 5, 16, 24]),
    st.sampled_from(["NHD", "HND"]),
    st.booleans(),
    st.sampled_from([{}, {"sliding_window": 3}, {"sliding_window": 40}, {"head_size_v": 8}, {"kv_cache_dtype": "fp8"}]),
    fast=50,
    full=150,
)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("keys", [31, 32, 33])
@pytest.mark.parametrize("requested", [{}, {"sliding_window": 20}, {"alibi": "linear"}, {"sinks": True}], ids=str)
def test_equal_requests_are_gathered_in_parts(keys: int, layout: str, requested: dict[str, object]) -> None:
    case = Case(query_lens=(1,) * 7, context_lens=(keys - 1,) * 7, **requested)
    backend, scene = load(case, layout), materialize(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend.wrapped, "workspace_bytes", lambda _: 3 * 48 * 2 * 2 * 16 * 4, raising=True)
        impl = backend.make_impl(scene.layer())
        builder = backend.make_builder([impl], backend.make_state(limits_of(scene)))
        plan: Plan = impl.wrapped.plan_of(builder.build(scene.paged(backend).batch))
        (group,) = plan.groups
        check(backend, scene)

    if "alibi" not in requested and keys != 33:  # 20 keys out of 3 blocks are few
        assert isinstance(group.source, BlockKeys)
    assert group.members == 7
    assert group.per_gather is not None
    assert 1 < group.per_gather < 7


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("rows", [1, 7])
@pytest.mark.parametrize("requested", [{}, {"sliding_window": 40}, {"sinks": True}, {"kv_cache_dtype": "fp8"}], ids=str)
def test_consecutive_blocks_are_read_in_place(rows: int, layout: str, requested: dict[str, object]) -> None:
    case = Case(query_lens=(rows,), context_lens=(60,), num_spare_blocks=3, **requested)
    scene, backend = materialize(case), load(case, layout)
    columns = scene.block_table.shape[1]
    in_a_row = evolve(scene, block_table=torch.arange(2, 2 + columns, dtype=torch.int32).view(1, -1))
    impl = backend.make_impl(scene.layer())
    builder = backend.make_builder([impl], backend.make_state(limits_of(scene)))

    runs = [
        group.source.run
        for shown in (in_a_row, evolve(scene, block_table=in_a_row.block_table.flip(1)))
        for group in impl.wrapped.plan_of(builder.build(shown.paged(backend).batch)).groups
        if isinstance(group.source, BlockKeys)
    ]

    window_starts = max(0, 60 - 39) // 16 if "sliding_window" in requested else 0
    assert runs == [2 + window_starts, None]
    check(backend, in_a_row)


def test_a_build_writes_numbers_per_block() -> None:
    plan = plan_of(Case(query_lens=(1,) * 9, context_lens=(199,) * 9))

    (group,) = plan.groups
    assert isinstance(group.source, BlockKeys)
    assert group.source.blocks.shape == (9, 13)
    assert group.source.partial is None, "the slots after the last key are cut off"


@pytest.mark.parametrize(
    ("case", "why"),
    [
        (Case(query_lens=(1, 1), context_lens=(40, 43), sliding_window=20), "first keys at different offsets"),
        (Case(query_lens=(1,), context_lens=(4,), block_size=64), "a block with few keys"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_slots_are_numbered_where_blocks_are_not_better(case: Case, why: str) -> None:
    assert all(isinstance(group.source, SlotKeys) for group in plan_of(case).groups), why
    check(load(case), materialize(case))


def test_nan_after_a_last_key_is_not_read() -> None:
    case = Case(query_lens=(1, 1, 1), context_lens=(2, 20, 30), num_spare_blocks=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(builder, "sizes_on", lambda _: WIDE)
        plan = plan_of(case)
        output = check(load(case), materialize(case)).output

    (group,) = plan.groups
    assert isinstance(group.source, BlockKeys)
    assert group.source.ends == ((0, 3), (1, 21))  # the third is as long as the group
    assert not output.isnan().any()


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_device_clears_the_same_slots_as_the_cpu(layout: str) -> None:
    pages = torch.full((9, 16, 2, 8), torch.nan)
    if layout == "HND":
        pages = pages.transpose(1, 2).contiguous().transpose(1, 2)
    table = torch.tensor([[7, 7], [3, 4], [8, 1]], dtype=torch.int32)
    for block, used in ((7, 3), (3, 16), (4, 5), (8, 16), (1, 15)):
        pages[block, :used].normal_()
    partial = _partial_blocks((3, 21, 31), 2, 16, table.device)
    assert partial is not None

    # A request with one block has it in both columns, with its unused slots cleared.
    assert partial.members.tolist() == [0, 0, 1, 2]
    assert partial.columns.tolist() == [0, 1, 1, 1]
    assert torch.equal(partial.beyond.sum((1, 2, 3)), torch.tensor([13, 13, 11, 1]))
    on_device, on_cpu = (
        source.gather(pages, 31, slice(0, 3), torch.empty(3 * 32 * 16))
        for source in (BlockKeys(table, 0, partial), BlockKeys(table, 0, None, ends=((0, 3), (1, 21))))
    )
    assert torch.equal(on_device[1:], on_cpu[1:])
    assert torch.equal(on_device[0, :, :3], on_cpu[0, :, :3])
    assert on_device.isfinite().all()
    assert on_cpu.isfinite().all()


@pytest.mark.parametrize("size_v", [None, 8], ids=["blocks", "slots"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize(("form", "gathers"), [("packed", 1), ("joint", 2)])
def test_packed_keys_and_values_are_gathered_at_once(form: str, gathers: int, layout: str, size_v: int | None) -> None:
    case = Case(query_lens=(1, 1), context_lens=(39, 39), head_size_v=size_v)
    requested = case.requirements(block_size=case.block_size, kv_layout=layout, kv_cache_form=form)
    backend, gathered = attnplug.load(requested, Device.cpu(), backend="torch/sdpa"), list[str]()

    def counted(name: str) -> Callable[..., torch.Tensor]:
        gather = getattr(sources, name)

        def count_and_gather(*args: object, **kwargs: object) -> torch.Tensor:
            gathered.append(name)
            return gather(*args, **kwargs)  # type: ignore[no-any-return]

        return count_and_gather

    with pytest.MonkeyPatch.context() as patch:
        for name in ("gather_blocks", "gather_slots"):
            patch.setattr(sources, name, counted(name))
        check(backend, materialize(case))

    assert len(gathered) == gathers
