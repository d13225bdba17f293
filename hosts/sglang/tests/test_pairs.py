"""A routed pair in SGLang: pure decodes run on one backend, extends and mixed steps on another."""

from __future__ import annotations

from types import SimpleNamespace as Names
from typing import TYPE_CHECKING, Any

import pytest
import torch

import attnplug
from hosts.sglang.tests.rig import ForwardMode, World, worst
from tests.torch_pair import PAIR, RUNS, offer_pair

if TYPE_CHECKING:
    from pathlib import Path

EXTEND, DECODE, MIXED, VERIFY = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED, ForwardMode.TARGET_VERIFY
CLOSE = 1e-5


@pytest.fixture(autouse=True)
def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    return offer_pair(tmp_path, monkeypatch)


def sides() -> set[str]:
    """Return the backends that have run since the last call."""
    found = {name for name, _ in RUNS}
    RUNS.clear()
    return found


@pytest.mark.parametrize("options", [{}, {"windows": (20, -1), "swa": True, "sinks": True}])
def test_each_step_runs_on_its_side(pair: str, options: dict[str, Any]) -> None:
    world = World(16, backend=pair, **options)
    backend = world.backend()
    a, b, c = world.new(), world.new(), world.new()
    for requests, lens, mode, side in (
        ([a, b], [17, 33], EXTEND, "second"),
        ([a, b], [1, 1], DECODE, "first"),
        ([c, a, b], [21, 1, 1], MIXED, "second"),
        ([a], [1], EXTEND, "first"),  # the last token of a chunked prefill
        ([b, c], [1, 4], EXTEND, "second"),
        ([c, a, b], [1, 1, 1], DECODE, "first"),
    ):
        assert world.step(backend, requests, lens, mode) < CLOSE
        assert sides() == {side}
    assert f"chosen: {PAIR}" in backend.explain()
    assert "routed: pure decodes to first/sdpa, all other batches to second/sdpa" in " ".join(backend.explain().split())


def test_graphs_of_decodes_are_built_by_one_side(pair: str) -> None:
    world = World(16, backend=pair)
    backend = world.backend()
    requests = [world.new() for _ in range(3)]
    backend.init_cuda_graph_state(4, 4)
    assert world.step(backend, requests, [17, 33, 1], EXTEND) < CLOSE
    assert sides() == {"second"}
    step = world.batch([], [], DECODE, pad=4)
    backend.init_forward_metadata_out_graph(step, in_capture=True)
    backend.init_forward_metadata_in_graph(step)
    captured = backend.forward_metadata
    assert all(metadata.is_decode for metadata in captured.metadata.values())
    for count in (3, 1, 0, 2):  # a rank without requests replays, too
        step, data = world.batch(requests[:count], [1] * count, DECODE, pad=4 - count), world.qkv(4)
        backend.init_forward_metadata_out_graph(step)
        backend.forward_metadata = captured
        backend.init_forward_metadata_in_graph(step)
        found = world.run(backend, step, data)
        assert sides() == {"first"}
        real = [tuple(each[:count] for each in layer) for layer in data]
        if count:
            assert worst(found, world.expected(requests[:count], [1] * count, real)) < CLOSE
    assert world.step(backend, requests, [5, 1, 1], EXTEND) < CLOSE
    assert sides() == {"second"}


def test_drafts_in_graphs_are_decodes(pair: str) -> None:
    world = World(16, backend=pair)
    backend = world.backend()
    a, b = world.new(), world.new()
    backend.init_cuda_graph_state(2, 6)
    assert world.step(backend, [a, b], [17, 33], EXTEND) < CLOSE
    sides()
    chain = Names(custom_mask=None, draft_token_num=3)
    backend.init_forward_metadata_out_graph(world.batch([], [], VERIFY, spec=chain, pad=2), in_capture=True)
    captured = backend.forward_metadata
    step, data = world.batch([b, a], [3, 3], VERIFY, spec=chain), world.qkv(6)
    backend.init_forward_metadata_out_graph(step)
    backend.forward_metadata = captured
    backend.init_forward_metadata_in_graph(step)
    found = world.run(backend, step, data)
    assert worst(found, world.expected([b, a], [3, 3], data)) < CLOSE
    assert sides() == {"first"}


def test_other_scales_reach_both_sides(pair: str) -> None:
    world = World(16, (-1,), backend=pair, kv_dtype=torch.float8_e4m3fn, scales=(0.5, 0.5))
    backend = world.backend()
    a = world.new()
    world.step(backend, [a], [17], EXTEND)
    world.layers[0].attn.k_scale_float = 0.25
    world.step(backend, [a], [1], DECODE)
    for kind in backend._kinds.values():
        for layer in kind.layers.values():
            both = layer.impl.wrapped.decode, layer.impl.wrapped.rest
            assert [one.layer.k_scale for one in both] == [0.25, 0.25]


def test_absorbed_steps_are_routed(pair: str) -> None:
    sizes = {"size": 40, "size_v": 32, "kv_heads": 1, "latent": True, "scaling": 0.3}
    world = World(64, (-1,), backend=pair, **sizes)
    backend = world.backend()
    a, b = world.new(), world.new()
    assert world.step(backend, [a, b], [17, 70], EXTEND) < CLOSE
    assert sides() == {"second"}
    assert world.step(backend, [b, a], [1, 1], DECODE) < CLOSE
    assert sides() == {"first"}


def test_the_setting_names_a_pair(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_BACKEND", pair)
    attnplug.refresh()
    world = World(16)
    backend = world.backend()
    a = world.new()
    assert world.step(backend, [a], [17], EXTEND) < CLOSE
    assert world.step(backend, [a], [1], DECODE) < CLOSE
    assert sides() == {"first", "second"}
    assert all(kind.plan["layers.0.attn"].id == PAIR for kind in backend._kinds.values())
