"""Scales that are known after `make_impl`, and sinks that come with the call."""

from __future__ import annotations

import gc

import pytest
import torch

import attnplug
from attnplug.contract import Batch, GraphShape, Layer, Limits, MetadataBuilder, forward_context
from attnplug.errors import LayerError, NotNegotiatedError, TensorError
from core.tests.contract.toy import ToyBackend, ToyImpl
from core.tests.contract.world import limits, make_backend, make_batch, make_builder, make_layer, make_qkv, refused

HEADS = 4


class LateImpl(ToyImpl):
    """Records what it is given."""

    static_scales = frozenset("kv")

    def __init__(self, layer, backend):
        super().__init__(layer, backend)
        self.seen = [(layer.k_scale, layer.sinks)]

    def parameters_changed(self):
        self.seen.append((self.layer.k_scale, self.layer.sinks))

    def run(self, query, key, value, kv_cache, metadata, output, lse):
        output.zero_()


class GraphBuilder(MetadataBuilder):
    supports_graphs = True


class LateBackend(ToyBackend):
    impl_class = LateImpl
    builder_class = GraphBuilder


class GraphsReadImpl(LateImpl):
    graphs_read_scales = True


class GraphsReadBackend(LateBackend):
    impl_class = GraphsReadImpl


class FixedImpl(ToyImpl):
    static_scales = frozenset("kv")


class FixedBackend(ToyBackend):
    impl_class = FixedImpl


def fp8(cls=LateBackend, **requested):
    return make_backend(cls, kv_cache_dtype="fp8_e4m3", **requested)


class TestChangedInPlace:
    def test_the_plugin_derives_again(self):
        impl = make_layer(fp8(), k_scale=0.5)

        impl.parameters_changed()

        assert impl.takes_parameters_late
        assert len(impl.wrapped.seen) == 2

    def test_a_plugin_that_derives_once_refuses(self):
        impl = make_layer(fp8(FixedBackend))

        assert not impl.takes_parameters_late
        with refused(NotNegotiatedError, problem="after make_impl", fix="make the implementation again"):
            impl.parameters_changed()

    def test_a_captured_graph_has_the_former_values(self):
        backend = fp8(agreed_graphs="uniform_batch")
        impl = make_layer(backend)
        state, _builder = capture(backend, impl)

        with refused(LayerError, problem="other parameters", fix="release_graphs"):
            impl.parameters_changed()
        state.release_graphs()
        impl.parameters_changed()


