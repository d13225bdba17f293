"""A routed pair: each batch runs on its side, and what both sides read reaches both."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve, frozen

from attnplug.contract import (
    AttentionImpl,
    Batch,
    CacheTensor,
    GraphShape,
    Layer,
    LoadedBackend,
    Metadata,
    MetadataBuilder,
)
from attnplug.contract.routed import RoutedBackend, route_pair
from attnplug.errors import LayerError, LimitsError, NotNegotiatedError, PluginContractError
from attnplug.negotiation.agreement import Roles
from attnplug.negotiation.pair import pair_agreement
from core.tests.contract.toy import ToyBackend, ToyImpl
from core.tests.contract.world import (
    agree,
    limits,
    make_backend,
    make_batch,
    make_layer,
    make_qkv,
    random_cache,
    refused,
)


class Recording(ToyImpl):
    """Notes its calls, and the scales that it has."""

    lse_includes_sink = True

    def __init__(self, layer, backend):
        super().__init__(layer, backend)
        self.runs, self.seen = [], []

    def run(self, query, key, value, kv_cache, metadata, output, lse):
        assert metadata.agreement == self.agreement
        assert metadata.state.backend.agreement.variant == self.agreement.variant
        self.runs.append(metadata.batch.query_start_loc.diff().tolist())
        super().run(query, key, value, kv_cache, metadata, output, lse)

    def parameters_changed(self):
        self.seen.append((self.layer.k_scale, self.layer.sinks))


@frozen(eq=False, kw_only=True)
class Planned(Metadata):
    starts: torch.Tensor
    how: str


class Planning(MetadataBuilder):
    """Keeps its plan in the graph's buffers, and says how it was made."""

    supports_graphs = True

    def plan_batch(self, batch, split, *, fast, graph):
        return {"starts": self.persist(graph, "starts", batch.query_start_loc.clone()), "how": "plan"}

    def plan_next_step(self, metadata, batch, split):
        return {"starts": batch.query_start_loc.clone(), "how": f"next of {metadata.how}"}

    def replan_block_table(self, metadata, batch, split):
        return {"starts": metadata.starts, "how": f"pages of {metadata.how}"}


class Side(ToyBackend):
    impl_class = Recording
    builder_class = Planning
    metadata_class = Planned

    def workspace_bytes(self, limits):
        return (100 if self.variant == "decode" else 10) * (self.agreement.requirements.sliding_window or 1)


def pair(decode=Side, rest=Side, levels=("never", "never"), **requested):
    """Return the backend of a pair of two classes."""
    wanted = agree(**requested)
    sides = [
        evolve(wanted.agreement, variant=name, cudagraph=level)
        for name, level in zip(("decode", "rest"), levels, strict=True)
    ]
    loaded = [LoadedBackend(cls(one, wanted.device)) for cls, one in zip((decode, rest), sides, strict=True)]
    made = route_pair(pair_agreement(Roles(*sides), wanted.requirements), wanted.device, *loaded)
    return made if isinstance(made, str) else LoadedBackend(made)


def with_impl(**members):
    return type("Other", (Side,), {"impl_class": type("OtherImpl", (Recording,), members)})


def runs_of(impl):
    return impl.wrapped.decode.runs, impl.wrapped.rest.runs


def forward(backend, impl, builder, batch, cache, call=None):
    query, key, value, output = call or make_qkv(backend, batch.num_actual_tokens)
    impl.forward(query, key, value, cache, builder.build(batch), output)
    return output


