"""Groups of layers whose builders vLLM wraps: another group's metadata is that of the wrapper too."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed here; `make test-hosts` runs these")

import torch
from vllm.model_executor.layers.attention import chunked_local_attention
from vllm.v1.attention.backends import utils

from attnplug_kit.oracle import attend
from attnplug_vllm.builder import make_builder_class
from hosts.vllm.tests.rig import CHOICE, CPU, Rig


class Backend:
    """As much of a backend class as vLLM's wrappers read."""

    @staticmethod
    def get_builder_cls():
        return make_builder_class(CHOICE)


def builders_of(rig, wrapper, *names):
    """Return a builder of the wrapper for each layer, as vLLM makes one for each group."""
    made = wrapper.get_builder_cls()
    return [made(rig.spec, [name], rig.config, CPU) for name in names]


def test_fast_prefill_stays_what_it_is_in_another_group():
    fast = utils.create_fast_prefill_custom_backend("Fast", Backend)
    sharing = {"kv_sharing_target_layer_name": "layers.0"}
    rig = Rig([{}, sharing, sharing])
    first, second = builders_of(rig, fast, "layers.1", "layers.2")
    rig.builder = rig.make_builder(["layers.0"])
    rig.add(2)
    keys = [torch.empty(0, 2, 16)] * 2
    values = list(keys)
    for step in ([(0, 5), (1, 7)], [(0, 3), (1, 2)]):  # in the first, builders have not seen their pools
        counts = [count for _, count in step]
        common = rig.common(step)
        last = torch.tensor(counts).cumsum(0) - 1
        common.logits_indices_padded, common.num_logits_indices, common.max_logits_per_req = last, 2, 1
        whole, reduced = rig.builder.build(0, common), first.build(0, common)
        other = second.update_block_table(reduced, common.block_table_tensor, common.slot_mapping)
        assert type(other) is type(reduced)
        assert other.logits_indices_padded is last
        assert other.num_logits_indices == 2
        io = rig.inputs(sum(counts))["layers.0"]
        target, layer = rig.layers["layers.0"], rig.layers["layers.2"]
        target.impl.forward(target, io.q, io.k, io.v, target.kv_cache, whole, output=io.out)
        queries, output = torch.randn(2, 4, 16), torch.zeros(2, 4, 16)
        layer.impl.forward(layer, queries, io.k[last], io.v[last], layer.kv_cache, other, output=output)
        for row, (k, v) in enumerate(zip(io.k.split(counts), io.v.split(counts), strict=True)):
            keys[row], values[row] = torch.cat([keys[row], k]), torch.cat([values[row], v])
            expected = attend(queries[row : row + 1], keys[row], values[row], scale=0.25).output
            assert float((output[row : row + 1].double() - expected).abs().max()) < 1e-5
            rig.requests[row].len += counts[row]


def test_chunks_are_made_once_for_another_group(monkeypatch):
    # Without a platform vLLM takes memory for pinned, which torch for CPUs does not have.
    monkeypatch.setattr(utils, "async_tensor_h2d", lambda data, **_: torch.as_tensor(data), raising=False)
    made, chunk = [], 8
    make = chunked_local_attention.make_local_attention_virtual_batches
    monkeypatch.setattr(
        chunked_local_attention,
        "make_local_attention_virtual_batches",
        lambda *given: made.append(given) or make(*given),
    )
    local = chunked_local_attention.create_chunked_local_attention_backend.__wrapped__(Backend, chunk)
    rig = Rig([{}, {}], block_size=4)
    first, second = builders_of(rig, local, "layers.0", "layers.1")
    rig.add(2)
    for step in ([(0, 20), (1, 3)], [(0, 1), (1, 9)]):  # in the first, builders have not seen their pools
        common, inputs = rig.common(step), rig.inputs(sum(count for _, count in step))
        metadata = first.build(0, common)
        other = second.update_block_table(metadata, common.block_table_tensor, common.slot_mapping)
        assert other.make_virtual_batches_block_table is metadata.make_virtual_batches_block_table
        rig.forward(inputs, {"layers.0": metadata, "layers.1": other})
        monkeypatch.setattr(rig, "expected", lambda _, *qkv: attend(*qkv[:3], scale=0.25, attention_chunk=chunk).output)
        assert rig.check(step, inputs) < 1e-5
    assert len(made) == 2
