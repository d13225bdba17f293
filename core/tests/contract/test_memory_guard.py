"""What a call writes is writable, and shares no memory with what it reads: refused before the cache is written."""

from __future__ import annotations

import pytest
import torch

from attnplug.contract import split_kv
from attnplug.contract.guards.memory import has_apart_rows, share_memory
from attnplug.errors import TensorError
from core.tests.contract.test_forward import Call
from core.tests.contract.toy import ToyBackend
from core.tests.contract.world import (
    NUM_BLOCKS,
    is_clear,
    make_backend,
    make_layer,
    refused,
)

ROWS, WIDTH, HEADS = 5, 32, 4


def rows(stride, width, size=4096):
    return torch.zeros(size).as_strided((ROWS, width), (stride, 1))


@pytest.mark.parametrize("stride", [0, 1, WIDTH - 1])
def test_rows_of_the_output_do_not_overlap(stride):
    call = Call()

    with refused(TensorError, problem="output of", expected="its rows apart in memory"):
        call.run(output=rows(stride, WIDTH))
    assert call.is_untouched()


@pytest.mark.parametrize("stride", [0, 1, HEADS - 1])
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_of_the_lse_do_not_overlap(stride, transposed):
    call = Call(return_lse=True)
    strides = (1, stride) if transposed else (stride, 1)

    with refused(TensorError, problem="lse of", expected="its rows apart in memory"):
        call.run(lse=torch.zeros(64).as_strided((ROWS, HEADS), strides))
    assert call.is_untouched()


def test_rows_that_are_apart_are_written():
    call = Call(return_lse=True)
    lse = torch.zeros(HEADS, ROWS).T

    call.run(output=rows(WIDTH + 8, WIDTH), lse=lse)

    assert lse.all()


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_the_output_is_not_an_input(name):
    call = Call()
    memory = torch.randn(ROWS * WIDTH)
    heads = (HEADS if name == "query" else 2, 8)
    shared = memory[: ROWS * heads[0] * 8].view(ROWS, *heads)

    with refused(TensorError, problem=f"output and {name} that share memory", fix="torch.empty"):
        call.run(**{name: shared, "output": memory.view(ROWS, WIDTH)})
    assert call.is_untouched()


def test_columns_of_one_tensor_are_apart():
    call = Call()
    fused = torch.randn(ROWS, 32 + 16 + 16 + 32)
    query, key, value, output = fused.split([32, 16, 16, 32], dim=1)

    for _ in range(2):
        call.run(
            query=query.unflatten(1, (4, 8)),
            key=key.unflatten(1, (2, 8)),
            value=value.unflatten(1, (2, 8)),
            output=output,
        )

    with refused(TensorError, problem="output and value"):
        call.run(output=fused[:, 60:92])


@pytest.mark.parametrize("name", ["output", "lse", "query", "key", "value"])
def test_nothing_is_in_the_cache(name):
    call = Call(return_lse=True)
    memory = call.parts["kv_cache"].storages[0].view(torch.float32)
    shape = {"output": (ROWS, WIDTH), "lse": (ROWS, HEADS), "query": (ROWS, HEADS, 8)}.get(name, (ROWS, 2, 8))
    shared = memory[-1024:][: torch.Size(shape).numel()].view(shape)
    call.parts["lse"] = torch.zeros(ROWS, HEADS)

    with refused(TensorError, problem="share memory"):
        call.run(**{name: shared})
    assert call.is_untouched()


def test_the_lse_is_not_the_output():
    call = Call(return_lse=True)
    memory = torch.zeros(ROWS * WIDTH)

    with refused(TensorError, problem="lse and output"):
        call.run(output=memory.view(ROWS, WIDTH), lse=memory[-ROWS * HEADS :].view(ROWS, HEADS))
    assert call.is_untouched()


def test_memory_is_compared_by_address_whatever_holds_it():
    call = Call()
    array = call.parts["kv_cache"].storages[0].view(torch.float32).numpy()

    with refused(TensorError, problem="output and the KV cache"):
        call.run(output=torch.from_numpy(array[2000 : 2000 + ROWS * WIDTH]).view(ROWS, WIDTH))
    assert call.is_untouched()


def test_a_call_that_fit_does_not_vouch_for_the_next():
    call = Call()
    pool = torch.zeros(4096)
    cache = call.backend.bind_cache(split_kv(pool.view(2, NUM_BLOCKS, 4, 2, 8), "joint", "NHD", 8))

    call.run(kv_cache=cache)
    with refused(TensorError, problem="output and the KV cache"):
        call.run(output=pool[-ROWS * WIDTH :].view(ROWS, WIDTH))
    call.run(output=torch.zeros(ROWS, WIDTH))
    with refused(TensorError, problem="output and the KV cache"):
        call.run(output=pool[-ROWS * WIDTH :].view(ROWS, WIDTH))


# --- inference mode and gradients ---------------------------------------------------------------------------------


def inference(shape):
    with torch.inference_mode():
        return torch.zeros(shape)


def bound(backend, pool):
    """Return a joint KV cache over a pool."""
    return backend.bind_cache(split_kv(pool, "joint", "NHD", 8))


POOL = (2, NUM_BLOCKS, 4, 2, 8)


