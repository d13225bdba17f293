from __future__ import annotations

import pytest
import torch

from attnplug.contract import KVCache, forward_context
from attnplug.errors import CacheError, LayerError, NotNegotiatedError, PluginContractError, TensorError
from core.tests.contract.toy import ToyBackend, ToyImpl
from core.tests.contract.world import (
    NUM_BLOCKS,
    calls_of,
    is_clear,
    make_backend,
    make_batch,
    make_builder,
    make_layer,
    make_qkv,
    refused,
    same,
)

BOTH = {"prefill", "decode"}


def writing(declared):
    """Return a backend whose implementation declares this `cache_write`."""
    impl = type("Impl", (ToyImpl,), {"cache_write": declared})
    return make_backend(type("Backend", (ToyBackend,), {"impl_class": impl}))


def test_where_there_is_a_choice_the_layer_chooses():
    backend = make_backend()

    assert (make_layer(backend).forward_writes, make_layer(backend).host_writes) == (BOTH, set())
    host = make_layer(backend, cache_write="host")
    assert (host.forward_writes, host.host_writes) == (set(), BOTH)


def test_a_writer_is_declared_per_phase():
    impl = make_layer(writing({"prefill": "host", "decode": "forward"}))

    assert (impl.forward_writes, impl.host_writes) == ({"decode"}, {"prefill"})


@pytest.mark.parametrize(("declared", "wanted"), [("forward", "host"), ("host", "forward")])
def test_a_writer_that_is_not_there_is_refused(declared, wanted):
    with refused(NotNegotiatedError, problem=f"cache_write={wanted!r}", expected=f"written by {declared!r}"):
        make_layer(writing(declared), cache_write=wanted)


def test_a_writer_is_forward_or_the_host():
    with refused(LayerError, problem="cache_write='nobody'"):
        make_layer(make_backend(), cache_write="nobody")


@pytest.mark.parametrize(
    ("requested", "fields"), [({"kv_sharing": True}, {"kv_sharing_target": "layers.9"}), ({"paged": False}, {})]
)
def test_a_layer_without_its_own_cache_writes_nothing(requested, fields):
    impl = make_layer(make_backend(**requested), **fields)

    assert (impl.forward_writes, impl.host_writes) == (set(), set())


def test_write_kv_writes_the_slots_and_skips_padding():
    backend = make_backend()
    impl = make_layer(backend, cache_write="host")
    cache = backend.make_cache(NUM_BLOCKS)
    _, key, value, _ = make_qkv(backend, 3)

    impl.write_kv(key, value, cache, torch.tensor([9, -1, 4]))

    expected = backend.make_cache(NUM_BLOCKS)
    for token, block, offset in ((0, 2, 1), (2, 1, 0)):
        expected.k[block, offset] = key[token]
        expected.v[block, offset] = value[token]
    assert same(cache, expected)


class Recorder(ToyImpl):
    """Records the slots of its last write."""

    seen = None

    def update_kv_cache(self, key, value, kv_cache, slot_mapping):
        self.seen = slot_mapping


RecordingBackend = type("Backend", (ToyBackend,), {"impl_class": Recorder})


def test_slots_on_a_device_are_not_read():
    backend = make_backend(RecordingBackend, device="meta")
    impl = make_layer(backend, cache_write="host")
    rows, slots = torch.zeros(1, 2, 8, device="meta"), torch.tensor([4], device="meta")

    impl.write_kv(rows, rows, backend.make_cache(2), slots)

    assert impl.wrapped.seen is slots


def test_nothing_is_written_twice():
    backend = make_backend()
    cache = backend.make_cache(NUM_BLOCKS)
    _, key, value, _ = make_qkv(backend, 1)

    with refused(
        CacheError, problem="write_kv was called", expected="nothing is written twice", fix="cache_write='host'"
    ):
        make_layer(backend).write_kv(key, value, cache, torch.tensor([4]))

    assert is_clear(cache)


