"""The forms of SGLang's pools: separate and joint, pages of heads first, and K/V that come back from the CPU."""

from __future__ import annotations

from types import SimpleNamespace as Names
from typing import Any

import pytest
import torch

from attnplug.errors import NotNegotiatedError
from hosts.sglang.tests.rig import ForwardMode, World

EXTEND, DECODE, MIXED = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED
CLOSE = 1e-5


def agreement(backend: Any) -> Any:
    """Return what was agreed on for the steps of a backend."""
    (kind,) = backend._kinds.values()
    (group,) = kind.plan.groups
    return group.selection.agreement


def steps(world: World, backend: Any) -> float:
    """Run some steps, and return their largest error."""
    a, b = world.new(), world.new()
    return max(
        world.step(backend, [a, b], [17, 33], EXTEND),
        world.step(backend, [b, a], [21, 1], MIXED),
        world.step(backend, [a, b], [1, 1], DECODE),
    )


def separate(world: World) -> None:
    """Put keys and values of each layer of the pool into tensors of their own."""
    for buffers in (world.pool.k_buffer, world.pool.v_buffer):
        buffers[:] = [buffer.clone() for buffer in buffers]


def join(world: World) -> None:
    """Put keys and values of each layer of the pool into one tensor."""
    for i, keys in enumerate(world.pool.k_buffer):
        both = torch.zeros(2, *keys.shape, dtype=keys.dtype)
        world.pool.k_buffer[i], world.pool.v_buffer[i] = both


@pytest.mark.parametrize("page", [1, 16])
def test_separate_keys_and_values(page: int) -> None:
    world = World(page, (-1, -1))
    separate(world)
    backend = world.backend()
    assert agreement(backend).kv_cache_form == "split"
    assert steps(world, backend) < CLOSE


@pytest.mark.parametrize("page", [1, 16])
def test_keys_and_values_in_one_tensor(page: int) -> None:
    world = World(page, (-1, -1))
    join(world)
    backend = world.backend()
    assert agreement(backend).kv_cache_form == "joint"
    assert steps(world, backend) < CLOSE
    assert all(buffer.any() for buffer in (*world.pool.k_buffer, *world.pool.v_buffer))


def test_pages_of_heads_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_USE_HND_KVCACHE", "1")
    world = World(16, (-1, -1))
    assert world.pool.use_hnd
    backend = world.backend()
    assert agreement(backend).kv_layout == "HND"
    assert steps(world, backend) < CLOSE


def test_keys_that_come_back_from_the_cpu_are_waited_for() -> None:
    world = World(16, (-1, -1))
    waited: list[int] = []
    world.pool.layer_transfer_counter = Names(wait_until=waited.append)
    backend = world.backend()
    a = world.new()
    assert world.step(backend, [a], [17], EXTEND) < CLOSE
    for lens, mode in (([5], EXTEND), ([1], DECODE)):
        waited.clear()
        assert world.step(backend, [a], lens, mode) < CLOSE
        assert set(waited) == {0, 1}  # each step, each layer


@pytest.mark.parametrize(
    ("name", "value", "named"),
    [
        ("is_quantized_kv_cache", True, "blocks of scales"),
        ("kv_cache_layout", "vectorized_5d", "vectorized_5d"),
        ("kv_cache_layout", "page_major", "page_major"),
        ("post_capture_active", True, "after graphs are captured"),
    ],
)
def test_forms_that_are_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: Any, named: str) -> None:
    world = World(16, (-1, -1))
    vars(world.pool).pop(name, None)  # some are properties
    monkeypatch.setattr(type(world.pool), name, value, raising=False)
    with pytest.raises(NotNegotiatedError, match=named):
        world.backend()