@pytest.mark.parametrize("name", ["output", "lse", "kv_cache"])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
def test_inference_tensors_are_written_in_inference_mode(name, mode):
    call = Call(return_lse=True)
    made = inference({"output": (ROWS, WIDTH), "lse": (ROWS, HEADS), "kv_cache": POOL}[name])
    before = call.parts["kv_cache"]
    call.parts["lse"] = torch.zeros(ROWS, HEADS)

    with mode(), refused(TensorError, problem="made in inference mode", fix="torch.inference_mode()"):
        call.run(**{name: bound(call.backend, made) if name == "kv_cache" else made})
    assert call.is_untouched()
    assert is_clear(before)
    with torch.inference_mode():
        call.run()
    assert not call.is_untouched()


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_inference_tensors_are_read_anywhere(name):
    call = Call()

    call.run(**{name: inference(call.parts[name].shape)})

    assert not call.is_untouched()


@pytest.mark.parametrize("name", ["lse", "kv_cache"])
def test_nothing_that_is_written_requires_a_gradient(name):
    call = Call(return_lse=True)
    call.parts["lse"] = torch.zeros(ROWS, HEADS)
    if name == "lse":
        call.parts[name].requires_grad_()
    else:
        call.parts[name] = bound(call.backend, torch.zeros(POOL, requires_grad=True))

    with refused(TensorError, problem="requires a gradient", expected="no backward", fix="torch.no_grad()"):
        call.run()
    assert call.is_untouched()
    with torch.no_grad():
        call.run()


def written():
    backend = make_backend()
    impl = make_layer(backend, cache_write="host")
    return impl, torch.ones(3, 2, 8), torch.ones(3, 2, 8), backend.make_cache(NUM_BLOCKS), torch.tensor([4, 5, 6])


def test_a_write_apart_from_forward_is_checked_likewise():
    impl, key, value, cache, slots = written()
    memory, backend = cache.storages[0].view(torch.float32), impl.backend

    with refused(TensorError, problem="the KV cache and key"):
        impl.write_kv(memory[64:112].view(3, 2, 8), value, cache, slots)
    with refused(TensorError, problem="made in inference mode"):
        impl.write_kv(key, value, bound(backend, inference(POOL)), slots)
    with refused(TensorError, problem="value that requires a gradient"):
        impl.write_kv(key, value.clone().requires_grad_(), cache, slots)
    with refused(TensorError, problem="a KV cache that requires a gradient"):
        impl.write_kv(key, value, bound(backend, torch.zeros(POOL, requires_grad=True)), slots)
    assert is_clear(cache)
    impl.write_kv(key, value, cache, slots)
    assert cache.k.sum() + cache.v.sum() == 96


def test_blocks_are_moved_into_writable_caches():
    backend = make_backend()
    good = bound(backend, torch.ones(2, 4, 4, 2, 8))
    caches = [good, bound(backend, inference((2, 4, 4, 2, 8)))]

    with refused(TensorError, problem="made in inference mode"):
        backend.copy_blocks(caches, [(1, 2)])
    with refused(TensorError, problem="requires a gradient"):
        backend.swap_blocks(good, bound(backend, torch.ones(2, 4, 4, 2, 8, requires_grad=True)), [(1, 2)])
    assert good.k.eq(1).all()


def test_several_cache_tensors_are_checked_each():
    impl_class = type("Impl", (ToyBackend.impl_class,), {"run": lambda *_: None})
    call = Call(type("Backend", (ToyBackend,), {"impl_class": impl_class}), head_size_v=16, kv_cache_form="split")
    cache = call.parts["kv_cache"]

    call.run()
    with refused(TensorError, problem="output and the KV cache"):
        call.run(output=cache.v.view(-1)[: ROWS * 64].view(ROWS, 64))
    with refused(TensorError, problem="made in inference mode"):
        call.run(
            output=torch.zeros(ROWS, 64),
            kv_cache=call.backend.bind_cache({"k": cache.k, "v": inference(cache.v.shape)}),
        )


# --- by brute force -----------------------------------------------------------------------------------------------


def addresses(tensor):
    where = [0]
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        where = [place + index * stride for place in where for index in range(size)]
    return [tensor.storage_offset() + place for place in where]


def test_rows_are_apart_by_brute_force():
    for shape in ((1, 1), (1, 3), (3, 1), (3, 4), (4, 3)):
        for down in range(14):
            for across in range(14):
                tensor = torch.zeros(200).as_strided(shape, (down, across))
                places = addresses(tensor)
                if has_apart_rows(tensor):
                    assert len(set(places)) == len(places), (shape, down, across)
    assert has_apart_rows(torch.zeros(3, 4))
    assert has_apart_rows(torch.zeros(4, 3).T)


def test_shared_memory_by_brute_force():
    memory = torch.zeros(400)
    for step in (4, 7, 12):
        for other_step in (4, 12):
            for offset in range(40):
                one, other = (
                    memory.as_strided((5, 4), (step, 1), 20),
                    memory.as_strided((4, 3), (other_step, 1), offset),
                )
                common = set(addresses(one)) & set(addresses(other))
                assert share_memory(one, other) or not common
                if step == other_step == 12 and 8 <= offset <= 32:
                    assert share_memory(one, other) is bool(common)
