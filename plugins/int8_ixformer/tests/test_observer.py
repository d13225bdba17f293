"""Level 0 on a CPU: another backend computes, values are noted, and what is saved of them is what level 1 loads."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

import attnplug
from attnplug import Device
from attnplug.contract import GraphShape, Limits
from attnplug.errors import LayerError, PluginLoadError
from attnplug.torch_backend.impl import TorchImpl
from attnplug_int8_ixformer.value_scales import ValueScales, load_layer
from attnplug_kit.oracle.cases import Case
from attnplug_kit.oracle.replay import CANARY
from attnplug_kit.oracle.running import check, run
from attnplug_kit.oracle.scene import materialize

pytestmark = pytest.mark.usefixtures("offered")

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
def test_results_are_those_of_the_inner_backend(changed):
    scene = materialize(evolve(CASE, **changed))
    backend = load(scene.case)

    ran = check(backend, scene)

    inner = run(backend.inner, scene)
    assert backend.inner.id == "torch/sdpa"
    assert torch.equal(ran.output, inner.output)
    assert backend.bytes_per_block == backend.inner.bytes_per_block
    backend.warmup([GraphShape(1, 1, 1)])


def test_blocks_that_are_left_to_the_backends_are_the_same_for_both():
    asked = CASE.requirements(features=CALIBRATE, block_size=None)
    alone = attnplug.load(asked.evolve(features=()), Device.cpu(), backend="torch")
    backend = attnplug.load(asked, Device.cpu(), backend="int8_ixformer")

    assert alone.agreement.block_size != backend.agreement.block_size
    assert backend.inner.agreement.block_size == backend.agreement.block_size
    assert backend.inner.agreement.kv_layout == backend.agreement.kv_layout


def test_what_the_host_of_an_inner_backend_writes_is_written(monkeypatch):
    monkeypatch.setattr(TorchImpl, "cache_write", "host")
    scene = materialize(CASE)
    backend = load()

    check(backend, scene)

    assert backend.inner.make_impl(scene.layer()).host_writes == {"prefill", "decode"}


def steps(backend, seeds=(0, 1)):
    """A layer that has seen some steps, and the values of each."""
    scenes = [materialize(evolve(CASE, seed=seed)) for seed in seeds]
    impl = backend.make_impl(scenes[0].layer())
    builder = backend.make_builder(
        [impl], backend.make_state(Limits(max_num_reqs=4, max_num_tokens=32, max_seq_len=64))
    )
    values = []
    for scene in scenes:
        call = scene.paged(backend)
        impl.init_cache(call.cache)
        impl.forward(call.query, call.key, call.value, call.cache, builder.build(call.batch), call.output)
        assert (call.output[11:] == CANARY).all()
        values.append(call.value[:11])
    return impl, torch.cat(values)


def test_the_largest_values_of_all_steps_are_what_is_saved_and_loaded(tmp_path):
    impl, values = steps(load())

    ValueScales.observed([impl]).save(tmp_path / "scales")

    wanted = values.float().abs().amax(0) / 127
    assert torch.equal(impl.largest, values.float().abs().amax(0))
    assert torch.equal(load_layer(tmp_path / "scales", "layer", 2, 32), wanted)
    assert values.isfinite().all()  # padding holds NaN


def test_a_bound_of_splits_is_the_inner_backend_s():
    backend = load()

    assert backend.supports_max_num_splits is backend.inner.supports_max_num_splits is True


def test_what_stands_in_for_a_step_is_not_noted():
    backend = load()
    impl = backend.make_impl(materialize(CASE).layer())
    builder = backend.make_builder([impl], backend.make_state(Limits(max_num_reqs=1, max_num_tokens=2, max_seq_len=64)))
    query, key, value = (torch.full((2, heads, 32), 5.0, dtype=torch.bfloat16) for heads in (4, 2, 2))

    metadata = builder.build(backend.dummy_batch(GraphShape(1, 2, 2)))
    impl.forward(query, key, value, backend.make_cache(3), metadata, torch.empty(2, 128, dtype=torch.bfloat16))

    assert not impl.largest.any()


def test_the_workspace_of_the_inner_backend_is_counted(monkeypatch):
    backend, limits = load(), Limits(max_num_reqs=1, max_num_tokens=8, max_seq_len=64)
    monkeypatch.setattr(type(backend.inner), "workspace_bytes", lambda self, given: 77 * given.max_num_tokens)

    assert backend.workspace_bytes(limits) == 77 * 8


def test_a_channel_that_is_always_zero_has_a_scale():
    impl, _ = steps(load())
    impl.largest[1, 3] = 0

    assert float(ValueScales.observed([impl]).of_layers["layer"][1, 3]) == pytest.approx(1 / 127)


def test_a_layer_that_has_seen_nothing_has_no_scales():
    impl = load().make_impl(materialize(CASE).layer())

    with pytest.raises(LayerError, match=r"(?s)'layer' has seen no value.*run prompts through the model first"):
        ValueScales.observed([impl])


def test_layers_that_share_a_cache_have_no_scales():
    scene = materialize(evolve(CASE, kv_sharing=True))
    sharing = load(scene.case).make_impl(scene.layer())
    seen, _ = steps(load())

    assert sharing.layer.kv_sharing_target is not None
    assert ValueScales.observed([seen, sharing]).of_layers.keys() == {"layer"}


def test_a_layer_of_another_backend_is_refused():
    scene = materialize(CASE)
    backend = attnplug.load(scene.case.requirements(), Device.cpu(), backend="torch")

    with pytest.raises(LayerError, match=r"(?s)'layer' of torch/sdpa.*calibration alone notes values.*calibrate"):
        ValueScales.observed([backend.make_impl(scene.layer())])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_value_that_is_none_shows(value):
    impl, _ = steps(load())
    impl.largest[0, 2] = value

    with pytest.raises(LayerError, match=r"channel 2 of KV head 0"):
        ValueScales.observed([impl])


def test_the_inner_backend_may_be_named():
    assert load(inner="torch").inner.id == "torch/sdpa"


@pytest.mark.parametrize(("name", "told"), [("nobody", "'nobody' was asked for"), ("torch/flex", "run on cuda:8.0")])
def test_without_an_inner_backend_the_reason_is_told(name, told):
    with pytest.raises(PluginLoadError, match=rf"(?s)no backend computes what is to be observed.*{told}"):
        load(inner=name)


def test_it_is_no_backend_for_graphs():
    scene = materialize(CASE)
    explained = attnplug.explain(scene.case.requirements(features=CALIBRATE, cudagraph="single_token_decode"))

    assert next(one for one in explained.verdicts if one.id == "int8_ixformer/calibration").status == "refused"
