"""Steps of a model runner made by hand, compared with the float64 oracle: order, pages, prefixes, windows, sinks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import attnplug
from attnplug.contract import read_steps, recording
from hosts.sglang.tests.rig import ForwardMode, World

if TYPE_CHECKING:
    from pathlib import Path

EXTEND, DECODE, MIXED = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED
CLOSE = 1e-5

MODELS: dict[str, dict[str, Any]] = {
    "plain": {"windows": (-1, -1)},
    "window": {"windows": (20, -1)},
    "swa": {"windows": (20, -1), "swa": True},
    "sinks": {"windows": (-1, -1), "sinks": True},
    "swa_sinks": {"windows": (20, -1), "swa": True, "sinks": True},
    "cap": {"windows": (-1, 20), "cap": 5.0},
    "scale_of_its_own": {"windows": (-1, -1), "scaling": 0.4},
    "values_of_another_size": {"windows": (-1, -1), "size_v": 8},
    "one_kv_head": {"windows": (-1, -1), "kv_heads": 1},
}


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("model", MODELS)
def test_steps_follow_each_other(model: str, page: int) -> None:
    world = World(page, **MODELS[model])
    backend = world.backend()
    a, b, c = world.new(), world.new(), world.new()
    assert world.step(backend, [a, b], [17, 33], EXTEND) < CLOSE
    assert world.step(backend, [b, c], [1, 40], EXTEND) < CLOSE  # a chunk of one token, ahead of a prompt
    assert world.step(backend, [a, b, c], [21, 1, 1], MIXED) < CLOSE  # decodes behind a prefill
    assert world.step(backend, [c, a, b], [1, 1, 1], DECODE) < CLOSE
    d = world.fork(b, 32)
    assert world.requests[d]["length"] == 32 // page * page
    assert world.step(backend, [d, a], [5, 2], EXTEND) < CLOSE  # a prefix that another request has computed
    assert world.step(backend, [d, b], [1, 1], DECODE) < CLOSE


def test_recorded_steps_are_those_of_the_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "steps.jsonl"
    monkeypatch.setenv("ATTNPLUG_RECORD", str(file))
    attnplug.refresh()
    recording.recorder.cache_clear()
    try:
        world = World(16, windows=(-1, 20))
        backend, a, b = world.backend(), world.new(), world.new()
        world.step(backend, [a, b], [17, 33], EXTEND)
        world.step(backend, [b, a], [1, 1], DECODE)
    finally:
        monkeypatch.undo()
        attnplug.refresh()
        recording.recorder.cache_clear()

    found = read_steps(file).steps
    assert {(step.query_lens, step.seq_lens) for step in found} == {((17, 33), (17, 33)), ((1, 1), (34, 18))}
    assert {step.layer.agreement.requirements.sliding_window for step in found} == {None, 21}


@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_batches_of_any_order_agree_with_the_oracle(data: st.DataObject) -> None:
    draw = data.draw
    page = draw(st.sampled_from([1, 4, 16, 64]))
    windows = draw(st.lists(st.sampled_from([-1, 0, 3, 15, 16, 40]), min_size=1, max_size=3))
    has_both = any(window > -1 for window in windows) and any(window < 0 for window in windows)
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    world = World(
        page,
        tuple(window or 1 for window in windows),
        swa=has_both and draw(st.booleans()),
        heads=kv_heads * draw(st.sampled_from([1, 2, 3])),
        kv_heads=kv_heads,
        sinks=draw(st.booleans()),
        cap=draw(st.sampled_from([0.0, 5.0])),
        seed=draw(st.integers(0, 1000)),
    )
    backend = world.backend()
    requests = [world.new() for _ in range(draw(st.integers(1, 4)))]
    for _ in range(draw(st.integers(1, 4))):
        chosen = draw(st.permutations(requests))[: draw(st.integers(1, len(requests)))]
        has_tokens = all(world.requests[r]["length"] for r in chosen)
        if has_tokens and draw(st.booleans()):
            assert world.step(backend, chosen, [1] * len(chosen), DECODE) < CLOSE
            continue
        lens = [draw(st.integers(1, 40)) for _ in chosen]
        assert world.step(backend, chosen, lens, draw(st.sampled_from([EXTEND, MIXED]))) < CLOSE


def test_a_gpu_is_decided_for_by_what_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang names the device ``"cuda"``: which one that is follows from the process."""
    gpu = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: gpu)
    asked = []

    def plan(requests: Any, device: Any, **more: Any) -> Any:
        asked.append(attnplug.Device(device))
        return decide(requests, "cpu", **more)

    decide = attnplug.plan
    monkeypatch.setattr(attnplug, "plan", plan)
    world = World(16)
    world.runner.device = "cuda"
    backend = world.backend()

    assert backend.support_triton()
    assert {str(device) for device in asked} == {"cuda:9.0 (NVIDIA H200)"}