@pytest.mark.parametrize(
    ("kind", "given", "change"),
    [
        (CacheError, "slots from 128", {"slot_mapping": torch.tensor([128])}),
        (
            CacheError,
            "slot 8 was given to two tokens",
            {"slot_mapping": torch.tensor([8, -1, 8]), "key": torch.zeros(3, 2, 8), "value": torch.zeros(3, 2, 8)},
        ),
        (CacheError, "slots from -2", {"slot_mapping": torch.tensor([-2])}),
        (CacheError, "slots from 3", {"slot_mapping": torch.tensor([3])}),
        (TensorError, "slot_mapping of (1,) int32", {"slot_mapping": torch.tensor([4], dtype=torch.int32)}),
        (TensorError, "slot_mapping of (2,)", {"slot_mapping": torch.tensor([4, 5])}),
        (TensorError, "slot_mapping of (1, 1)", {"slot_mapping": torch.tensor([[4]])}),
        (TensorError, "without K/V", {"value": None}),
        (TensorError, "slot_mapping of (1,) int64 on meta", {"slot_mapping": torch.tensor([4], device="meta")}),
        (TensorError, "key of (1, 3, 8)", {"key": torch.zeros(1, 3, 8)}),
        (TensorError, "on meta", {"key": torch.zeros(1, 2, 8, device="meta")}),
        (CacheError, "(2, 32, 4, 2, 4)", {"kv_cache": torch.zeros(2, 32, 4, 2, 4)}),
    ],
)
def test_a_write_that_does_not_fit_writes_nothing(kind, given, change):
    backend = make_backend()
    impl = make_layer(backend, cache_write="host")
    _, key, value, _ = make_qkv(backend, 1)
    call = {"key": key, "value": value, "kv_cache": backend.make_cache(NUM_BLOCKS), "slot_mapping": torch.tensor([4])}
    call |= change

    with refused(kind, problem=given):
        impl.write_kv(**call)

    assert not isinstance(call["kv_cache"], KVCache) or is_clear(call["kv_cache"])


def test_a_host_write_needs_an_implementation():
    class Silent(ToyImpl):
        cache_write = "host"
        update_kv_cache = ToyImpl.__mro__[1].update_kv_cache

    backend = make_backend(type("Backend", (ToyBackend,), {"impl_class": Silent}))
    _, key, value, _ = make_qkv(backend, 1)

    with pytest.raises(PluginContractError, match="has no update_kv_cache"):
        make_layer(backend).write_kv(key, value, backend.make_cache(2), torch.tensor([4]))


def test_a_profiling_run_writes_nothing():
    backend = make_backend(RecordingBackend)
    impl = make_layer(backend, cache_write="host")
    _, key, value, _ = make_qkv(backend, 1)
    with forward_context({"layers.0": make_builder(backend, impl).build(make_batch([1], [3]))}):
        impl.write_kv(key, value, None, torch.tensor([4]))
        impl.write_kv_op(key, value, None)
        assert impl.wrapped.seen is None

        impl.write_kv_op(key, value, backend.make_cache(NUM_BLOCKS))
        assert impl.wrapped.seen is not None


def test_a_layer_chooses_where_a_phase_leaves_the_choice():
    mixed = {"prefill": "either", "decode": "forward"}
    host, own = make_layer(writing(mixed), cache_write="host"), make_layer(writing(mixed))
    assert (host.forward_writes, host.host_writes) == ({"decode"}, {"prefill"})
    assert (own.forward_writes, own.host_writes) == (BOTH, set())


def test_an_encoders_rows_have_one_writer():
    impl = type("Impl", (ToyImpl,), {"cache_write": {"prefill": "host", "decode": "forward"}})
    backend = make_backend(type("Backend", (ToyBackend,), {"impl_class": impl}), attn_type="encoder_decoder")
    with pytest.raises(PluginContractError, match="an encoder's, and belong to no phase"):
        make_layer(backend)


def test_a_write_compares_the_form_of_its_tensors_once():
    backend = make_backend()
    impl, cache = make_layer(backend, cache_write="host"), backend.make_cache(NUM_BLOCKS)
    _, key, value, _ = make_qkv(backend, 3)
    writes = [torch.tensor([9, -1, 4]), torch.tensor([5, 6, 7])]

    first, second = [calls_of(lambda slots=slots: impl.write_kv(key, value, cache, slots))[0] for slots in writes]

    forms = {"_check_written", "_check_pair", "_check_rows", "_check_bound"}
    assert {name.partition(" ")[0] for name in first} & forms == forms - {"_check_bound"}
    assert not {name.partition(" ")[0] for name in second} & forms


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("key", torch.zeros(3, 2, 16)[..., ::2]),
        ("value", torch.zeros(3, 2, 8, dtype=torch.float16)),
        ("slot_mapping", torch.tensor([9, 5, 4], dtype=torch.int32)),
        ("slot_mapping", torch.tensor([9, 5, 4, 6])),
    ],
)
def test_a_form_that_was_written_is_that_of_all_tensors(name, tensor):
    backend = make_backend()
    impl, cache = make_layer(backend, cache_write="host"), backend.make_cache(NUM_BLOCKS)
    _, key, value, _ = make_qkv(backend, 3)
    call = {"key": key, "value": value, "kv_cache": cache, "slot_mapping": torch.tensor([-1, -1, -1])}
    impl.write_kv(**call)

    with refused(TensorError, problem=f"{name} of"):
        impl.write_kv(**{**call, name: tensor})
    assert is_clear(cache)
