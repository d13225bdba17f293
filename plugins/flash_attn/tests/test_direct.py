"""Direct FlashAttention calls compute the same as the plugin, and are the baseline of its benchmarks."""

from __future__ import annotations

import pytest

import benchmarks.direct_flash_attn as direct
from attnplug_kit.bench import (
    Baseline,
    Step,
    Target,
    building,
    decodes,
    first_prefills,
    forwarding,
    make_planner,
    mixed,
    ragged_decodes,
)
from benchmarks.direct_flash_attn import CALLS, SCHEDULE, DirectFlashAttention
from plugins.flash_attn.tests.real import GRAPHS, VARIANTS
from tests.backends.bench import STEPS, TINY, FakeTimer, check_second_call, use_baseline


def choice(variant: str) -> Target:
    return Target(f"flash_attn_fake/{variant}", "cpu")


@pytest.fixture
def library(fakes, monkeypatch):
    use_baseline(monkeypatch, DirectFlashAttention, "flash_attn_fake")


def test_they_are_a_baseline_for_every_variant() -> None:
    assert isinstance(DirectFlashAttention(), Baseline)
    assert DirectFlashAttention().backend == "flash_attn"
    assert set(CALLS) == set(VARIANTS)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.what)
def test_forwards_are_compared_with_them(library, step, variant) -> None:
    found = forwarding.measure_steps([((step,), FakeTimer(), True), ((step,), FakeTimer(), False)], choice(variant), 1)

    assert not found.failures
    assert found.measurements[0].what.endswith("direct FlashAttention calls")
    assert [m.budget for m in found.measurements][:4] == [None, None, 10, 10]


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_second_call_finds_what_the_first_has_written(library, variant) -> None:
    check_second_call(DirectFlashAttention(), choice(variant))


@pytest.mark.parametrize("variant", GRAPHS)
def test_replays_are_compared_with_them(library, monkeypatch, variant) -> None:
    monkeypatch.setattr(forwarding, "work_clock", lambda _: FakeTimer())

    found = forwarding.measure_steps([], choice(variant), 1, [decodes(3, 33, **TINY), ragged_decodes(4, 2, 70, **TINY)])

    assert not found.failures
    assert len(found.measurements) == 6


@pytest.mark.parametrize("sizes", [(576, 512), (320, 256)])
@pytest.mark.parametrize("query_len", [1, 3])
def test_latents_are_compared_with_them(library, monkeypatch, sizes, query_len) -> None:
    monkeypatch.setattr(forwarding, "work_clock", lambda _: FakeTimer())
    heads = {"num_q_heads": 4, "num_kv_heads": 1, "head_size": sizes[0], "head_size_v": sizes[1], "latent": True}
    step = Step("latents", (query_len,) * 3, (20, 3, 90), **heads)

    eager = [((step, mixed(1, 40, 1, 18, **heads)), FakeTimer(), False)]
    found = forwarding.measure_steps(eager, choice("fa3_vllm"), 1, [step])

    assert not found.failures
    assert len(found.measurements) == 9
    assert "latents, replayed from a graph, ticks, 4 query" in found.measurements[-1].what


def test_contiguous_prefills_are_compared_with_them(library) -> None:
    step = first_prefills(2, 21, num_q_heads=4, num_kv_heads=4, head_size=192, head_size_v=128)

    found = forwarding.measure_step(step, choice("fa3_vllm"), FakeTimer(), 1, is_small=False, paged=False)

    assert len(found.measurements) == 3


@pytest.mark.parametrize("variant", VARIANTS)
def test_builds_are_compared_with_schedules(library, monkeypatch, variant) -> None:
    monkeypatch.setattr(building, "host_clock", lambda _: FakeTimer())

    found = building.measure_steps(STEPS, STEPS[1:2], choice(variant), 1)

    assert not found.failures
    over = [m.what for m in found.measurements if m.paired]
    scheduled = sum(any(step.cached_lens) for step in (*STEPS, STEPS[1]))
    assert len(over) == (scheduled if CALLS[variant].schedules else 0)
    assert all(what.endswith(f"`build` over {SCHEDULE}") for what in over)


def test_rows_are_those_of_the_step(library) -> None:
    planner = make_planner(mixed(1, 40, 1, 18, **TINY), choice("fa3_vllm"))
    decode, prefill = direct._rows(planner)

    assert (decode.tokens, prefill.tokens) == (slice(0, 1), slice(1, 19))
    assert (decode.has_cached, prefill.has_cached) == (True, False)
    assert (decode.max_query, decode.max_keys, prefill.max_query, prefill.max_keys) == (1, 40, 18, 18)
    assert [decode.table.tolist()[0], prefill.table.tolist()[0]] == list(planner.blocks)
    assert prefill.slots.tolist()[:2] == [planner.blocks[1][0] * 16, planner.blocks[1][0] * 16 + 1]
