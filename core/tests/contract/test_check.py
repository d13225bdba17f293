from __future__ import annotations

import pickle

import pytest
from attrs import frozen

from attnplug.contract import AttentionImpl, Backend, Metadata, check_backend_class
from attnplug.errors import PluginContractError
from core.tests.contract.toy import ToyBackend, ToyImpl


def with_builder(**body):
    return type("Bad", (ToyBackend,), {"builder_class": type("B", (ToyBackend.builder_class,), body)})


def with_state(**body):
    return type("Bad", (ToyBackend,), {"state_class": type("S", (ToyBackend.state_class,), body)})


def with_impl(**body):
    return type("Bad", (ToyBackend,), {"impl_class": type("Impl", (ToyImpl,), body)})


class HalfImpl(AttentionImpl):
    cache_write = "forward"


class UndeclaredImpl(AttentionImpl):
    def run(self, query, key, value, kv_cache, metadata, output, lse):
        pass


class SilentImpl(UndeclaredImpl):
    cache_write = "host"


class Empty(Backend):
    pass


@pytest.mark.parametrize("declared", ["forward", "host", "either", {"prefill": "host", "decode": "forward"}])
def test_a_backend_passes(declared):
    cls = with_impl(cache_write=declared)

    assert check_backend_class(cls, "toy/plain") is cls


@pytest.mark.parametrize("value", [None, ToyImpl, ToyBackend.__new__, "ToyBackend", object()])
def test_only_a_backend_class_is_one(value):
    with pytest.raises(PluginContractError) as caught:
        check_backend_class(value, "toy/plain")

    assert "attnplug_backend of toy/plain returned" in caught.value.problem
    assert "attnplug.contract.Backend" in caught.value.expected


@pytest.mark.parametrize(
    ("cls", "finding"),
    [
        (Empty, "impl_class is not set"),
        (type("Bad", (ToyBackend,), {"impl_class": dict}), "no subclass of AttentionImpl"),
        (type("Bad", (ToyBackend,), {"impl_class": HalfImpl}), "impl_class does not implement run"),
        (type("Bad", (ToyBackend,), {"impl_class": UndeclaredImpl}), "does not declare cache_write"),
        (type("Bad", (ToyBackend,), {"impl_class": SilentImpl}), "update_kv_cache is not overridden"),
        (with_impl(cache_write="sometimes"), "cache_write is 'sometimes'"),
        (with_impl(cache_write={"prefill": "host"}), "cache_write is {'prefill': 'host'}"),
        (with_impl(query_quantization="both"), "query_quantization is 'both'"),
        (with_impl(static_scales={"p"}), "static_scales is {'p'}"),
        (with_impl(static_scales="kv"), "static_scales is 'kv'"),
        (with_impl(forward=lambda self: None), "Impl overrides forward"),
        (with_impl(write_kv=lambda self: None), "Impl overrides write_kv"),
        (type("Bad", (ToyBackend,), {"make_impl": lambda self, layer: None}), "Bad overrides make_impl"),
        (type("Bad", (ToyBackend,), {"builder_class": dict}), "no subclass of MetadataBuilder"),
        (type("Bad", (ToyBackend,), {"metadata_class": 3}), "metadata_class is 3"),
        (type("Bad", (ToyBackend,), {"state_class": None}), "state_class is None"),
        (
            type("Bad", (ToyBackend,), {"builder_class": type("B", (ToyBackend.builder_class,), {"build": None})}),
            "B overrides build",
        ),
        (
            with_builder(plan_batch=lambda self, batch: None),
            "B.plan_batch(self, batch) is called with (batch, fast=..., graph=...",
        ),
        (with_builder(plan_batch=None), "B.plan_batch is None, no method"),
        (with_builder(__init__=lambda self: None), "B.__init__(self) is called with (backend, impls, state)"),
        (with_builder(can_capture=lambda self: True), "B.can_capture(self) is called with (batch)"),
        (with_builder(replan_block_table=lambda self, batch: None), "is called with (metadata, batch)"),
        (
            with_builder(plan_next_step=lambda self, batch: None),
            "B.plan_next_step(self, batch) is called with (metadata,",
        ),
        (with_state(__init__=lambda self, backend: None), "is called with (backend, limits, device, parallel)"),
        (with_impl(run=lambda self, query, key, value: None), "Impl.run(self, query, key, value) is called"),
        (
            with_impl(update_kv_cache=lambda self, key, value: None),
            "is called with (key, value, kv_cache, slot_mapping)",
        ),
        (with_impl(__init__=lambda self, layer: None), "Impl.__init__(self, layer) is called with (layer, backend)"),
        (type("Bad", (ToyBackend,), {"cache_tensors": lambda self: {}}), "is called with (num_blocks)"),
    ],
)
def test_a_fault_is_found(cls, finding):
    with pytest.raises(PluginContractError) as caught:
        check_backend_class(cls, "toy/plain")

    assert finding in caught.value.problem
    assert "toy/plain" in caught.value.problem
    assert "ATTNPLUG_BLOCK=toy" in caught.value.fix
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


@pytest.mark.parametrize(
    "body",
    [
        {"plan_batch": lambda self, batch, **rest: None},
        {"plan_batch": lambda self, batch, fast=False, graph=None, more=1: None},
        {"plan_batch": lambda *given, **named: None},
        {"can_capture": staticmethod(lambda batch: True)},
        {"describe": lambda self, batch, mine: None},
    ],
)
def test_methods_may_take_more(body):
    cls = with_builder(**body)

    assert check_backend_class(cls, "toy/plain") is cls


def test_every_fault_is_named_at_once():
    cls = type("Bad", (ToyBackend,), {"impl_class": UndeclaredImpl, "state_class": None, "make_cache": None})

    with pytest.raises(PluginContractError) as caught:
        check_backend_class(cls, "toy/plain")

    assert all(text in caught.value.problem for text in ("state_class", "cache_write", "make_cache"))


def test_metadata_is_decorated():
    class Loose(Metadata):
        number: int = 0

    @frozen(eq=False, kw_only=True)
    class Tight(Metadata):
        number: int = 0

    with pytest.raises(PluginContractError, match="annotates number and is not decorated"):
        check_backend_class(type("Bad", (ToyBackend,), {"metadata_class": Loose}), "toy/plain")
    good = type("Good", (ToyBackend,), {"metadata_class": Tight})
    assert check_backend_class(good, "toy/plain") is good
