"""Packed keys are in the workspace, whose size `workspace_bytes` returns; if it is too small there are more calls."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from attnplug.contract import Layer, Limits
from attnplug.ops import gather_slots
from attnplug_flash_attn import packing
from plugins.flash_attn.tests.recording_kernels import load
from tests.backends.caches import copy_of, random_cache
from tests.backends.harness import Harness

PER_KEY = 2 * 2 * 64 * 2  # key and value, two heads of 64, two bytes
LENS = ([1, 1, 1, 7, 20, 3], [60, 90, 2, 90, 33, 3])


@pytest.fixture
def keys_at_once(monkeypatch):
    """Return a function that sets how many keys fit."""
    return lambda keys: monkeypatch.setattr(packing, "MAX_BYTES", keys * PER_KEY)


class Small(Harness):
    """Requests of up to 90 keys."""

    limits = Limits(max_num_reqs=8, max_num_tokens=64, max_seq_len=90)


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(30, 80))
def test_each_call_has_as_many_requests_as_there_is_room_for(lens, most) -> None:
    ends = packing._ends(lens, most)

    assert ends == sorted(set(ends))
    assert ends[-1] == len(lens)
    held = [sum(lens[first:end]) for first, end in pairwise((0, *ends))]
    assert all(keys <= most for keys in held)
    assert all(keys + lens[end] > most for keys, end in zip(held, ends[:-1], strict=False))
    assert len(held) == 1 or all(held)  # a call without keys is of a step without keys


@pytest.mark.parametrize(
    ("required", "at_once", "expected"),
    [
        ({}, 2**20, 8 * 90),  # never more than there may be
        ({}, 200, 200),
        ({}, 10, 90),  # a request is not cut
        ({"paged": False, "block_size": None}, 200, 0),
    ],
)
def test_workspace_bytes_cover_packed_keys(keys_at_once, required, at_once, expected) -> None:
    keys_at_once(at_once)
    for kind, keys in (("packed", expected), ("pages", 0), ("cumulative", 0)):
        harness = Small(load, variant=kind, **required)
        assert harness.backend.workspace_bytes(harness.limits) == keys * PER_KEY
        assert harness.state.workspace.shape[0] == keys * PER_KEY


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_packed_keys_are_in_the_workspace(layout) -> None:
    harness = Small(load, variant="packed", kv_layout=layout)
    harness.forward(harness.builder.build(harness.batch([1, 4], [30, 40])))

    memory = harness.state.workspace.untyped_storage().data_ptr()
    assert [one.key.shape[0] for one in harness.backend.wrapped.kernels.calls] == [30, 40]
    assert all(one.key.untyped_storage().data_ptr() == memory for one in harness.backend.wrapped.kernels.calls)


@pytest.mark.parametrize("step", [LENS, ([0, 1, 0, 12], [0, 90, 0, 80]), ([90 // 2] * 1, [90])])
@pytest.mark.parametrize(
    "required", [{}, {"sliding_window": 9}, {"batch_invariant": True}, {"kv_cache_dtype": "fp8_e4m3"}]
)
def test_calls_over_some_requests_each_are_as_one(keys_at_once, step, required) -> None:
    single = Small(load, variant="packed", return_lse=True, **required)
    lse = torch.full((2, sum(step[0]), 4), 7.0)
    expected = single.forward(single.builder.build(single.batch(*step)), lse=lse[0])
    keys_at_once(50 if "kv_cache_dtype" in required else 100)  # of 8 bits there is room for twice as many
    parted = Small(load, variant="packed", return_lse=True, **required)
    metadata = parted.builder.build(parted.batch(*step))

    assert torch.equal(parted.forward(metadata, lse=lse[1]), expected)
    assert torch.equal(*lse)
    parts = parted.impls[0].wrapped.plan_of(metadata).parts
    rows = [row for part in parts for row in range(part.first, part.last)]
    assert rows == list(range(sum(step[0])))
    if step is LENS:
        assert len(parts) == 4
        assert all(part.slots.shape[0] <= 100 for part in parts)


@pytest.mark.parametrize("seq_lens_cpu_kind", ["upper_bound", "absent"])
def test_requests_of_unknown_length_have_room_for_the_longest(keys_at_once, seq_lens_cpu_kind) -> None:
    keys_at_once(200)
    harness = Small(load, variant="packed", seq_lens_cpu_kind=seq_lens_cpu_kind)
    exact = harness.batch([1] * 5, [30, 20, 9, 60, 3])
    known = {"seq_lens_cpu": None if seq_lens_cpu_kind == "absent" else exact.seq_lens + 30, "max_seq_len": 90}
    table = torch.nn.functional.pad(exact.block_table, (0, 2), value=7)
    inexact = evolve(exact, **known, block_table=table, block_table_cpu=None, num_computed_tokens_cpu=None)
    metadata = harness.builder.build(inexact)

    ends = [part.last for part in harness.impls[0].wrapped.plan_of(metadata).parts]
    assert ends == ([2, 4, 5] if seq_lens_cpu_kind == "absent" else [3, 5])
    sure = Small(load, variant="packed")
    assert torch.equal(harness.forward(metadata), sure.forward(sure.builder.build(exact)))


def test_other_blocks_are_followed_by_every_call(keys_at_once) -> None:
    keys_at_once(100)
    harness = Small(load, variant="packed")
    before = harness.builder.build(harness.batch(*LENS))
    other = harness.batch(*LENS, first_block=25)
    after = harness.builder.update_block_table(before, other.block_table, other.slot_mapping)

    old, new = (harness.impls[0].wrapped.plan_of(metadata).parts for metadata in (before, after))
    packed = [(a, b) for a, b in zip(old, new, strict=True) if a.slots is not None]
    assert len(packed) > 2
    assert all(torch.equal(a.slots + 24 * 16, b.slots) for a, b in packed)


def test_a_shared_prefix_leaves_calls_over_some_requests_each(keys_at_once) -> None:
    keys_at_once(100)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    required = {"return_lse": True, "sinks": True}
    harness = Small(load, [Layer(name="layers.0", sinks=sinks)], "packed", cascade=True, **required)
    batch = harness.batch([1, 1, 1, 9], [80, 70, 90, 80])
    table = batch.block_table.clone()
    table[:, 0] = table[0, 0]
    batch = evolve(batch, block_table=table, block_table_cpu=table, common_prefix_len=16)
    flat = Small(load, [Layer(name="layers.0", sinks=sinks)], "packed", **required)
    plain = evolve(batch, common_prefix_len=0)
    cache = random_cache(harness.backend, 64)
    found = []
    for world, given_batch in ((harness, batch), (flat, plain)):
        query, key, value = (
            torch.randn(12, heads, 64, generator=torch.Generator().manual_seed(2)).bfloat16() for heads in (4, 2, 2)
        )
        output, lse = torch.empty(12, 256).bfloat16(), torch.empty(12, 4)
        metadata = world.builder.build(given_batch)
        world.impls[0].forward(query, key, value, copy_of(harness.backend, cache), metadata, output, lse=lse)
        found.append((output, lse))

    assert len(harness.impls[0].wrapped.plan_of(harness.builder.build(batch)).parts) == 4
    torch.testing.assert_close(found[0][0], found[1][0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_packing_takes_no_memory_beside_the_workspace(layout) -> None:
    """Pages whose heads come first cannot be looked up as rows: they are read by block and place, into the memory."""
    harness = Small(load, variant="packed", kv_layout=layout)
    cache = random_cache(harness.backend, 8)
    slots, out = torch.arange(20, 60), torch.empty(40, 2, 64).bfloat16()
    with torch.profiler.profile(profile_memory=True) as profile:
        found = gather_slots(cache.k, slots, out=out)

    assert found is out
    assert torch.equal(out, torch.stack([cache.k[slot // 16, slot % 16] for slot in slots.tolist()]))
    taken = sum(event.cpu_memory_usage for event in profile.events() if event.cpu_memory_usage > 0)
    assert taken < out.nbytes // 4