def test_lengths_that_only_the_device_has() -> None:
    world = World(16)
    backend = world.backend()
    a, b = world.new(), world.new()
    assert world.step(backend, [a, b], [17, 33], EXTEND, on_cpu=False) < CLOSE
    assert world.step(backend, [b, a], [1, 1], DECODE, on_cpu=False) < CLOSE


def test_padded_decodes_run_eagerly() -> None:
    world = World(1)
    backend = world.backend()
    a, b = world.new(), world.new()
    world.step(backend, [a, b], [9, 30], EXTEND)
    step, data = world.batch([b, a], [1, 1], DECODE, pad=2), world.qkv(4)
    backend.init_forward_metadata(step)
    found = world.run(backend, step, data)
    expected = world.expected([b, a], [1, 1], [tuple(t[:2] for t in each) for each in data])
    for got, want in zip(found, expected, strict=True):
        torch.testing.assert_close(got[:2].double(), want, atol=CLOSE, rtol=0)
        assert not got[2:].any()


@pytest.mark.parametrize("swa", [False, True])
def test_keys_and_values_that_are_in_the_pool(swa: bool) -> None:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc  # noqa: PLC0415 - the rig lets SGLang import

    world = World(16, (20, -1), swa=swa)
    backend = world.backend()
    a, b = world.new(), world.new()
    world.step(backend, [a, b], [17, 33], EXTEND)
    step, data = world.batch([b, a], [1, 1], DECODE), world.qkv(2)
    translated = world.pool.translate_loc_from_full_to_swa(step.out_cache_loc) if swa else None
    for layer, (_, k, v) in zip(world.layers, data, strict=True):
        world.pool.set_kv_buffer(layer.attn, KVWriteLoc(step.out_cache_loc, translated), k, v)
    backend.init_forward_metadata(step)
    garbage = [(q, torch.full_like(k, torch.nan), torch.full_like(v, torch.nan)) for q, k, v in data]
    found = world.run(backend, step, garbage, save=False)
    for got, want in zip(found, world.expected([b, a], [1, 1], data), strict=True):
        torch.testing.assert_close(got.double(), want, atol=CLOSE, rtol=0)


def test_layers_of_encoders_attend_to_all_tokens() -> None:
    from hosts.sglang.tests.rig import AttentionType  # noqa: PLC0415

    world = World(1, (-1, -1), attn_type=AttentionType.ENCODER_ONLY)
    backend = world.backend()
    a, b = world.new(), world.new()
    assert world.step(backend, [a, b], [17, 33], EXTEND) < CLOSE


def test_an_idle_step_has_no_attention() -> None:
    world = World(1)
    backend = world.backend()
    step = world.batch([], [], ForwardMode.IDLE)
    backend.init_forward_metadata(step)
    assert backend.forward_metadata is None
    found = world.run(backend, step, world.qkv(0))
    assert [tuple(each.shape) for each in found] == [(0, 64), (0, 64)]


def test_sinks_in_another_dtype_than_the_model() -> None:
    world = World(1, sinks=True)
    for layer in world.layers:
        assert layer.sinks is not None
        layer.sinks = layer.sinks.bfloat16()
    backend = world.backend()
    a, b = world.new(), world.new()
    assert world.step(backend, [a, b], [17, 33], EXTEND) < CLOSE
    for layer in world.layers:
        layer.sinks = layer.sinks + 1  # another tensor has another conversion
    assert world.step(backend, [b, a], [1, 1], DECODE) < CLOSE