# --- routing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "is_decode"),
    [
        ([1, 1, 1], [5, 9, 1], True),
        ([2, 2], [5, 9], True),  # drafts that are verified
        ([1], [9], True),  # the last token of a chunked prefill has the shape of a decode
        ([1, 2], [5, 9], False),  # decodes, of no graph's shape
        ([1, 3], [5, 9], False),
        ([3], [3], False),
        ([3, 3], [5, 9], False),
    ],
)
def test_a_batch_runs_on_the_side_of_its_shape(query_lens, seq_lens, is_decode):
    backend, plain = pair(decode_query_len=2), make_backend(decode_query_len=2)
    impl, single = make_layer(backend), make_layer(plain)
    state = backend.make_state(limits())
    builder = backend.make_builder([impl], state)
    cache, expected = random_cache(backend, 32), plain.make_cache(32)
    for role, tensor in cache.tensors.items():
        expected[role].copy_(tensor)
    batch, call = make_batch(query_lens, seq_lens), make_qkv(backend, sum(query_lens))
    output = forward(backend, impl, builder, batch, cache, call).clone()

    runs = runs_of(impl)
    assert runs == (([query_lens], []) if is_decode else ([], [query_lens]))
    other = plain.make_builder([single], plain.make_state(limits()))
    assert torch.equal(output, forward(plain, single, other, batch, expected, call))
    assert all(torch.equal(tensor, expected[role]) for role, tensor in cache.tensors.items())


def test_decodes_read_what_a_prefill_wrote():
    backend = pair()
    impl = make_layer(backend)
    builder, cache = backend.make_builder([impl], backend.make_state(limits())), backend.make_cache(32)
    whole = make_qkv(backend, 6)
    once = forward(backend, impl, builder, make_batch([6], [6]), backend.make_cache(32), whole)

    for start, end in ((0, 4), (4, 5), (5, 6)):
        parts = [each[start:end] for each in whole]
        output = forward(backend, impl, builder, make_batch([end - start], [end]), cache, parts)
        assert torch.allclose(output, once[start:end], atol=1e-6)
    assert runs_of(impl) == ([[1], [1]], [[6], [4]])


def test_one_side_plans_a_batch():
    backend = pair()
    builder = backend.make_builder([make_layer(backend)], backend.make_state(limits()))
    planned = []
    for side in (builder.wrapped.decode, builder.wrapped.rest):
        name = side.backend.variant
        side.plan_batch = lambda batch, split, name=name, **how: planned.append(name) or {"starts": None, "how": name}

    builder.build(make_batch([1, 1], [3, 3]))
    builder.build(make_batch([1, 4], [3, 4]))
    assert planned == ["decode", "rest"]


def test_a_step_ahead_changes_sides():
    backend = pair(decode_query_len=1)
    builder = backend.make_builder([make_layer(backend)], backend.make_state(limits()))
    prefill = builder.build(make_batch([2, 1], [2, 5]))

    decode = builder.advance_step(prefill, prefills_to_decodes=True)
    after = builder.advance_step(decode)

    assert [each.is_decode for each in (prefill, decode, after)] == [False, True, True]
    assert [each.routed.how for each in (prefill, decode, after)] == ["plan", "plan", "next of plan"]


def test_pages_are_replaced_on_the_side_that_planned():
    backend = pair()
    builder = backend.make_builder([make_layer(backend)], backend.make_state(limits()))
    for lens in ([1, 1], [2, 1]):
        batch = make_batch(lens, [5, 5])
        built = builder.build(batch)
        other = builder.update_block_table(built, batch.block_table + 9, batch.slot_mapping + 36)
        assert other.routed.how == "pages of plan"
        assert other.routed.batch.block_table.equal(batch.block_table + 9)
        assert other.is_decode is built.is_decode


def test_cascade_is_answered_by_the_side_that_gets_the_batch():
    backend = pair(cascade=True)
    builder = backend.make_builder([make_layer(backend)], backend.make_state(limits()))
    for side in ("decode", "rest"):
        getattr(builder.wrapped, side).use_cascade_attention = lambda *_, side=side: side
    assert builder.use_cascade_attention(512, [1, 1]) == "decode"
    assert builder.use_cascade_attention(512, [1, 2]) == "rest"


# --- graphs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("decode", "rest", "query_len", "expected"),
    [
        ("never", "always", 1, "never"),
        ("single_token_decode", "never", 1, "single_token_decode"),
        ("single_token_decode", "always", 1, "always"),
        ("single_token_decode", "always", 4, "single_token_decode"),
        ("uniform_batch", "single_token_decode", 4, "uniform_batch"),
        ("uniform_batch", "always", 4, "always"),
        ("always", "uniform_batch", 1, "uniform_batch"),
        ("always", "always", 1, "always"),
    ],
)
def test_graphs_of_decodes_follow_one_side_and_mixed_ones_both(decode, rest, query_len, expected):
    assert pair(levels=(decode, rest), decode_query_len=query_len).agreement.cudagraph == expected


