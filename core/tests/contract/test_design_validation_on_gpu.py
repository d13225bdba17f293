"""Builds of the plugins of the design validation do not wait for a GPU: what they take from the contract does not."""

from __future__ import annotations

import pytest
import torch

from attnplug.contract import Backend, GraphShape, Layer
from attnplug.request.device import Device
from core.tests.contract.design.blocksparse import BlockSparseBackend
from core.tests.contract.design.flash_attn import FlashAttentionBackend
from core.tests.contract.design.flashinfer import FlashInferBackend
from core.tests.contract.design.int8 import Int8Backend
from core.tests.contract.world import agree, limits, make_batch
from tests.backends.harness import no_synchronization

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]
PATTERN = {"block_size": 4, "local_blocks": 2, "vert_stride": 8, "max_seqlen": 64}


@pytest.mark.parametrize(
    ("cls", "requested"),
    [
        (FlashInferBackend, {}),
        (FlashAttentionBackend, {"cascade": True}),
        (Int8Backend, {"kv_cache_dtype": "int8_k", "dtype": "bfloat16", "kv_layout": "HND"}),
        (BlockSparseBackend, {"block_sparse": PATTERN}),
    ],
)
def test_builds_do_not_wait(cls: type[Backend], requested: dict[str, object]) -> None:
    selection = agree(agreed_graphs="single_token_decode", **requested)
    backend = cls(selection.agreement, Device.cuda("9.0"))
    impl = backend.make_impl(Layer(name="layers.0"))
    builder = backend.make_builder([impl], backend.make_state(limits()))
    batches = [make_batch([1, 1, 5], [9, 4, 8], device="cuda"), make_batch([1, 1], [9, 4], device="cuda")]
    if backend.agreement.requirements.cascade:
        table = torch.tensor([[1, 2, 3], [1, 2, 4]], dtype=torch.int32)
        slots = torch.tensor([12, 16])
        shared = {"block_table": table, "slot_mapping": slots, "common_prefix_len": 8}
        batches.append(make_batch([1, 1], [9, 9], device="cuda", **shared))
    with builder.state.graph_capture(4):
        graph = builder.state.graph(GraphShape(4, 4, 1))
        builder.build(graph.dummy_batch(), graph=graph)
    for batch in batches:
        builder.build(batch)  # makes wrappers, whose workspace is looked at
    with no_synchronization():
        for batch in batches:
            builder.build(_again(batch))
        builder.build(batches[1], graph=graph)
        builder.advance_step(builder.build(batches[1], graph=graph), num_queries=1)


def _again(batch):
    """Return the batch without what earlier builds derived from it."""
    return type(batch)(**batch.to_dict())
