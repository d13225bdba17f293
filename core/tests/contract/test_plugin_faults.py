"""What a plugin's author may get wrong beyond the classes' form is reported in the author's words."""

from __future__ import annotations

import copy
import pickle
from types import MappingProxyType

import pytest
import torch
from attrs import frozen

from attnplug.contract import CacheTensor, Layer, Metadata, MetadataBuilder, State
from attnplug.errors import AttnplugError, PluginContractError
from attnplug.selection.load import _construct
from core.tests.contract.toy import ToyBackend, ToyImpl
from core.tests.contract.world import agree, limits, make_backend, make_batch, make_builder, refused


@frozen(eq=False, kw_only=True)
class OwnMetadata(Metadata):
    mine: int
    other: int = 0


def with_builder(metadata_class=Metadata, **body):
    builder = type("Builder", (MetadataBuilder,), body)
    return type("Backend", (ToyBackend,), {"builder_class": builder, "metadata_class": metadata_class})


def building(result, metadata_class=Metadata):
    """Return a builder whose `plan_batch` returns what a function makes of it and the batch."""
    cls = with_builder(metadata_class, plan_batch=lambda self, batch, *_, **__: result(self, batch))
    return make_builder(make_backend(cls))


def test_a_backend_without_the_contracts_constructor_is_refused():
    cls = type("Bare", (ToyBackend,), {"__init__": lambda self, agreement, device: None})

    with refused(PluginContractError, "Bare was constructed", fix="super().__init__(agreement, device)"):
        _construct(cls, agree())
    assert _construct(ToyBackend, agree()).id == "toy/plain"


def test_a_builder_without_the_contracts_constructor_is_refused():
    backend = make_backend(with_builder(__init__=lambda self, backend, impls, state: None))

    with refused(
        PluginContractError,
        problem="Builder was constructed",
        expected="MetadataBuilder.__init__",
        fix="super().__init__(backend, impls, state)",
    ):
        make_builder(backend)


@pytest.mark.parametrize("size", [None, -1, 1.0, True, 2**63, "1"])
def test_a_workspace_without_a_size_is_refused(size):
    backend = make_backend(type("Backend", (ToyBackend,), {"workspace_bytes": lambda self, limits: size}))
    state = backend.make_state(limits())

    with refused(PluginContractError, "workspace_bytes returned", fix="return an int"):
        backend.make_builder([backend.make_impl(Layer(name="layers.0"))], state)
    with refused(PluginContractError, "workspace_bytes returned"):
        backend.workspace_bytes(limits())


def test_an_implementation_without_the_contracts_constructor_is_refused():
    impl = type("Impl", (ToyImpl,), {"__init__": lambda self, layer, backend: setattr(self, "layer", layer)})
    backend = make_backend(type("Backend", (ToyBackend,), {"impl_class": impl}))

    with refused(PluginContractError, "Impl was constructed", fix="super().__init__(layer, backend)"):
        backend.make_impl(Layer(name="layers.0"))


def test_a_state_without_the_contracts_constructor_is_refused():
    state = type("Pool", (State,), {"__init__": lambda self, *given: None})
    backend = make_backend(type("Backend", (ToyBackend,), {"state_class": state}))

    with refused(PluginContractError, "Pool was constructed", fix="super().__init__(backend, limits, device"):
        backend.make_state(limits())


@pytest.mark.parametrize(
    ("result", "named"),
    [(None, "returned None"), ([], "returned a list"), ("x", "returned a str"), (object(), "returned a object")],
)
@pytest.mark.parametrize("method", ["plan_batch", "replan_block_table", "plan_next_step"])
def test_planning_returns_a_mapping_of_fields(method, result, named):
    backend = make_backend(with_builder(**{method: lambda self, *_, **__: result}))
    builder, batch = make_builder(backend), make_batch([1], [5])
    calls = {
        "plan_batch": lambda: builder.build(batch),
        "replan_block_table": lambda: builder.update_block_table(
            builder.build(batch), batch.block_table, batch.slot_mapping
        ),
        "plan_next_step": lambda: builder.advance_step(builder.build(batch)),
    }

    with refused(PluginContractError, f"Builder {named} from planning", "fields of Metadata", "return {'plans'"):
        calls[method]()


def test_planning_does_not_return_metadata():
    backend = make_backend(with_builder(plan_batch=lambda self, *_, **__: made))
    made = make_builder(make_backend()).build(make_batch([1], [5]))

    with refused(PluginContractError, "Builder returned a Metadata from planning", "a mapping"):
        make_builder(backend).build(make_batch([1], [5]))