def test_a_graph_is_built_by_the_side_of_its_shape():
    backend = pair(levels=("uniform_batch", "always"))
    impl, state = make_layer(backend), backend.make_state(limits())
    builder = backend.make_builder([impl], state)
    shapes = {GraphShape(2, 2, 1): True, GraphShape(2, 8): False}
    built = {}
    with state.graph_capture(2):
        for shape in shapes:
            graph = state.graph(shape)
            built[shape] = builder.build(graph.dummy_batch(builder), graph=graph)
    assert {shape: each.is_decode for shape, each in built.items()} == shapes

    decodes = make_batch([1, 1], [3, 3])
    for shape, is_decode in shapes.items():  # the shape decides, whatever is replayed
        again = builder.build(decodes, graph=state.graph(shape))
        assert again.is_decode is is_decode
        assert again.routed.starts.data_ptr() == built[shape].routed.starts.data_ptr()
        assert again.routed.starts.tolist()[:3] == [0, 1, 2]
    assert state.find_graph({builder: decodes}).key == GraphShape(2, 2, 1)
    assert state.find_graph({builder: make_batch([1, 3], [3, 3])}).key == GraphShape(2, 8)


def test_a_plan_of_a_side_that_moves_is_refused():
    class Moving(Planning):
        def plan_batch(self, batch, split, *, fast, graph):
            return {"starts": batch.query_start_loc.clone(), "how": "plan"}

    backend = pair(decode=type("Moves", (Side,), {"builder_class": Moving}), levels=("uniform_batch", "always"))
    state = backend.make_state(limits())
    builder = backend.make_builder([make_layer(backend)], state)
    with state.graph_capture(2):
        graph = state.graph(GraphShape(2, 2, 1))
        builder.build(graph.dummy_batch(builder), graph=graph)
    with refused(PluginContractError, problem="routed.starts", expected="frozen in it", fix="per_graph"):
        builder.build(make_batch([1, 1], [3, 3]), graph=graph)


def test_a_side_may_exclude_batches_from_its_graphs():
    def excluding(longest):
        class Excluding(Planning):
            def can_capture(self, batch):
                return batch.max_seq_len <= longest

        return type("Excludes", (Side,), {"builder_class": Excluding})

    def can_run(levels, decode, rest):
        backend = pair(excluding(decode), excluding(rest), levels=levels)
        builder = backend.make_builder([make_layer(backend)], backend.make_state(limits()))
        return [builder.can_run_in_cudagraph(make_batch(*each)) for each in (([1, 1], [9, 9]), ([1, 2], [9, 9]))]

    assert can_run(("uniform_batch", "uniform_batch"), 16, 4) == [True, False]
    assert can_run(("always", "always"), 16, 4) == [False, False]
    assert can_run(("always", "always"), 16, 16) == [True, True]
    assert can_run(("always", "always"), 4, 16) == [False, True]


def test_a_side_without_graphs_is_refused_where_they_were_requested():
    class Eager(Planning):
        supports_graphs = False

    eager = type("IsEager", (Side,), {"builder_class": Eager})
    backend = pair(rest=eager, levels=("uniform_batch", "uniform_batch"), cudagraph="uniform_batch")
    with refused(PluginContractError, problem="toy/rest", expected="cudagraph", fix="supports_graphs"):
        backend.make_builder([make_layer(backend)], backend.make_state(limits()))

    backend = pair(rest=eager, levels=("uniform_batch", "never"))  # nothing of it is captured
    state = backend.make_state(limits())
    builder = backend.make_builder([make_layer(backend)], state)
    with state.graph_capture(2):
        graph = state.graph(GraphShape(2, 2, 1))
        assert builder.build(graph.dummy_batch(builder), graph=graph).is_decode


