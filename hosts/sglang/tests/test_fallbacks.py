"""Backends that serve less: that do not read K/V written before the call, or leave the writing to their host."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

import attnplug
from attnplug.errors import NoBackendError, NotNegotiatedError
from attnplug_sglang import steps
from hosts.sglang.tests.rig import ForwardMode, World

EXTEND, DECODE = ForwardMode.EXTEND, ForwardMode.DECODE
CLOSE = 1e-5


@pytest.fixture
def without_kv_in_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no backend serve K/V that are in the cache before the call."""
    plan = attnplug.plan

    def refusing(requests: dict[str, attnplug.Requirements], *args: Any, **keywords: Any) -> attnplug.Plan:
        if any(each.kv_in_cache for each in requests.values()):
            raise NoBackendError("no backend reads K/V that are in the cache", "", "write them with the call")
        return plan(requests, *args, **keywords)

    monkeypatch.setattr(steps.attnplug, "plan", refusing)


@pytest.mark.usefixtures("without_kv_in_cache")
def test_layers_that_write_by_themselves_are_served_all_the_same() -> None:
    world = World(16, (-1, 20))
    backend = world.backend()
    a, b = world.new(), world.new()

    assert world.step(backend, [a, b], [17, 33], EXTEND) < CLOSE
    assert world.step(backend, [b, a], [1, 1], DECODE) < CLOSE


@pytest.mark.usefixtures("without_kv_in_cache")
def test_keys_that_are_in_the_pool_are_then_refused() -> None:
    world = World(16, (-1,))
    backend = world.backend()
    a = world.new()
    assert world.step(backend, [a], [17], EXTEND) < CLOSE
    step, data = world.batch([a], [1], DECODE), world.qkv(1)
    backend.init_forward_metadata(step)

    with pytest.raises(NotNegotiatedError, match="does not serve kv_in_cache"):
        world.run(backend, step, data, save=False)


def test_what_nothing_serves_is_refused_with_the_first_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(*_: Any, **__: Any) -> attnplug.Plan:
        raise NoBackendError("nothing serves it", "", "serve another model")

    monkeypatch.setattr(steps.attnplug, "plan", nothing)

    with pytest.raises(NoBackendError, match="nothing serves it"):
        World(16, (-1,)).backend()


def test_the_pool_is_written_where_a_layer_leaves_it_to_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    made = steps.contract_layer
    monkeypatch.setattr(steps, "contract_layer", lambda *args, **more: evolve(made(*args, **more), cache_write="host"))
    world = World(16, (-1, 20))
    backend = world.backend()
    (kind,) = backend._kinds.values()
    a, b = world.new(), world.new()

    assert all(set(bound.impl.host_writes) == {"decode", "prefill"} for bound in kind.layers.values())
    assert world.step(backend, [a, b], [17, 33], EXTEND) < CLOSE
    assert world.step(backend, [a, b], [3, 1], ForwardMode.MIXED) < CLOSE
    assert world.step(backend, [b, a], [1, 1], DECODE) < CLOSE


def test_the_backend_says_what_was_decided_and_what_sglang_asks() -> None:
    backend = World(16, (-1, 20)).backend()

    assert "torch/sdpa" in backend.explain()
    assert backend.get_cuda_graph_seq_len_fill_value() == 0
    assert not backend.support_triton()  # on a CPU