class TestScales:
    def test_they_are_completed_as_at_make_impl(self):
        impl = make_layer(fp8(), k_scale=0.5)
        former = impl.layer

        impl.update_scales(k_scale=0.25, v_scale_tensor=torch.tensor(2.0))

        assert (impl.layer.k_scale, impl.layer.v_scale) == (0.25, 2.0)
        assert torch.equal(impl.layer.k_scale_tensor, torch.tensor([0.25]))
        assert [scale for scale, _ in impl.wrapped.seen] == [0.5, 0.25]
        assert former.k_scale == 0.5  # the host's own object is another one

    def test_what_is_not_given_stays(self):
        impl = make_layer(fp8(), k_scale=0.5, v_scale_tensor=torch.tensor([0.125]))
        kept = impl.layer.v_scale_tensor

        impl.update_scales(k_scale=0.25)

        assert impl.layer.v_scale_tensor is kept
        assert impl.layer.v_scale == 0.125
        impl.update_scales()
        assert len(impl.wrapped.seen) == 2

    def test_a_tensor_that_changed_in_place_renews_the_float(self):
        impl = make_layer(fp8(), k_scale=0.5)
        impl.layer.k_scale_tensor.fill_(0.75)

        impl.update_scales(k_scale_tensor=impl.layer.k_scale_tensor)

        assert impl.layer.k_scale == 0.75

    def test_per_head_scales_are_replaced_as_tensors(self):
        ones = torch.ones(2)
        impl = make_layer(fp8(per_head_scales=True), k_scale_tensor=ones, v_scale_tensor=ones)
        heads = torch.tensor([0.5, 0.25])

        impl.update_scales(k_scale_tensor=heads)

        assert impl.layer.k_scale_tensor is heads
        with refused(LayerError, problem="k_scale=0.5 and no tensor"):
            impl.update_scales(k_scale=0.5)

    @pytest.mark.parametrize(
        ("values", "error", "problem"),
        [
            ({"k_scale": 0.0}, LayerError, "k_scale=0.0"),
            ({"k_scale": 0.5, "v_scale": float("nan")}, LayerError, "v_scale=nan"),
            ({"v_scale_tensor": torch.ones(3)}, TensorError, "v_scale_tensor of (3,)"),
            ({"k_scale": 0.5, "k_scale_tensor": torch.tensor([0.25])}, LayerError, "k_scale=0.5"),
            ({"q_scale": 0.5}, NotNegotiatedError, "q_scale=0.5"),
        ],
    )
    def test_a_refusal_leaves_everything_as_it_was(self, values, error, problem):
        impl = make_layer(fp8(), k_scale=0.5)
        before = impl.layer

        with refused(error, problem=problem):
            impl.update_scales(**values)

        assert impl.layer is before
        assert len(impl.wrapped.seen) == 1

    def test_a_cache_that_takes_no_scales_refuses_them(self):
        with refused(NotNegotiatedError, problem="k_scale=0.5", expected="takes no scales"):
            make_layer(make_backend(LateBackend)).update_scales(k_scale=0.5)

    def test_an_implementation_that_derives_once_refuses_them(self):
        impl = make_layer(fp8(FixedBackend), k_scale=0.5)

        with refused(NotNegotiatedError, problem="after make_impl", fix="Backend.make_impl"):
            impl.update_scales(k_scale=0.25)
        assert impl.layer.k_scale == 0.5

    def test_a_failure_of_the_plugin_restores_the_former_ones(self):
        class Failing(LateImpl):
            def parameters_changed(self):
                self.derived = self.layer.k_scale
                if self.layer.k_scale == 0.25:
                    raise RuntimeError

        class FailingBackend(ToyBackend):
            impl_class = Failing

        impl = make_layer(fp8(FailingBackend), k_scale=0.5)
        with pytest.raises(RuntimeError):
            impl.update_scales(k_scale=0.25)
        assert (impl.layer.k_scale, impl.wrapped.derived) == (0.5, 0.5)


def capture(backend, impl):
    """Build into graph buffers, as a host does before a capture; return the state and the builder."""
    state = backend.make_state(limits())
    builder = backend.make_builder([impl], state)
    with state.graph_capture(4):
        graph = state.graph(GraphShape(2, 2, 1))
        builder.build(graph.dummy_batch(builder), graph=graph)
    return state, builder


class TestCaptured:
    """While graph buffers hold what a builder has built, a graph has the former values."""

    @pytest.mark.parametrize("cls", [LateBackend, GraphsReadBackend])
    def test_other_scales_are_refused_until_graphs_are_released(self, cls):
        backend = fp8(cls, agreed_graphs="uniform_batch")
        impl = make_layer(backend, k_scale=0.5)
        state, _builder = capture(backend, impl)

        with refused(LayerError, problem="other scales", fix="release_graphs"):
            impl.update_scales(k_scale=0.25)
        with refused(LayerError, problem="other scales"):
            impl.update_scales(k_scale_tensor=torch.tensor([0.25]))
        assert impl.layer.k_scale == 0.5
        state.release_graphs()
        impl.update_scales(k_scale=0.25)
        assert impl.layer.k_scale == 0.25

    def test_tensors_in_place_are_taken_where_graphs_read_them(self):
        for cls, is_taken in ((GraphsReadBackend, True), (LateBackend, False)):
            backend = fp8(cls, agreed_graphs="uniform_batch")
            impl = make_layer(backend, k_scale=0.5)
            _state, _builder = capture(backend, impl)
            impl.layer.k_scale_tensor.fill_(0.25)
            if is_taken:
                impl.update_scales(k_scale_tensor=impl.layer.k_scale_tensor)
                assert impl.layer.k_scale == 0.25
            else:
                with refused(LayerError, problem="other scales"):
                    impl.update_scales(k_scale_tensor=impl.layer.k_scale_tensor)

    def test_a_builder_that_was_collected_holds_nothing(self):
        backend = fp8(agreed_graphs="uniform_batch")
        impl = make_layer(backend)
        kept = capture(backend, impl)
        del kept
        gc.collect()

        impl.update_scales(k_scale=0.25)

        assert impl.layer.k_scale == 0.25

    def test_other_sinks_are_refused_and_the_first_are_not(self):
        backend = make_backend(LateBackend, sinks=True, agreed_graphs="uniform_batch")
        impl = make_layer(backend, sinks_with_call=True)
        _state, builder = capture(backend, impl)
        metadata = builder.build(make_batch([1], [3]))
        first = torch.zeros(HEADS)
        query, key, value, output = make_qkv(backend, 1)
        call = (query, key, value, backend.make_cache(32), metadata, output)

        impl.forward(*call, sinks=first)
        impl.forward(*call, sinks=first)

        with refused(LayerError, problem="other sinks"):
            impl.forward(*call, sinks=torch.ones(HEADS))


