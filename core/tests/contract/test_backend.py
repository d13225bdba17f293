from __future__ import annotations

import pytest
import torch
from attrs import evolve

from attnplug.contract import AttentionImpl, Backend, GraphShape, Layer, LoadedBackend, MetadataBuilder, State, split_kv
from attnplug.errors import LayerError, LimitsError, PluginContractError
from core.tests.contract.toy import ToyBackend, ToyImpl
from core.tests.contract.world import agree, limits, make_backend, make_batch, make_builder, make_layer, refused


def with_impl(**body):
    """Return a toy backend class whose implementation has these attributes."""
    return type("Backend", (ToyBackend,), {"impl_class": type("Impl", (ToyImpl,), body)})


def test_a_backend_is_its_agreement():
    selection = agree()
    backend = LoadedBackend(ToyBackend(selection.agreement, selection.device))

    assert (backend.name, backend.variant, backend.id) == ("toy", "plain", "toy/plain")
    assert (backend.agreement, backend.device_properties) == (selection.agreement, selection.device)
    assert backend.device == torch.device("cpu")


def test_defaults_claim_nothing():
    assert (AttentionImpl.lse_includes_sink, AttentionImpl.static_scales) == (None, frozenset())
    assert not hasattr(AttentionImpl, "cache_write")
    assert not hasattr(Backend, "impl_class")
    assert MetadataBuilder.supports_graphs is False
    assert make_backend().workspace_bytes(limits()) == 0
    assert make_backend().warmup([GraphShape(1, 1)]) is None


@pytest.mark.parametrize("served", [True, False])
def test_who_serves_sinks_and_lse_says_whether_they_meet(served):
    layer = Layer(name="layers.0", sinks=torch.zeros(4))
    requested = {"sinks": True, "return_lse": True}

    with pytest.raises(PluginContractError, match="lse_includes_sink"):
        make_backend(with_impl(), **requested).make_impl(layer)
    impl = make_backend(with_impl(lse_includes_sink=served), **requested).make_impl(layer)
    assert impl.lse_includes_sink is served


def test_an_implementation_keeps_its_layer():
    def forget(self, layer, backend):
        pass

    with pytest.raises(PluginContractError, match=r"super\(\).__init__\(layer, backend\)"):
        make_layer(make_backend(with_impl(__init__=forget)))


def test_the_workspace_is_zero_and_shared():
    class Working(ToyBackend):
        def workspace_bytes(self, limits):
            return 3 * limits.max_num_reqs

    state = make_backend(Working).make_state(limits())

    assert (state.workspace.shape, state.workspace.dtype) == ((48,), torch.uint8)
    assert not state.workspace.any()
    assert state.workspace is state.workspace
    assert (state.device, state.parallel.tp_size) == (torch.device("cpu"), 1)


def test_a_plugin_may_have_its_own_state_class():
    class Own(State):
        pass

    assert type(make_backend(type("B", (ToyBackend,), {"state_class": Own})).make_state(limits()).wrapped) is Own


# --- builders -----------------------------------------------------------------------------------------------------


def test_a_builder_groups_its_layers_by_plan():
    backend = make_backend()
    impls = [make_layer(backend, name=f"layers.{i}", scale=scale) for i, scale in enumerate((1.0, 2.0, 1.0))]

    builder = make_builder(backend, *impls)

    assert [[impl.layer.name for impl in group] for group in builder.plan_groups.values()] == [
        ["layers.0", "layers.2"],
        ["layers.1"],
    ]
    assert (builder.limits, builder.parallel) == (builder.state.limits, builder.state.parallel)


class Planning(MetadataBuilder):
    def plan_batch(self, batch, split, *, fast, graph):
        return {"plans": {key: (len(group), fast, graph) for key, group in self.plan_groups.items()}}


def test_a_plan_reaches_its_layers():
    backend = make_backend(type("B", (ToyBackend,), {"builder_class": Planning}))
    impl, stranger = make_layer(backend), make_layer(backend, name="layers.1", scale=3.0)
    builder = make_builder(backend, impl)

    metadata = builder.build(make_batch([1], [3]), fast=True)

    assert impl.wrapped.plan_of(metadata) == (1, True, None)
    with refused(LayerError, "no plan for layer 'layers.1'", "has plans (1)", "make_builder"):
        stranger.wrapped.plan_of(metadata)
    with refused(LayerError, "no plan for layer 'layers.1'", "made no plans"):
        stranger.wrapped.plan_of(evolve(metadata, plans={}))


def test_planning_gets_the_split_of_the_batch_that_was_checked():
    class Planner(MetadataBuilder):
        def plan_batch(self, batch, split, *, fast, graph):
            assert split.batch is batch
            return {"plans": dict.fromkeys(self.plan_groups, split)}

    impl = make_layer(backend := make_backend(type("B", (ToyBackend,), {"builder_class": Planner})))
    batch = make_batch([1, 2], [3, 5])

    metadata = make_builder(backend, impl).build(batch)

    split = impl.wrapped.plan_of(metadata)
    assert metadata.batch is batch
    assert (split.num_decodes, split.num_prefills, split.num_decode_tokens, split.num_prefill_tokens) == (1, 1, 1, 2)
    assert (split.decodes, split.prefills) == (metadata.decodes, metadata.prefills)
    assert (split.prefills.first_req, split.prefills.num_tokens) == (1, 2)


