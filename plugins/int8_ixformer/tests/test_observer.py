"""Level 0 on a CPU: an inner backend computes, statistics are recorded, and level 1 loads the saved scales."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from attrs import evolve

import attnplug
from attnplug import Device
from attnplug.contract import GraphShape, Layer, Limits, Parallel
from attnplug.errors import LayerError, PluginLoadError
from attnplug.torch_backend.impl import TorchImpl
from attnplug_int8_ixformer.value_scales import ValueScales, load_layer
from attnplug_kit.oracle import CANARY, Case, check, materialize, run

pytestmark = pytest.mark.usefixtures("registered")

CALIBRATE = ("int8_ixformer.calibrate",)
CASE = Case(query_lens=(1, 1, 9), context_lens=(5, 30, 0), head_size=32, dtype="bfloat16", num_padding_tokens=2)


def load(case=CASE, **options):
    return attnplug.load(
        case.requirements(features=CALIBRATE),
        Device.cpu(),
        backend="int8_ixformer",
        options={"int8_ixformer": options} if options else None,
    )


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"sliding_window": 7},
        {"logits_soft_cap": 3.0},
        {"alibi": "sqrt"},
        {"kv_sharing": True},
        {"dtype": "float16"},
    ],
    ids=str,
)
def test_results_equal_the_inner_backend(changed):
    scene = materialize(evolve(CASE, **changed))
    backend = load(scene.case)

    ran = check(backend, scene)

    inner = run(backend.wrapped.inner, scene)
    assert backend.wrapped.inner.id == "torch/sdpa"
    assert torch.equal(ran.output, inner.output)
    assert backend.bytes_per_block == backend.wrapped.inner.bytes_per_block
    backend.warmup([GraphShape(1, 1, 1)])


def test_the_inner_backend_has_the_same_blocks():
    requested = CASE.requirements(features=CALIBRATE, block_size=None)
    alone = attnplug.load(requested.evolve(features=()), Device.cpu(), backend="torch")
    backend = attnplug.load(requested, Device.cpu(), backend="int8_ixformer")

    assert alone.agreement.block_size != backend.agreement.block_size
    assert backend.wrapped.inner.agreement.block_size == backend.agreement.block_size
    assert backend.wrapped.inner.agreement.kv_layout == backend.agreement.kv_layout


def test_scales_are_of_float32_whatever_torchs_default_is():
    backend, before = load(), torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # as engines do while they make a model's layers
    try:
        impl = backend.make_impl(Layer(name="layers.0"))
    finally:
        torch.set_default_dtype(before)
    assert impl.wrapped.absmax.dtype == torch.float32


def test_an_inner_backend_with_host_writes(monkeypatch):
    monkeypatch.setattr(TorchImpl, "cache_write", "host")
    scene = materialize(CASE)
    backend = load()

    check(backend, scene)

    assert backend.wrapped.inner.make_impl(scene.layer()).host_writes == {"prefill", "decode"}


def steps(backend, seeds=(0, 1)):
    """Return a layer after some steps, and the values of all of them."""
    scenes = [materialize(evolve(CASE, seed=seed)) for seed in seeds]
    impl = backend.make_impl(scenes[0].layer())
    builder = backend.make_builder(
        [impl], backend.make_state(Limits(max_num_reqs=4, max_num_tokens=32, max_seq_len=64))
    )
    values = []
    for scene in scenes:
        call = scene.paged(backend)
        impl.wrapped.init_cache(call.cache)
        impl.forward(call.query, call.key, call.value, call.cache, builder.build(call.batch), call.output)
        assert (call.output[11:] == CANARY).all()
        values.append(call.value[:11])
    return impl, torch.cat(values)


def test_absmax_of_all_steps_is_saved_and_loaded(tmp_path):
    impl, values = steps(load())

    ValueScales.observed([impl]).save(tmp_path / "scales")

    expected = values.float().abs().amax(0) / 127
    assert torch.equal(impl.wrapped.absmax, values.float().abs().amax(0))
    assert torch.equal(load_layer(tmp_path / "scales", "layer", 2, 32, Parallel()), expected)
    assert values.isfinite().all()  # padding holds NaN


def test_split_kv_limit_of_the_inner_backend():
    backend = load()

    assert backend.supports_max_num_splits is backend.wrapped.inner.supports_max_num_splits is True


def test_dummy_batches_are_not_recorded():
    backend = load()
    impl = backend.make_impl(materialize(CASE).layer())
    builder = backend.make_builder([impl], backend.make_state(Limits(max_num_reqs=1, max_num_tokens=2, max_seq_len=64)))
    query, key, value = (torch.full((2, heads, 32), 5.0, dtype=torch.bfloat16) for heads in (4, 2, 2))

    metadata = builder.build(backend.dummy_batch(GraphShape(1, 2, 2)))
    impl.forward(query, key, value, backend.make_cache(3), metadata, torch.empty(2, 128, dtype=torch.bfloat16))

    assert not impl.wrapped.absmax.any()


@pytest.mark.parametrize("unwritten", [[2, 3], [0, 1, 2, 3]], ids=["padding", "a dummy step"])
def test_rows_without_a_slot_are_not_recorded(unwritten):
    backend = load()
    impl = backend.make_impl(materialize(CASE).layer())
    query, key, value = (torch.ones(4, heads, 32, dtype=torch.bfloat16) for heads in (4, 2, 2))
    value[unwritten] = float("nan")  # memory of former steps
    slots = torch.arange(16, 20)
    slots[unwritten] = -1
    # Of a batch on a GPU nothing else says so: neither counts nor flags, and no lengths on the CPU.
    step = SimpleNamespace(batch=SimpleNamespace(dummy=False, num_actual_tokens=4, slot_mapping=slots), inner=None)
    impl.wrapped.inner = SimpleNamespace(host_writes=(), forward=lambda *call, lse: None)

    impl.wrapped.run(query, key, value, None, step, torch.empty(4, 128), None)

    assert torch.equal(impl.wrapped.absmax, torch.full((2, 32), float(len(unwritten) < 4)))


def test_workspace_of_the_inner_backend(monkeypatch):
    backend, limits = load(), Limits(max_num_reqs=1, max_num_tokens=8, max_seq_len=64)
    monkeypatch.setattr(
        type(backend.wrapped.inner.wrapped), "workspace_bytes", lambda self, given: 77 * given.max_num_tokens
    )

    assert backend.workspace_bytes(limits) == 77 * 8


def test_a_channel_of_zeros_has_a_scale():
    impl, _ = steps(load())
    impl.wrapped.absmax[1, 3] = 0

    assert float(ValueScales.observed([impl]).layers["layer"][1, 3]) == pytest.approx(1 / 127)


def test_a_layer_without_steps_has_no_scales():
    impl = load().make_impl(materialize(CASE).layer())

    with pytest.raises(LayerError, match=r"(?s)'layer' observed no value.*run prompts through the model first"):
        ValueScales.observed([impl])


def test_layers_that_share_a_cache_have_no_scales():
    scene = materialize(evolve(CASE, kv_sharing=True))
    sharing = load(scene.case).make_impl(scene.layer())
    seen, _ = steps(load())

    assert sharing.layer.kv_sharing_target is not None
    assert ValueScales.observed([seen, sharing]).layers.keys() == {"layer"}


def test_a_layer_of_another_backend_is_refused():
    scene = materialize(CASE)
    backend = attnplug.load(scene.case.requirements(), Device.cpu(), backend="torch")

    with pytest.raises(LayerError, match=r"(?s)'layer' of torch/sdpa observes no values.*calibration.*calibrate"):
        ValueScales.observed([backend.make_impl(scene.layer())])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_values_are_refused(value):
    impl, _ = steps(load())
    impl.wrapped.absmax[0, 2] = value

    with pytest.raises(LayerError, match=r"channel 2 of KV head 0"):
        ValueScales.observed([impl])


def test_the_inner_backend_may_be_named():
    assert load(inner="torch").wrapped.inner.id == "torch/sdpa"


@pytest.mark.parametrize(("name", "problem"), [("nobody", "'nobody'"), ("torch/flex", "run on cuda:8.0")])
def test_without_an_inner_backend_loading_fails(name, problem):
    with pytest.raises(PluginLoadError, match=rf"(?s)no backend computes the attention to observe.*{problem}"):
        load(inner=name)


def test_graphs_are_refused():
    scene = materialize(CASE)
    explained = attnplug.explain(scene.case.requirements(features=CALIBRATE, cudagraph="single_token_decode"))

    assert next(one for one in explained.verdicts if one.id == "int8_ixformer/calibration").status == "refused"