def with_call(cls=LateBackend, **requested):
    """Return an implementation whose sinks come with the call, and the arguments of one."""
    backend = make_backend(cls, sinks=True, **requested)
    impl = make_layer(backend, sinks_with_call=True)
    metadata = make_builder(backend, impl).build(make_batch([2], [3]))
    query, key, value, output = make_qkv(backend, 2)
    return impl, (query, key, value, backend.make_cache(32), metadata, output)


class TestSinks:
    def test_the_first_are_checked_and_bound(self):
        impl, call = with_call()
        sinks = torch.randn(HEADS)

        impl.forward(*call, sinks=sinks)

        assert impl.layer.sinks is sinks
        assert [s is sinks for _, s in impl.wrapped.seen] == [False, True]
        assert torch.equal(
            impl.wrapped.seen[0][1], torch.zeros(HEADS)
        )  # before: a tensor, so that no plugin meets None

    def test_the_same_tensor_is_not_checked_again(self, monkeypatch):
        impl, call = with_call()
        sinks = torch.randn(HEADS)
        impl.forward(*call, sinks=sinks)
        monkeypatch.setattr(impl, "_take_sinks", None, raising=False)

        impl.forward(*call, sinks=sinks)

        assert len(impl.wrapped.seen) == 2

    def test_an_alias_is_the_same_tensor(self):
        impl, call = with_call()
        sinks = torch.nn.Parameter(torch.randn(HEADS))
        for each in (sinks, sinks.detach(), sinks.data, sinks.view(-1)):
            with torch.no_grad():
                impl.forward(*call, sinks=each)
        assert len(impl.wrapped.seen) == 2
        assert impl.layer.sinks is sinks

    def test_another_tensor_is_bound_anew(self):
        impl, call = with_call()
        one, other = torch.randn(HEADS), torch.randn(2 * HEADS)
        for sinks in (one, other[:HEADS], other[HEADS:], one):
            impl.forward(*call, sinks=sinks)
            assert impl.layer.sinks is sinks
        assert len(impl.wrapped.seen) == 5

    @pytest.mark.parametrize(
        ("sinks", "error", "problem"),
        [
            (None, LayerError, "called without sinks"),
            (torch.zeros(HEADS + 1), TensorError, "sinks of (5,)"),
            (torch.zeros(HEADS, dtype=torch.float64), TensorError, "sinks of (4,) float64"),
            (torch.zeros(HEADS, device="meta"), TensorError, "meta"),
            (torch.full((HEADS,), -torch.inf), LayerError, "not finite"),
        ],
    )
    @pytest.mark.parametrize("bound", [False, True])
    def test_others_are_refused_before_anything_is_written(self, sinks, error, problem, bound):
        impl, call = with_call()
        output, first = call[-1], torch.ones(HEADS)
        if bound:
            impl.forward(*call, sinks=first)
        output.fill_(7.0)

        with refused(error, problem=problem):
            impl.forward(*call, sinks=sinks)

        assert bool((output == 7.0).all())
        assert len(impl.wrapped.seen) == 1 + bound
        if bound:
            impl.forward(*call, sinks=first)
            assert len(impl.wrapped.seen) == 2

    def test_superfluous_ones_are_refused(self):
        for backend, fields in (
            (make_backend(LateBackend), {}),
            (make_backend(LateBackend, sinks=True), {"sinks": torch.zeros(HEADS)}),
        ):
            impl = make_layer(backend, **fields)
            metadata = make_builder(backend, impl).build(make_batch([2], [3]))
            query, key, value, output = make_qkv(backend, 2)
            with refused(NotNegotiatedError, problem="sinks with a call", fix="sinks_with_call=True"):
                impl.forward(query, key, value, backend.make_cache(32), metadata, output, sinks=torch.zeros(HEADS))

    def test_a_layer_has_them_in_one_way(self):
        with refused(LayerError, problem="sinks_with_call=True and sinks of"):
            make_layer(make_backend(LateBackend, sinks=True), sinks=torch.zeros(HEADS), sinks_with_call=True)
        with refused(NotNegotiatedError, problem="sinks_with_call=True", expected="not requested"):
            make_layer(make_backend(LateBackend), sinks_with_call=True)
        with refused(LayerError, problem="has no sinks"):
            make_layer(make_backend(LateBackend, sinks=True))

    def test_an_implementation_that_derives_once_refuses_them(self):
        with refused(NotNegotiatedError, problem="sinks_with_call=True", expected="parameters_changed"):
            make_layer(make_backend(FixedBackend, sinks=True), sinks_with_call=True)

    def test_the_op_takes_them(self):
        impl, (query, key, value, cache, metadata, output) = with_call()
        sinks = torch.randn(HEADS)
        with forward_context({impl.layer.name: metadata}):
            impl.forward_op(query, key, value, cache, output, sinks=sinks)

        assert impl.layer.sinks is sinks
        assert bool((output == 0).all())

    def test_a_compiled_model_passes_a_parameter(self):
        impl, (query, key, value, cache, metadata, output) = with_call()
        sinks = torch.nn.Parameter(torch.randn(HEADS))

        @torch.compile(fullgraph=True, backend="aot_eager")
        def model(query):
            impl.forward_op(query, key, value, cache, output, sinks=sinks)
            return output

        with forward_context({impl.layer.name: metadata}), torch.no_grad():
            for _ in range(3):
                model(query)
        assert len(impl.wrapped.seen) == 2