def test_shapes_are_warmed_up_on_their_side():
    class Warming(Side):
        def warmup(self, loaded, shapes):
            warmed.append((loaded.id, tuple(shapes)))

    warmed, shapes = [], (GraphShape(4, 4, 1), GraphShape(2, 4, 2), GraphShape(1, 8), GraphShape(1, 4, 4))
    pair(Warming, Warming, decode_query_len=2).warmup(shapes)
    assert warmed == [("toy/decode", shapes[:2]), ("toy/rest", shapes[2:])]


# --- what both sides read ---------------------------------------------------------------------------------------------


def test_scales_and_parameters_reach_both_sides():
    scaled = with_impl(static_scales=frozenset("kv"))
    backend = pair(scaled, scaled, kv_cache_dtype="fp8_e4m3", sinks=True)
    impl = make_layer(backend, k_scale=2.0, sinks=torch.zeros(4))
    both = impl.wrapped.decode, impl.wrapped.rest
    assert [one.layer.k_scale for one in both] == [2.0, 2.0]

    impl.update_scales(k_scale=3.0)
    assert [one.seen[-1][0] for one in both] == [3.0, 3.0]
    assert impl.layer.k_scale == 3.0

    impl.layer.sinks.fill_(1.0)
    impl.parameters_changed()
    assert [len(one.seen) for one in both] == [2, 2]
    assert all(one.seen[-1][1] is impl.layer.sinks for one in both)


def test_sinks_of_a_call_reach_both_sides():
    backend = pair(sinks=True)
    impl = make_layer(backend, sinks_with_call=True)
    builder, cache = backend.make_builder([impl], backend.make_state(limits())), backend.make_cache(32)
    sinks = torch.randn(4)
    query, key, value, output = make_qkv(backend, 1)
    impl.forward(query, key, value, cache, builder.build(make_batch([1], [3])), output, sinks=sinks)
    assert impl.wrapped.decode.seen[-1][1] is sinks
    assert impl.wrapped.rest.seen[-1][1] is sinks


def test_a_side_that_fails_leaves_both_with_the_former_scales():
    def fail(self):
        self.seen.append((self.layer.k_scale, None))
        if self.layer.k_scale == 3.0:
            raise ValueError("no such scale")

    scaled = with_impl(static_scales=frozenset("kv"))
    failing = with_impl(static_scales=frozenset("kv"), parameters_changed=fail)
    backend = pair(scaled, failing, kv_cache_dtype="fp8_e4m3")
    impl = make_layer(backend, k_scale=2.0)
    with pytest.raises(ValueError, match="no such scale"):
        impl.update_scales(k_scale=3.0)
    assert [one.layer.k_scale for one in (impl.wrapped, impl.wrapped.decode, impl.wrapped.rest)] == [2.0] * 3
    assert [one.seen[-1][0] for one in (impl.wrapped.decode, impl.wrapped.rest)] == [2.0, 2.0]


def test_parameters_come_late_where_both_sides_take_them():
    early = type("Early", (Side,), {"impl_class": type("EarlyImpl", (ToyImpl,), {})})
    assert make_layer(pair()).takes_parameters_late
    for sides in ((early, Side), (Side, early)):
        impl = make_layer(pair(*sides))
        assert not impl.takes_parameters_late
        with refused(NotNegotiatedError, problem="after make_impl", expected="alone", fix="make_impl"):
            impl.parameters_changed()


def test_a_graph_of_either_side_holds_scales():
    scaled = with_impl(static_scales=frozenset("kv"))
    backend = pair(scaled, scaled, levels=("uniform_batch", "always"), kv_cache_dtype="fp8_e4m3")
    impl, state = make_layer(backend), backend.make_state(limits())
    builder = backend.make_builder([impl], state)
    with state.graph_capture(2):
        graph = state.graph(GraphShape(2, 2, 1))
        builder.build(graph.dummy_batch(builder), graph=graph)
    with refused(LayerError, problem="other scales", expected="captured graph", fix="release_graphs"):
        impl.update_scales(k_scale=3.0)


