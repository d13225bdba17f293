from __future__ import annotations

import inspect
import pickle

import pytest
from attrs import frozen

from attnplug.contract import AttentionImpl, Backend, Metadata, MetadataBuilder, State, check_backend_class
from attnplug.contract.calls.check import check_backend
from attnplug.errors import PluginContractError
from core.tests.contract.toy import ToyBackend, ToyImpl
from core.tests.contract.world import limits, make_backend, make_builder, make_layer, refused


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
        (
            with_impl(forward=lambda self: None),
            "Impl.forward hides AttentionImpl.forward of the contract: override run",
        ),
        (
            with_impl(write_kv=lambda self: None),
            "Impl.write_kv hides AttentionImpl.write_kv of the contract: override update_kv_cache",
        ),
        (
            type("Bad", (ToyBackend,), {"make_impl": lambda self, layer: None}),
            "Bad.make_impl hides Backend.make_impl of the contract: rename it",
        ),
        (type("Bad", (ToyBackend,), {"builder_class": dict}), "no subclass of MetadataBuilder"),
        (type("Bad", (ToyBackend,), {"metadata_class": 3}), "metadata_class is 3"),
        (type("Bad", (ToyBackend,), {"state_class": None}), "state_class is None"),
        (
            type("Bad", (ToyBackend,), {"builder_class": type("B", (ToyBackend.builder_class,), {"build": None})}),
            "B.build hides MetadataBuilder.build of the contract: override plan_batch",
        ),
        (
            with_builder(plan_batch=lambda self, batch: None),
            "B.plan_batch(self, batch) is called with (batch, split, fast=..., graph=...",
        ),
        (with_builder(plan_batch=None), "B.plan_batch is None, no method"),
        (with_builder(__init__=lambda self: None), "B.__init__(self) is called with (backend, impls, state)"),
        (with_builder(can_capture=lambda self: True), "B.can_capture(self) is called with (batch)"),
        (with_builder(replan_block_table=lambda self, batch: None), "is called with (metadata, batch, split)"),
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
        {"plan_batch": lambda self, batch, split, **rest: None},
        {"plan_batch": lambda self, batch, split, fast=False, graph=None, more=1: None},
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


# --- names that core reserves ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "finding"),
    [
        (
            with_impl(plan_of=lambda self, batch: None),
            "Impl.plan_of hides AttentionImpl.plan_of of the contract",
        ),
        (with_impl(forward_op=None), "Impl.forward_op hides"),
        (with_impl(scale=property(lambda self: 1.0)), "Impl.scale hides AttentionImpl.scale"),
        (with_impl(window=lambda self: None), "Impl.window hides"),
        (with_impl(_guard=None), "Impl._guard hides"),
        (with_builder(limits=3), "B.limits hides MetadataBuilder.limits"),
        (with_builder(persist=lambda self, tensor: tensor), "B.persist hides"),
        (with_builder(advance_step=lambda self: None), "advance_step of the contract: override plan_next_step"),
        (with_state(parallel=None), "S.parallel hides State.parallel"),
        (with_state(_graphs={}), "S._graphs hides"),
        (type("Bad", (ToyBackend,), {"id": "mine"}), "Bad.id hides Backend.id"),
        (type("Bad", (ToyBackend,), {"selection": None}), "Bad.selection hides"),
        (type("Bad", (ToyBackend,), {"_spec": None}), "Bad._spec hides"),
    ],
)
def test_names_of_core_are_reserved(cls, finding):
    with pytest.raises(PluginContractError) as caught:
        check_backend_class(cls, "toy/plain")

    assert finding in caught.value.problem


def test_a_clash_in_a_shared_base_is_named_by_the_class_that_has_it():
    class Mixin:
        def plan_of(self, layer):
            return None

    cls = type("Bad", (ToyBackend,), {"impl_class": type("Impl", (Mixin, ToyImpl), {})})

    with pytest.raises(PluginContractError, match=r"Mixin\.plan_of hides AttentionImpl\.plan_of"):
        check_backend_class(cls, "toy/plain")


def test_names_may_be_annotated_anew():
    class Impl(ToyImpl):
        backend: ToyBackend
        scale: float

    cls = type("Good", (ToyBackend,), {"impl_class": Impl})

    assert check_backend_class(cls, "toy/plain") is cls


def setting(base, **attributes):
    """Return a constructor that sets attributes after the contract's own one."""

    def construct(self, *args):
        base.__init__(self, *args)
        vars(self).update(attributes)

    return construct


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("scale", 2.0),
        ("window", None),
        ("layer_name", 1),
        ("plan_of", lambda layer: None),
        ("forward", lambda *given: None),
        ("_guard", object()),
        ("cache_roles", ("kv",)),
    ],
)
def test_attributes_of_an_implementation_are_not_replaced(name, value):
    cls = with_impl(__init__=setting(ToyImpl, **{name: value}))
    backend = make_backend(check_backend_class(cls, "toy/plain"))

    if name == "layer_name":
        assert make_layer(backend).layer_name == value
        return
    with refused(PluginContractError, f"Impl.__init__ sets {name}, which hides", "core sets", f"rename {name} in Impl"):
        make_layer(backend)


def test_attributes_may_be_set_to_what_they_are():
    cls = with_impl(__init__=setting(ToyImpl, scale=8**-0.5, window=(-1, -1), run=len))

    assert make_layer(make_backend(cls)).run is len


def test_attributes_of_the_other_parts_are_not_replaced():
    builder = with_builder(__init__=setting(ToyBackend.builder_class, plan_groups={}))
    state = with_state(__init__=setting(State, limits=None))
    backend = type("Own", (ToyBackend,), {"__init__": setting(ToyBackend, selection=3, agreement=4)})

    with refused(PluginContractError, "B.__init__ sets plan_groups, which hides MetadataBuilder.plan_groups"):
        make_builder(make_backend(builder))
    with refused(PluginContractError, "S.__init__ sets limits, which hides State.limits"):
        make_backend(state).make_state(limits())
    with refused(PluginContractError, "Own.__init__ sets agreement, which", fix="rename agreement, selection in Own"):
        check_backend(make_backend(backend))


def test_a_state_may_make_its_workspace_at_once():
    class Eager(State):
        def __init__(self, backend, limits, device, parallel=None):
            super().__init__(backend, limits, device, parallel)
            assert self.workspace.numel() == 0

    backend = make_backend(type("Good", (ToyBackend,), {"state_class": Eager}))

    assert backend.make_state(limits()).limits == limits()


@pytest.mark.parametrize("base", [AttentionImpl, Backend, MetadataBuilder, State])
def test_what_core_sets_is_declared(base):
    backend = make_backend()
    builder = make_builder(backend)
    made = {Backend: backend, MetadataBuilder: builder, State: builder.state, AttentionImpl: builder.impls[0]}[base]
    declared = {name for name, text in inspect.get_annotations(base).items() if not text.startswith("ClassVar")}
    check_backend(backend)

    assert set(vars(made)) <= declared
    assert declared - set(vars(made)) <= {"selection"}
