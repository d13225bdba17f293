from __future__ import annotations

import inspect
import pickle
import re

import pytest
from attrs import frozen

from attnplug.contract import AttentionImpl, Backend, Metadata, MetadataBuilder, State, check_backend_class
from attnplug.contract.calls.check import check_made
from attnplug.errors import PluginContractError
from core.tests.contract.toy import ToyBackend, ToyImpl
from core.tests.contract.world import limits, make_backend, make_batch, make_builder, make_layer, make_qkv, refused


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
            "Impl.forward is never called: the engine calls forward, write run",
        ),
        (
            with_impl(write_kv=lambda self: None),
            "Impl.write_kv is never called: the engine calls write_kv, write update_kv_cache",
        ),
        (
            type("Bad", (ToyBackend,), {"make_impl": lambda self, layer: None}),
            "Bad.make_impl is never called: the engine calls make_impl, write impl_class",
        ),
        (type("Bad", (ToyBackend,), {"builder_class": dict}), "no subclass of MetadataBuilder"),
        (type("Bad", (ToyBackend,), {"metadata_class": 3}), "metadata_class is 3"),
        (type("Bad", (ToyBackend,), {"state_class": None}), "state_class is None"),
        (
            type("Bad", (ToyBackend,), {"builder_class": type("B", (ToyBackend.builder_class,), {"build": None})}),
            "B.build is never called: the engine calls build, write plan_batch",
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
    assert re.match(r"(set|write|decorate|declare|override|rename) ", caught.value.fix)
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


# --- classes without handles -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "finding"),
    [
        (with_impl(forward_op=None), "the engine calls forward_op, write run"),
        (with_impl(update_scales=lambda self: None), "the engine calls update_scales, write parameters_changed"),
        (with_builder(advance_step=lambda self: None), "the engine calls advance_step, write plan_next_step"),
        (type("Bad", (ToyBackend,), {"swap_blocks": None}), "the engine calls swap_blocks, write move_blocks"),
        (
            with_state(begin_capture=None),
            "S.begin_capture is never called: the engine calls begin_capture, write it",
        ),
        (
            type("Bad", (ToyBackend,), {"warmup": lambda self, shapes: None}),
            "Bad.warmup(self, shapes) is called with (loaded, shapes)",
        ),
    ],
)
def test_a_class_from_before_handles_is_told_what_to_write(cls, finding):
    with pytest.raises(PluginContractError) as caught:
        check_backend_class(cls, "toy/plain")

    assert finding in caught.value.problem
    assert "attnplug_kit.upgrade" in caught.value.fix


def test_a_method_of_a_shared_base_is_found_too():
    class Mixin:
        def forward(self, layer):
            return None

    cls = type("Bad", (ToyBackend,), {"impl_class": type("Impl", (Mixin, ToyImpl), {})})

    with pytest.raises(PluginContractError, match=r"Impl\.forward is never called"):
        check_backend_class(cls, "toy/plain")


def _keep(impl, given, kept):
    ToyImpl.__init__(impl, *given)
    vars(impl).update(kept)


def test_a_plugin_names_its_own_attributes_as_it_likes():
    """Core keeps what it sets in its handles: no name of a plugin's can hide one of them."""
    own = {"_guard": 1, "_builders": [], "_number": 3, "selection": 4, "graphs": {}, "name": "mine", "_run": len}
    kept = {"window": None, "scale": 9.0, "logits_soft_cap": 1.0}
    impl = with_impl(**own, run=lambda *_: None, __init__=lambda self, *of: _keep(self, of, kept)).impl_class
    builder = type("B", (MetadataBuilder,), own)
    cls = type("Good", (ToyBackend,), {"impl_class": impl, "builder_class": builder, **own})
    backend = make_backend(check_backend_class(cls, "toy/plain"))
    layer = make_layer(backend)
    query, key, value, output = make_qkv(backend, 1)

    metadata = make_builder(backend, layer).build(make_batch([1], [1]))
    layer.forward(query, key, value, backend.make_cache(4), metadata, output)

    assert (backend.name, layer.wrapped.name, backend.wrapped.name) == ("toy", "mine", "mine")
    assert (layer.window, layer.scale, layer.logits_soft_cap) == ((-1, -1), 8**-0.5, None)


def test_names_may_be_annotated_anew():
    class Impl(ToyImpl):
        backend: ToyBackend
        scale: float

    cls = type("Good", (ToyBackend,), {"impl_class": Impl})

    assert check_backend_class(cls, "toy/plain") is cls


@pytest.mark.parametrize("base", [AttentionImpl, Backend, MetadataBuilder, State])
def test_a_constructor_that_forgets_the_contracts_own_is_named(base):
    part = {AttentionImpl: "impl_class", MetadataBuilder: "builder_class", State: "state_class"}.get(base)
    forgetful = type("Own", (getattr(ToyBackend, part) if part else ToyBackend,), {"__init__": lambda *given: None})
    cls = type("Bad", (ToyBackend,), {part: forgetful}) if part else forgetful

    with refused(PluginContractError, f"holds nothing of what {base.__name__} keeps", fix="call super().__init__("):
        make_builder(make_backend(cls))


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
    held = {Backend: backend, MetadataBuilder: builder, State: builder.state, AttentionImpl: builder.impls[0]}[base]
    declared = {name for name, text in inspect.get_annotations(base).items() if not text.startswith("ClassVar")}
    check_made(held.wrapped, base)

    assert set(vars(held.wrapped)) == declared