def test_both_sides_write_their_own_into_a_fresh_cache():
    written = []
    side = with_impl(init_cache=lambda self, cache: written.append((self.agreement.variant, cache)))
    backend = pair(side, side)
    cache = backend.make_cache(4, impl=make_layer(backend))
    assert written == [("decode", cache), ("rest", cache)]


def test_a_profiling_run_measures_both_sides():
    profiled = []
    side = with_impl(run_profile=lambda self, *_: profiled.append(self.agreement.variant))
    backend = pair(side, side)
    query, key, value, output = make_qkv(backend, 3)
    make_layer(backend).forward(query, key, value, None, None, output)
    assert profiled == ["decode", "rest"]


def test_selected_tokens_reach_the_side_of_the_batch():
    chosen = []

    def run_sparse(self, query, key, kv_cache, metadata, *rest):
        chosen.append((self.agreement.variant, metadata.agreement.variant))
        rest[2].zero_()

    side = with_impl(run_sparse=run_sparse)
    requested = {"latent": True, "topk": 4, "head_size": 8, "head_size_v": 4, "num_kv_heads": 1, "kv_in_cache": True}
    backend = pair(side, side, kv_cache_form="latent", **requested)
    impl = make_layer(backend, scale=1.0)
    builder, cache = backend.make_builder([impl], backend.make_state(limits())), backend.make_cache(32)
    for lens in ([1, 1], [2, 1]):
        tokens = sum(lens)
        query, output = torch.randn(tokens, 4, 8), torch.empty(tokens, 16)
        indices = torch.full((tokens, 4), -1, dtype=torch.int32)
        impl.forward(query, None, None, cache, builder.build(make_batch(lens, [3, 3])), output, indices=indices)
    assert chosen == [("decode", "decode"), ("rest", "rest")]


# --- memory -----------------------------------------------------------------------------------------------------------


def test_each_side_has_a_workspace():
    backend = pair(levels=("uniform_batch", "always"))
    state = backend.make_state(limits())
    backend.make_builder([make_layer(backend)], state)
    decode, rest = state.wrapped.decode, state.wrapped.rest

    assert backend.workspace_bytes(limits()) == 110
    with state.graph_capture(2):  # before a graph's memory is recorded
        assert (decode._workspace.numel(), rest._workspace.numel()) == (100, 10)
    assert decode.workspace.data_ptr() != rest.workspace.data_ptr()
    assert state.wrapped.workspace_bytes == 110


def test_each_workspace_has_room_for_every_agreement():
    state = pair(levels=("uniform_batch", "always")).make_state(limits())
    larger = pair(levels=("uniform_batch", "always"), sliding_window=3)
    larger.make_builder([make_layer(larger)], state)
    assert (state.wrapped.decode.workspace.numel(), state.wrapped.rest.workspace.numel()) == (300, 30)

    largest = pair(levels=("uniform_batch", "always"), sliding_window=4)
    with state.graph_capture(2):
        state.graph(GraphShape(2, 2, 1))
    with refused(LimitsError, problem="a workspace of 330 bytes", expected="needs 440", fix="release_graphs"):
        largest.make_builder([make_layer(largest)], state)


# --- terms ------------------------------------------------------------------------------------------------------------


def test_lengths_are_read_where_either_side_needs_them():
    wanted = agree(seq_lens_cpu_kind="absent").agreement
    reading = evolve(wanted, reads_lengths=True)
    for sides in ((wanted, reading), (reading, wanted)):
        assert pair_agreement(Roles(*sides), wanted.requirements).reads_lengths
    assert not pair_agreement(Roles(wanted, wanted), wanted.requirements).reads_lengths


def test_the_cache_is_aligned_for_both_sides():
    def aligned(alignment, **more):
        class Aligned(Side):
            def cache_tensors(self, num_blocks):
                return {
                    r: evolve(one, alignment=alignment, **more) for r, one in super().cache_tensors(num_blocks).items()
                }

        return Aligned

    tensor = pair(aligned(16), aligned(24, contiguous_blocks=True)).cache_tensors(2)["k"]
    assert (tensor.alignment, tensor.contiguous_blocks) == (48, True)