# --- the built-in backend computes with the late values ---


def loaded(**requested):
    requirements = attnplug.Requirements(
        **{"head_size": 16, "num_q_heads": HEADS, "num_kv_heads": 2, "dtype": "float32", "block_size": 4, **requested}
    )
    return attnplug.load(requirements, "cpu", backend="torch/sdpa")


def results(backend, *layers):
    """Return what each implementation computes for the same prefill and decode, from an empty cache."""
    state = backend.make_state(Limits(max_num_reqs=4, max_num_tokens=16, max_seq_len=16, num_blocks=8))
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(5, heads, 16, generator=generator) for heads in (HEADS, 2, 2))
    found = []
    for impl, keywords in layers:
        builder, cache = backend.make_builder([impl], state), backend.make_cache(8)
        steps = []
        for rows, length in ((slice(0, 4), 4), (slice(4, 5), 5)):
            table = torch.tensor([[1, 2]], dtype=torch.int32)
            slots = torch.arange(rows.start, rows.stop) + 4
            batch = Batch.from_lengths([rows.stop - rows.start], [length], block_table=table, slot_mapping=slots)
            output = torch.full((rows.stop - rows.start, HEADS * 16), torch.nan)
            impl.forward(query[rows], key[rows], value[rows], cache, builder.build(batch), output, **keywords)
            steps.append(output)
        found.append(torch.cat(steps))
    return found


@pytest.mark.parametrize("per_head", [False, True])
def test_the_built_in_backend_computes_with_later_scales(per_head):
    backend = loaded(kv_cache_dtype="fp8_e4m3", per_head_scales=per_head)
    ones, scales = torch.ones(2 if per_head else 1), torch.tensor([0.02, 0.013] if per_head else [0.02])
    names = ("k_scale_tensor", "v_scale_tensor")
    late, first, early = (
        backend.make_impl(Layer(name=name, **dict.fromkeys(names, values)))
        for name, values in (("late", ones), ("first", ones), ("early", scales))
    )
    late.update_scales(**dict.fromkeys(names, scales))

    found, former, wanted = results(backend, (late, {}), (first, {}), (early, {}))

    assert torch.equal(found, wanted)
    assert not torch.equal(former, wanted)


def test_the_built_in_backend_computes_with_sinks_of_the_call():
    backend = loaded(sinks=True)
    one, other = torch.randn(HEADS), torch.randn(HEADS) + 2
    made = backend.make_impl(Layer(name="late", sinks_with_call=True))
    early = [backend.make_impl(Layer(name=f"early {n}", sinks=sinks)) for n, sinks in enumerate((one, other))]

    a, b, c = results(backend, (made, {"sinks": one}), (made, {"sinks": other}), (made, {"sinks": one}))

    assert [torch.equal(x, y) for x, y in zip((a, b), results(backend, *((e, {}) for e in early)), strict=True)] == [
        True,
        True,
    ]
    assert torch.equal(a, c)
    assert not torch.equal(a, b)