def test_core_chooses_the_batch_of_the_metadata():
    class Lying(MetadataBuilder):
        def plan_batch(self, batch, split, *, fast, graph):
            return {"batch": make_batch([1], [3])}

    builder = make_builder(make_backend(type("B", (ToyBackend,), {"builder_class": Lying})))

    with refused(PluginContractError, "Lying returned batch", "has no field", "core fills in"):
        builder.build(make_batch([1], [3]))


def test_a_builder_has_layers_of_its_own_agreement():
    backend, other = make_backend(), make_backend(sliding_window=4)
    state = backend.make_state(limits())

    with refused(LayerError, problem="no layers"):
        backend.make_builder([], state)
    with refused(LayerError, problem="layer 'layers.0', made by toy/plain", expected="share one agreement"):
        backend.make_builder([make_layer(other)], state)
    with refused(LayerError, problem="layers ['layers.0', 'layers.0']", expected="unique"):
        backend.make_builder([make_layer(backend), make_layer(backend)], state)


def test_a_builder_has_a_state_of_its_own_backend():
    backend = make_backend()
    impl = make_layer(backend)

    with refused(LimitsError, problem="a state of toy/plain on meta", fix="make_state"):
        backend.make_builder([impl], make_backend(device="meta").make_state(limits()))
    with refused(LimitsError, problem="capture_sizes", expected="without CUDA graphs"):
        backend.make_builder([impl], make_backend(agreed_graphs="always").make_state(limits(capture_sizes=[1])))
    shared = make_backend(sliding_window=4).make_state(limits())
    assert backend.make_builder([impl], shared).state is shared


def test_a_plugins_own_objects_are_no_handles():
    backend = make_backend()
    impl, state = make_layer(backend), backend.make_state(limits())

    with refused(LayerError, problem="was given to make_builder", fix="not its `wrapped`"):
        backend.make_builder([impl.wrapped], state)
    with refused(LimitsError, problem="was given State(of toy/plain", fix="make_state"):
        backend.make_builder([impl], state.wrapped)
    with refused(LayerError, problem="was given to bind_cache"):
        backend.make_cache(4, impl=impl.wrapped)


@pytest.mark.parametrize(
    ("fields", "requested", "differs"),
    [
        ({}, {}, False),
        ({"scale": 2.0}, {}, True),
        ({}, {"sliding_window": 3}, True),
        ({}, {"logits_soft_cap": 30.0}, True),
        ({}, {"dtype": "bfloat16"}, True),
        ({}, {"kv_cache_dtype": "fp8_e4m3"}, True),
        ({}, {"attention_chunk": 8}, True),
    ],
)
def test_the_plan_key_holds_what_libraries_plan_for(fields, requested, differs):
    plain = make_layer(make_backend()).plan_key

    key = make_layer(make_backend(**requested), **fields).plan_key

    assert (key != plain) is differs
    assert hash(key) == hash(make_layer(make_backend(**requested), **fields).plan_key)


def test_a_layer_fills_its_own_part_of_the_cache():
    class Own(ToyImpl):
        def init_cache(self, kv_cache):
            kv_cache.k.fill_(self.scale)

    backend = make_backend(with_impl(init_cache=Own.init_cache))
    impl = make_layer(backend, scale=3.0)
    cache = backend.make_cache(4, impl=impl)
    assert (cache.k == 3).all()
    assert not backend.make_cache(4).k.any()
    assert (backend.bind_cache(split_kv(torch.zeros(2, 4, 4, 2, 8), "joint", "NHD", 8), impl=impl).k == 3).all()
    assert (impl.backend, impl.device) == (backend, torch.device("cpu"))


def test_metadata_leads_to_its_state():
    backend = make_backend()
    builder = make_builder(backend)
    assert builder.build(make_batch([1], [3])).state is builder.state.wrapped


@pytest.mark.parametrize(
    ("requested", "limit", "is_invariant"), [(False, None, False), (True, None, True), (True, False, False)]
)
def test_batch_invariance_is_as_agreed_or_less(requested, limit, is_invariant):
    backend = make_backend(batch_invariant=requested)
    assert make_builder(backend, batch_invariant=limit).wrapped.batch_invariant is is_invariant


def test_every_plan_key_has_a_plan():
    class Forgetful(MetadataBuilder):
        def plan_batch(self, batch, split, *, fast, graph):
            return {"plans": {next(iter(self.plan_groups)): object()}}

    backend = make_backend(type("B", (ToyBackend,), {"builder_class": Forgetful}))
    impls = [make_layer(backend, name=f"layers.{i}", scale=float(i + 1)) for i in range(3)]
    assert make_builder(backend, impls[0]).build(make_batch([1], [3])).plans
    with pytest.raises(PluginContractError, match=r"no plan for layer 'layers.1', 'layers.2'"):
        make_builder(backend, *impls).build(make_batch([1], [3]))


@pytest.mark.parametrize("needs", [False, True])
@pytest.mark.parametrize("requested", [{}, {"sliding_window": 7}])
def test_the_null_block_is_zeroed_where_freed_blocks_have_to_be_finite(needs, requested):
    backend = make_backend(with_impl(needs_finite_null_block=needs), **requested)
    tensors = dict(backend.make_cache(3).tensors)
    for tensor in tensors.values():
        tensor.fill_(torch.nan)

    bound = backend.bind_cache(tensors)

    is_zeroed = needs and bool(requested)
    assert backend.frees_into_finite_blocks is is_zeroed
    for pages in (bound.k, bound.v):
        assert bool((pages[0] == 0).all()) is is_zeroed
        assert pages[1:].isnan().all()