class OtherRecord(Side):
    def cache_tensors(self, num_blocks):
        return {**super().cache_tensors(num_blocks), "scales": CacheTensor((num_blocks,), torch.float32, 0)}


@pytest.mark.parametrize(
    ("decode", "rest", "requested", "expected"),
    [
        (OtherRecord, Side, {}, "the KV cache of toy/decode is {'k'"),
        (with_impl(cache_write="host"), with_impl(cache_write="forward"), {}, "written into the KV cache by the host"),
        (
            with_impl(static_scales=frozenset("kv")),
            with_impl(static_scales=frozenset("qkv")),
            {"kv_cache_dtype": "fp8_e4m3"},
            "static_scales is 'k', 'v' in toy/decode, 'k', 'q', 'v' in toy/rest",
        ),
        (
            Side,
            with_impl(query_quantization="host"),
            {"kv_cache_dtype": "fp8_e4m3"},
            "query_quantization is 'impl' in toy/decode, 'host' in toy/rest",
        ),
        (
            Side,
            with_impl(lse_includes_sink=False),
            {"sinks": True, "return_lse": True},
            "lse_includes_sink is True in toy/decode, False in toy/rest",
        ),
    ],
)
def test_sides_that_differ_are_no_pair(decode, rest, requested, expected):
    found = pair(decode, rest, **requested)
    assert isinstance(found, str)
    assert expected in found


def test_differences_without_effect_are_none():
    sides = with_impl(static_scales=frozenset("kv")), with_impl(static_scales=frozenset("qkv"), lse_includes_sink=False)
    backend = pair(*sides)
    assert isinstance(backend.wrapped, RoutedBackend)
    assert backend.impl_class.static_scales == {"k", "v"}
    assert backend.impl_class.lse_includes_sink is None


@pytest.mark.parametrize(
    ("decode", "rest", "writes"),
    [("either", "either", True), ("forward", "either", True), ("host", "either", False), ("either", "host", False)],
)
def test_one_writer_is_found_for_both_sides(decode, rest, writes):
    backend = pair(with_impl(cache_write=decode), with_impl(cache_write=rest))
    found = make_layer(backend) if writes or rest == "host" else None
    if found is None:  # prefills are written by the layer that has them, unless it says otherwise
        found = make_layer(backend, cache_write="host")
    sides = found.wrapped.decode, found.wrapped.rest
    assert bool(found.forward_writes) is writes
    assert all(("decode" in one.forward_writes) is writes for one in sides)


def test_what_only_a_layer_shows_is_compared_when_it_is_made():
    wide = with_impl(output_width=property(lambda self: 64))
    with refused(PluginContractError, problem="output_width differs", expected="32", fix="toy/rest"):
        make_layer(pair(wide, Side))


def test_an_implementation_of_one_load_serves_another():
    backend, again = pair(), pair()
    impl = make_layer(backend)
    assert again.make_builder([impl], again.make_state(limits())).impls == (impl,)
    assert isinstance(impl.wrapped, AttentionImpl)


def test_layers_share_a_plan_where_both_sides_share_one():
    backend = pair()
    impls = [make_layer(backend, name=str(i), scale=scale) for i, scale in enumerate((1.0, 1.0, 2.0))]
    builder = backend.make_builder(impls, backend.make_state(limits()))
    assert [len(group) for group in builder.plan_groups.values()] == [2, 1]
    assert [len(group) for group in builder.wrapped.decode.plan_groups.values()] == [2, 1]


def test_a_dummy_batch_is_that_of_its_side():
    class Dummies(Side):
        def dummy_batch(self, key):
            made.append(self.variant)
            return super().dummy_batch(key)

    made = []
    backend = pair(Dummies, Dummies)
    assert isinstance(backend.dummy_batch(GraphShape(2, 2, 1)), Batch)
    backend.dummy_batch(GraphShape(2, 8))
    assert made == ["decode", "rest"]


def test_an_id_names_both_sides():
    backend = pair()
    assert (backend.id, backend.name, backend.variant) == ("toy/decode+toy/rest", "toy+toy", "decode+rest")
    assert backend.wrapped.id == backend.id
    assert isinstance(make_layer(backend).layer, Layer)
