"""What vLLM does with a group's builder besides steps: other block tables, drafts, shared prefixes, its wrappers."""

from __future__ import annotations

import inspect
from types import SimpleNamespace as Names

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-hosts` runs these")

import numpy as np
import torch
from vllm.config import CUDAGraphMode
from vllm.v1.attention.backend import AttentionMetadataBuilder, CommonAttentionMetadata
from vllm.v1.attention.backends import utils
from vllm.v1.kv_cache_interface import FullAttentionSpec

from attnplug.errors import AttnplugError, BatchError, LayerError, NotNegotiatedError
from attnplug_kit.oracle import attend
from attnplug_vllm import binding, builder, impl
from hosts.vllm.tests.rig import CHOICE, CPU, Rig

HAS_CASCADE = hasattr(AttentionMetadataBuilder, "use_cascade_attention")


def two_groups(**options):
    """Return a rig whose two layers are of two KV-cache groups with the same spec, and their builders."""
    rig = Rig([{}, {}], **options)
    return rig, [rig.make_builder([name]) for name in rig.layers]


def test_a_block_table_is_replaced_for_another_group():
    rig, (first, second) = two_groups()
    rig.add(2)
    rig.run([(0, 5), (1, 37)])
    common = rig.common([(0, 1), (1, 1)], pad_tokens=2)
    metadata = first.build(0, common)
    moved = {index: [rig.free.pop() for _ in request.blocks] for index, request in enumerate(rig.requests)}
    pool = rig.layers["layers.1"].kv_cache
    table, slots = common.block_table_tensor.clone(), common.slot_mapping.clone()
    for index, request in enumerate(rig.requests):  # the second group has its keys in other blocks
        for column, (old, new) in enumerate(zip(request.blocks, moved[index], strict=True)):
            pool[new] = pool[old]
            table[index, column] = new
        last = request.len // rig.block_size
        slots[index] = moved[index][last] * rig.block_size + request.len % rig.block_size
    other = second.update_block_table(metadata, table, slots)
    inputs = rig.inputs(common.num_actual_tokens)
    rig.forward(inputs, {"layers.0": metadata, "layers.1": other})
    assert rig.check([(0, 1), (1, 1)], inputs) < 1e-5


def test_metadata_of_another_agreement_is_built_anew():
    rig = Rig([{}, {"sliding_window": 8}])
    first, second = (rig.make_builder([name]) for name in rig.layers)
    rig.add(1)
    common = rig.common([(0, 20)])
    metadata = first.build(0, common)
    other = second.update_block_table(metadata, common.block_table_tensor, common.slot_mapping)
    inputs = rig.inputs(20)
    rig.forward(inputs, {"layers.0": metadata, "layers.1": other})
    assert rig.check([(0, 20)], inputs) < 1e-5


def test_drafts_have_bounds_for_lengths():
    rig = Rig([{}], drafts=2, async_scheduling=True)
    assert rig.builder.parts[0].backend.agreement.requirements.seq_lens_cpu_kind == "upper_bound"
    rig.add(2)
    rig.run([(0, 5), (1, 37)])
    step = [(0, 1), (1, 1)]
    for bound in ("larger", "none"):
        common = rig.common(step)
        lens = common.seq_lens_cpu_upper_bound + 2 if bound == "larger" else None
        common = common.replace(seq_lens_cpu_upper_bound=lens, max_seq_len=common.max_seq_len + 2)
        inputs = rig.inputs(2)
        rig.forward(inputs, rig.builder.build_for_drafting(common, 0))
        assert rig.check(step, inputs) < 1e-5


@pytest.mark.feature("cascade attention")
@pytest.mark.skipif(not HAS_CASCADE, reason="this version of vLLM looks for no shared prefixes")
def test_a_shared_prefix_is_attended_to_once():
    rig = Rig([{}], cascade=True)
    assert rig.builder.parts[0].backend.agreement.requirements.cascade
    rig.add(3)
    rig.run([(0, 48)])
    first = rig.requests[0]
    for request in rig.requests[1:]:
        request.blocks, request.len = first.blocks[:2], 32
        request.k = {name: keys[:32] for name, keys in first.k.items()}
        request.v = {name: values[:32] for name, values in first.v.items()}
    step = [(0, 1), (1, 5), (2, 1)]
    common = rig.common(step)
    inputs = rig.inputs(7)
    metadata = rig.builder.build(32, common)
    (part,) = metadata.parts.values()
    assert part.batch.common_prefix_len == 32
    rig.forward(inputs, metadata)
    assert rig.check(step, inputs) < 1e-5
    lens = np.ones(16, dtype=np.int32)
    sizes = dict.fromkeys(("use_alibi", "use_sliding_window", "use_local_attention"), False)
    rest = {"num_query_heads": 4, "num_kv_heads": 2, "num_sms": 1, "dcp_world_size": 1, **sizes}
    assert not rig.builder.use_cascade_attention(common_prefix_len=32, query_lens=lens, **rest)
    assert rig.builder.use_cascade_attention(common_prefix_len=4096, query_lens=lens * 2, **rest)


@pytest.mark.feature("cascade attention")
@pytest.mark.skipif(not HAS_CASCADE, reason="this version of vLLM looks for no shared prefixes")
def test_layers_that_cannot_share_a_prefix_do_not():
    rig = Rig([{}, {"sliding_window": 8}], cascade=True)
    assert [part.backend.agreement.requirements.cascade for part in rig.builder.parts] == [True, False]
    assert not rig.builder.use_cascade_attention(4096, np.full(16, 2), 4, 2, False, False, False, 1, 1)


def encoder_batch(lens):
    starts = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=starts.diff(),
        num_reqs=len(lens),
        num_actual_tokens=sum(lens) + 3,
        max_query_len=max(lens),
        max_seq_len=max(lens),
        block_table_tensor=torch.zeros(len(lens), 1, dtype=torch.int32),
        slot_mapping=torch.zeros(sum(lens) + 3, dtype=torch.int64),
        causal=False,
    )


@pytest.mark.feature("encoder-only models")
@pytest.mark.parametrize(("attn_type", "window"), [("encoder_only", None), ("encoder_only", 4), ("encoder", None)])
def test_encoders_have_no_kv_cache(attn_type, window):
    rig = Rig([{"attn_type": attn_type, "sliding_window": window, "kv_cache_dtype": "fp8"}])
    rig.layers["layers.0"].kv_cache = torch.tensor([])
    lens = [5, 1, 17]
    metadata = rig.builder.build(0, encoder_batch(lens))
    inputs = rig.inputs(sum(lens) + 3)
    rig.forward(inputs, metadata)
    io, start = inputs["layers.0"], 0
    for length in lens:
        rows = slice(start, start + length)
        both = (-1, -1) if window is None else (window - 1, window - 1)
        expected = attend(io.q[rows], io.k[rows], io.v[rows], scale=0.25, causal=False, window=both).output
        assert float((io.out[rows].double() - expected).abs().max()) < 1e-5
        start += length
    assert bool((io.out[start:] == 7.0).all())


@pytest.mark.feature("encoder-only models")
def test_vllms_wrapper_for_encoders_takes_the_builder():
    from vllm.model_executor.layers.attention import encoder_only_attention  # noqa: PLC0415 - imports all layers

    backend = Names(get_builder_cls=lambda: builder.make_builder_class(CHOICE), __name__="Backend")
    wrap = inspect.unwrap(encoder_only_attention.create_encoder_only_attention_backend)
    made = wrap(type("Backend", (), {"get_builder_cls": staticmethod(backend.get_builder_cls)}))
    rig = Rig([{"attn_type": "encoder_only"}])
    wrapped = made.get_builder_cls()(rig.spec, list(rig.layers), rig.config, CPU)
    common = encoder_batch([5, 2])
    common.causal = True  # the wrapper changes it
    assert wrapped.build(0, common).parts


@pytest.mark.feature("KV sharing")
def test_vllms_wrapper_for_fast_prefill_copies_the_metadata():
    made = utils.create_fast_prefill_custom_backend(
        "Fast", type("Backend", (), {"get_builder_cls": staticmethod(lambda: builder.make_builder_class(CHOICE))})
    )
    rig = Rig([{}, {"kv_sharing_target_layer_name": "layers.0"}])
    fast = made.get_builder_cls()(rig.spec, ["layers.1"], rig.config, CPU)
    rig.builder = rig.make_builder(["layers.0"])
    rig.add(2)
    step = [(0, 5), (1, 7)]
    common = rig.common(step)
    indices = torch.tensor([4, 11])
    common.logits_indices_padded, common.num_logits_indices, common.max_logits_per_req = indices, 2, 1
    whole, last = rig.builder.build(0, common), fast.build(0, common)
    inputs = rig.inputs(12)
    target, sharing = rig.layers.values()
    io = inputs["layers.0"]
    target.impl.forward(target, io.q, io.k, io.v, target.kv_cache, whole, output=io.out)
    queries, output = torch.randn(2, 4, 16), torch.zeros(2, 4, 16)
    sharing.impl.forward(sharing, queries, io.k[indices], io.v[indices], sharing.kv_cache, last, output=output)
    for row, rows in enumerate((slice(0, 5), slice(5, 12))):
        expected = attend(queries[row : row + 1], io.k[rows], io.v[rows], scale=0.25).output
        assert float((output[row : row + 1].double() - expected).abs().max()) < 1e-5


@pytest.mark.feature("model runner V2")
def test_the_second_model_runner_fills_other_fields():
    rig = Rig([{}])
    rig.add(2)
    step = [(0, 5), (1, 3)]
    common = rig.common(step)
    given = {field: getattr(common, field) for field in ("query_start_loc", "seq_lens", "block_table_tensor")}
    wide = torch.cat([common.slot_mapping, torch.full((4,), -1)])  # as long as the padded step
    common = CommonAttentionMetadata(
        **given,
        query_start_loc_cpu=common.query_start_loc_cpu,
        seq_lens_cpu_upper_bound=common.seq_lens_cpu_upper_bound,
        max_seq_len=256,  # a bound
        num_reqs=np.int64(2),
        num_actual_tokens=np.int64(8),
        max_query_len=np.int64(5),
        slot_mapping=wide,
        positions=torch.arange(8),
        is_prefilling=torch.tensor([True, True]),
    )
    inputs = rig.inputs(8)
    rig.forward(inputs, rig.builder.build(0, common))
    assert rig.check(step, inputs) < 1e-5


# --- refusals ---


@pytest.mark.feature("output quantization", kind="refused")
def test_a_quantized_output_is_refused_by_name():
    rig = Rig([{}])
    rig.add(1)
    metadata, (io,) = rig.builder.build(0, rig.common([(0, 3)])), rig.inputs(3).values()
    (layer,) = rig.layers.values()
    for name in ("output_scale", "output_block_scale"):
        with pytest.raises(NotNegotiatedError, match="quantized output"):
            layer.impl.forward(
                layer, io.q, io.k, io.v, layer.kv_cache, metadata, output=io.out, **{name: torch.ones(1)}
            )
    assert not layer.impl.fused_output_quant_supported(None)


def test_what_a_layer_has_besides_is_refused_by_name():
    with pytest.raises(NotNegotiatedError, match="chunk_lookback=1"):
        Rig([{"chunk_lookback": 1}])
    Rig([{"chunk_lookback": None}])


def test_cross_attention_is_refused_by_name():
    with pytest.raises(NotNegotiatedError, match="does not serve cross attention"):
        Rig([{"attn_type": "encoder_decoder"}])


def test_a_causal_flag_for_each_request_is_refused():
    rig = Rig([{}])
    rig.add(1)
    common = rig.common([(0, 3)])
    for causal in (torch.tensor([True]), False):
        with pytest.raises(BatchError, match="causal=True was negotiated"):
            rig.builder.build(0, common.replace(causal=causal))


def test_a_feature_that_the_choice_lacks_is_refused_when_the_layer_is_made():
    with pytest.raises(AttnplugError, match="torch/sdpa"):
        Rig([{"block_sparse": {"block_size": 16, "local_blocks": 1, "vert_stride": 2}}])


def test_a_step_before_the_builder_is_refused():
    layer = impl.make_impl_class(CHOICE)(4, 16, 0.25, 2)
    rows = torch.zeros(1, 4, 16)
    with pytest.raises(LayerError, match="before it runs a step"):
        layer.forward(Names(), rows, rows[:, :2], rows[:, :2], torch.tensor([]), object(), rows.clone())


def test_heads_of_values_may_have_another_size():
    rig = Rig([{}])
    (layer,) = rig.layers.values()
    layer.head_size_v = 8
    spec = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, head_size_v=8, dtype=torch.float32)
    chosen = binding.settle(layer.impl, layer, spec, rig.config)
    assert chosen.requirements.head_size_v == 8
    assert chosen.requirements.block_size == 16


def test_new_weights_are_taken_over():
    sinks = torch.nn.Parameter(torch.zeros(4))
    rig = Rig([{"sinks": sinks}])
    rig.add(1)
    assert rig.run([(0, 5)]) < 1e-5
    with torch.no_grad():
        sinks.copy_(torch.tensor([3.0, 2.0, 1.0, 0.0]))
    rig.layers["layers.0"].impl.process_weights_after_loading(torch.float32)
    assert rig.run([(0, 1)]) < 1e-5


def test_new_sinks_are_refused_where_graphs_have_the_former():
    sinks = torch.zeros(4)
    rig = Rig([{"sinks": sinks}], mode=CUDAGraphMode.FULL_DECODE_ONLY)
    graph = rig.capture(2)
    rig.add(1)
    rig.run([(0, 5)])
    rig.layers["layers.0"].impl.process_weights_after_loading(torch.float32)
    assert rig.replay(graph, [(0, 1)], 2) < 1e-5  # the same ones
    sinks.fill_(2.0)
    rig.layers["layers.0"].impl.process_weights_after_loading(torch.float32)
    with pytest.raises(LayerError, match="other sinks by new weights"):
        rig.run([(0, 1)])


def test_chunks_of_local_attention_are_requests(monkeypatch):
    # Without a platform vLLM takes memory for pinned, which torch for CPUs does not have.
    monkeypatch.setattr(utils, "async_tensor_h2d", lambda data, **_: torch.as_tensor(data), raising=False)
    chunk = 8
    rig = Rig([{}], block_size=4)
    common = rig.common([(rig.add()[0], 20)])
    made = utils.make_local_attention_virtual_batches(chunk, common, 4)
    local = made[0] if isinstance(made, tuple) else made
    inputs = rig.inputs(20)
    rig.forward(inputs, rig.builder.build(0, local))
    io = inputs["layers.0"]
    expected = attend(io.q, io.k, io.v, scale=0.25, attention_chunk=chunk).output
    assert float((io.out.double() - expected).abs().max()) < 1e-5


def test_limits_count_chunks_and_drafts():
    rig = Rig([{}], drafts=3)
    backend = rig.builder.parts[0].backend
    plain = binding.limits_of(backend, rig.spec, rig.config)
    assert (plain.max_num_reqs, plain.max_num_tokens, plain.max_seq_len) == (8, 256 + 3 * 8, 256 + 3)
    local = binding.limits_of(backend, Names(attention_chunk_size=32), rig.config)
    assert local.max_num_reqs == 2 * 8 + plain.max_num_tokens // 32
