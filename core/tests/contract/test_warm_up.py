"""Steps of zeros through any backend, here the built-in one with a layer that records its calls."""

from __future__ import annotations

import pytest
import torch

import attnplug
from attnplug.contract import GraphShape, Layer, LoadedBackend, dummy_batch_of, dummy_layer, warm_up
from attnplug.torch_backend.backend import TorchBackend
from attnplug.torch_backend.impl import TorchImpl


class RecordingImpl(TorchImpl):
    calls: list[tuple]

    def run(self, query, key, value, kv_cache, metadata, output, lse):
        super().run(query, key, value, kv_cache, metadata, output, lse)
        self.calls.append((query, key, value, kv_cache, metadata, output, lse))


class RecordingBackend(TorchBackend):
    impl_class = RecordingImpl


@pytest.fixture
def make(monkeypatch):
    monkeypatch.setattr(RecordingImpl, "calls", [], raising=False)

    def backend(**requested):
        fields = {"head_size": 16, "num_q_heads": 4, "num_kv_heads": 2, "dtype": "bfloat16", **requested}
        selection = attnplug.select(attnplug.Requirements(**fields), "cpu", backend="torch/sdpa")
        return LoadedBackend(RecordingBackend(selection.agreement, selection.device))

    return backend


@pytest.mark.parametrize(
    "requested",
    [
        {},
        {"paged": False},
        {"attn_bias": True, "paged": False},
        {"sinks": True, "return_lse": True},
        {"alibi": "linear", "head_size_v": 8},
        {"kv_cache_dtype": "fp8", "per_head_scales": True},
        {"attn_type": "encoder_decoder", "causal": False},
    ],
    ids=str,
)
def test_each_batch_is_built_and_run(make, requested):
    backend = make(**requested)

    warm_up(backend, [backend.dummy_batch(GraphShape(3, 3, 1)), backend.dummy_batch(GraphShape(2, 9))])

    assert [call[0].shape for call in RecordingImpl.calls] == [(3, 4, 16), (9, 4, 16)]
    for query, key, value, kv_cache, metadata, output, lse in RecordingImpl.calls:
        assert not query.any()
        assert (key.shape[2], value.shape[2]) == (16, requested.get("head_size_v", 16))
        assert (kv_cache is None) == (requested.get("paged") is False)
        assert output.shape == (query.shape[0], 4 * requested.get("head_size_v", 16))
        assert (lse is None) == ("return_lse" not in requested)
        assert metadata.batch.dummy == (requested.get("paged") is not False)


def test_a_layer_that_shares_a_kv_cache_is_run_without_keys(make):
    backend = make(kv_sharing=True)
    kv_cache = backend.make_cache(2)

    batches = [dummy_batch_of(backend.agreement, backend.device, [1, 3], [5, 8])]
    warm_up(backend, batches, layer=Layer(name="second", kv_sharing_target="first"), kv_cache=kv_cache)

    ((_, key, value, used, metadata, *_),) = RecordingImpl.calls
    assert key is None
    assert value is None
    assert used is kv_cache
    assert metadata.batch.seq_lens.tolist() == [5, 8]


def test_a_batch_of_any_lengths_writes_no_slot(make):
    agreement = make(cascade=True, block_size=16).agreement

    batch = dummy_batch_of(agreement, torch.device("cpu"), [1, 4], [17, 20], common_prefix_len=16)

    assert batch.dummy
    assert batch.block_table.tolist() == [[0, 0], [0, 0]]
    assert batch.slot_mapping.tolist() == [-1] * 5
    assert batch.common_prefix_len == 16


def test_a_layer_has_the_tensors_that_are_required(make):
    layer = dummy_layer(make(sinks=True, alibi="sqrt", kv_cache_dtype="fp8", per_head_scales=True), "one")

    assert layer.name == "one"
    assert layer.sinks.tolist() == layer.alibi_slopes.tolist() == [0.0] * 4
    assert layer.k_scale_tensor.tolist() == layer.v_scale_tensor.tolist() == [1.0] * 2
    assert layer.q_scale_tensor is None
    plain = dummy_layer(make())
    assert (plain.sinks, plain.alibi_slopes, plain.k_scale_tensor) == (None, None, None)