def test_fields_without_a_default_are_planned():
    builder = building(lambda self, batch: {})
    builder.backend.wrapped.metadata_class = OwnMetadata

    with refused(PluginContractError, "returned no field", expected="needs mine", fix="metadata_class"):
        builder.build(make_batch([1], [5]))


@pytest.mark.parametrize("plans", [["plan"], "plan", 3])
def test_plans_are_a_mapping(plans):
    builder = building(lambda self, batch: {"plans": plans})

    with refused(PluginContractError, "Builder returned the plans", fix="for key in self.plan_groups"):
        builder.build(make_batch([1], [5]))


def test_plans_are_a_field():
    builder = building(lambda self, batch: dict.fromkeys(self.plan_groups, 1))

    with refused(PluginContractError, "Builder returned (0.35355", "beside plans, Metadata has no field"):
        builder.build(make_batch([1], [5]))


@pytest.mark.parametrize("kind", [dict, MappingProxyType])
def test_any_mapping_of_plans_is_one(kind):
    builder = building(lambda self, batch: {"plans": kind(dict.fromkeys(self.plan_groups, 1))})

    assert list(builder.build(make_batch([1], [5])).plans.values()) == [1]


def test_fields_are_those_of_the_metadata_class():
    batch = make_batch([1], [5])

    with refused(PluginContractError, "returned mine", "Metadata has no field", "metadata_class"):
        building(lambda self, batch: {"mine": 1}).build(batch)
    with refused(PluginContractError, "returned yours", "OwnMetadata has mine, other, and needs mine"):
        building(lambda self, batch: {"yours": 1}, OwnMetadata).build(batch)
    with refused(PluginContractError, "returned mine, num_decodes"):
        building(lambda self, batch: {"mine": 1, "num_decodes": 3}, OwnMetadata).build(batch)
    assert building(lambda self, batch: {"mine": 1}, OwnMetadata).build(batch).mine == 1


def test_a_type_error_of_the_plugin_stays_one():
    @frozen(eq=False, kw_only=True)
    class Picky(Metadata):
        mine: int

        def __attrs_post_init__(self):
            raise TypeError("picky")

    with pytest.raises(TypeError, match="picky"):
        building(lambda self, batch: {"mine": 1}, Picky).build(make_batch([1], [5]))


CELL = CacheTensor((2, 4, 2, 8), torch.float32, 0)


@pytest.mark.parametrize("returned", [None, {}, {"k": (2, 3)}, (2, 3), {"scale": "unset"}, {"v": CELL}])
def test_a_cache_is_described(returned):
    backend = make_backend(type("Backend", (ToyBackend,), {"cache_tensors": lambda self, num_blocks: returned}))

    for use in (
        lambda: backend.make_cache(4),
        lambda: backend.make_impl(Layer(name="layers.0")),
        lambda: backend.bytes_per_block,
        lambda: backend.swap_blocks({}, {}, [(1, 2)]),
    ):
        with refused(PluginContractError, "Backend.cache_tensors returned", "", "'k'"):
            use()


def test_a_dense_agreement_needs_no_cache():
    backend = make_backend(type("Backend", (ToyBackend,), {"cache_tensors": lambda self, num_blocks: {}}), paged=False)

    assert backend.bytes_per_block == 0


def test_a_builder_supports_graphs_where_graphs_were_negotiated():
    backend = make_backend(with_builder(), cudagraph="uniform_batch", agreed_graphs="uniform_batch")

    with refused(
        PluginContractError,
        "cudagraph='uniform_batch' was negotiated with toy/plain, and Builder supports no graphs",
        "a manifest declares cudagraph",
        "Builder.supports_graphs = True",
    ):
        make_builder(backend)
    willing = make_backend(with_builder(supports_graphs=True), cudagraph="always", agreed_graphs="always")
    assert make_builder(willing).graph_level == "always"


@pytest.mark.parametrize("send", [copy.copy, copy.deepcopy, pickle.dumps])
def test_handles_are_neither_copied_nor_pickled(send):
    backend = make_backend(ToyBackend)
    impl, state = backend.make_impl(Layer(name="layers.0")), backend.make_state(limits())
    for handle in (impl, state, backend.make_builder([impl], state)):
        with refused(AttnplugError, f"{type(handle).__name__} was copied or pickled", fix="send the Selection"):
            send(handle)
