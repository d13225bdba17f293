"""Pools of 8-bit floats: the scales of each layer, what is written with them, and scales that change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from attnplug.errors import LayerError
from hosts.sglang.tests.rig import ForwardMode, World, worst

EXTEND, DECODE, MIXED = ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED
CLOSE = 1e-4
FP8 = torch.float8_e4m3fn
UNEVEN = (0.3, 0.07)  # no powers of 2, with which the rounded values are the same


def rounded(data: Any, scales: tuple[float, float]) -> Any:
    """Return the data of a step as the pool has it."""

    def one(tensor: torch.Tensor, scale: float) -> torch.Tensor:
        return (tensor / scale).to(FP8).float() * scale

    return [(q, one(k, scales[0]), one(v, scales[1])) for q, k, v in data]


def error(
    world: World, backend: Any, requests: list[int], lens: list[int], mode: Any, scales: Any = (1.0, 1.0)
) -> float:
    """Run a step, and return its largest error."""
    step, data = world.batch(requests, lens, mode), world.qkv(sum(lens))
    backend.init_forward_metadata(step)
    return worst(world.run(backend, step, data), world.expected(requests, lens, rounded(data, scales)))


@pytest.mark.parametrize("options", [{}, {"swa": True}, {"sinks": True, "cap": 5.0}])
@pytest.mark.parametrize("scales", [None, UNEVEN])
@pytest.mark.parametrize("page", [1, 16])
def test_fp8_pools(page: int, scales: tuple[float, float] | None, options: dict[str, Any]) -> None:
    world = World(page, (-1, 20), kv_dtype=FP8, scales=scales, **options)
    backend = world.backend()
    a, b = world.new(), world.new()
    used = scales or (1.0, 1.0)
    assert error(world, backend, [a, b], [17, 33], EXTEND, used) < CLOSE
    assert error(world, backend, [b, a], [9, 1], MIXED, used) < CLOSE
    assert error(world, backend, [b, a], [1, 1], DECODE, used) < CLOSE
    if scales:  # the scales matter
        assert error(world, backend, [b, a], [1, 1], DECODE) > CLOSE


def test_keys_that_sglang_wrote_are_read_with_its_scales() -> None:
    from sglang.srt.mem_cache.memory_pool import KVWriteLoc  # noqa: PLC0415 - the rig lets SGLang import

    world = World(16, (-1, 20), kv_dtype=FP8, scales=UNEVEN)
    backend = world.backend()
    a, b = world.new(), world.new()
    assert error(world, backend, [a, b], [17, 33], EXTEND, UNEVEN) < CLOSE
    step, data = world.batch([b, a], [1, 1], DECODE), world.qkv(2)
    for layer, (_, k, v) in zip(world.layers, data, strict=True):
        world.pool.set_kv_buffer(layer.attn, KVWriteLoc(step.out_cache_loc, None), k.clone(), v.clone(), *UNEVEN)
    backend.init_forward_metadata(step)
    found = world.run(backend, step, data, save=False)
    assert worst(found, world.expected([b, a], [1, 1], rounded(data, UNEVEN))) < CLOSE


def test_scales_of_a_pool_in_the_dtype_of_the_model_are_not_read() -> None:
    """SGLang reads them in quantized pools alone, too."""
    world = World(16, (-1, 20), scales=UNEVEN)
    backend = world.backend()
    a, b = world.new(), world.new()
    assert world.step(backend, [a, b], [17, 33], EXTEND) < 1e-5
    assert world.step(backend, [b, a], [1, 1], DECODE) < 1e-5


def load_again(world: World, scales: tuple[float, float]) -> None:
    """Replace the scales, as SGLang does where it loads weights while it runs."""
    for layer in world.layers:
        layer.attn.k_scale_float, layer.attn.v_scale_float = scales


def test_scales_that_come_with_other_weights() -> None:
    world = World(16, (-1, 20), kv_dtype=FP8, scales=(1.0, 1.0))
    backend = world.backend()
    assert error(world, backend, [world.new()], [17], EXTEND) < CLOSE
    load_again(world, UNEVEN)
    a = world.new()  # SGLang resets the pool then
    assert error(world, backend, [a], [33], EXTEND, UNEVEN) < CLOSE
    assert error(world, backend, [a], [1], DECODE, UNEVEN) < CLOSE


def test_other_scales_than_a_graph_has_are_refused() -> None:
    world = World(16, (-1, 20), kv_dtype=FP8, scales=(1.0, 1.0))
    backend = world.backend()
    backend.init_cuda_graph_state(1, 1)
    a = world.new()
    assert error(world, backend, [a], [17], EXTEND) < CLOSE
    step = world.batch([], [], DECODE, pad=1)
    backend.init_forward_metadata_out_graph(step, in_capture=True)
    world.run(backend, step, world.qkv(1))
    load_again(world, UNEVEN)
    with pytest.raises(LayerError, match="a captured graph has the former"):
        backend.init_forward_metadata_out_graph(world.batch([a], [1], DECODE))
