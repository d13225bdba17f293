"""A host whose metadata have the fields of vLLM's V1 engine, and which drives attnplug."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from attrs import define, field, frozen
from torch import Tensor

from attnplug.contract import Batch, GraphShape, capture, forward_context


@frozen(eq=False, kw_only=True)
class CommonAttentionMetadata:
    """The fields of vLLM's class of that name which a decoder, an encoder and cross attention use."""

    query_start_loc: Tensor
    query_start_loc_cpu: Tensor
    seq_lens: Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: Tensor | None
    slot_mapping: Tensor | None
    causal: bool = True
    seq_lens_cpu_upper_bound: Tensor | None = None
    encoder_seq_lens: Tensor | None = None
    dcp_local_seq_lens: Tensor | None = None

    def to_batch(self, common_prefix_len: int = 0) -> Batch:
        """The batch of these requests; a dense one for encoders, which have no pages."""
        dense = self.block_table_tensor is None
        return Batch(
            query_start_loc=self.query_start_loc,
            query_start_loc_cpu=self.query_start_loc_cpu,
            seq_lens=self.seq_lens,
            seq_lens_cpu=self.seq_lens_cpu_upper_bound,
            num_reqs=self.num_reqs,
            num_actual_tokens=self.num_actual_tokens,
            max_query_len=self.max_query_len,
            max_seq_len=self.max_seq_len,
            block_table=self.block_table_tensor,
            slot_mapping=self.slot_mapping,
            causal=self.causal,
            common_prefix_len=common_prefix_len,
            encoder_seq_lens=self.encoder_seq_lens,
            dcp_local_seq_lens=self.dcp_local_seq_lens,
            key_start_loc=self.query_start_loc if dense else None,
            key_start_loc_cpu=self.query_start_loc_cpu if dense else None,
        )


@define(eq=False)
class KVCacheGroup:
    """Layers that share a block table, and their builder."""

    impls: list[Any]
    builder: Any
    caches: dict[str, Any] = field(factory=dict)


@define(eq=False)
class Runner:
    """Runs the attention of a model; `model` calls `attend` of each layer inside a forward context."""

    groups: list[KVCacheGroup]
    model: Any
    replays: dict[GraphShape, Any] = field(factory=dict)

    @property
    def state(self):
        return self.groups[0].builder.state

    def capture_model(self, keys, **how):
        """Make the graph of each shape, the largest first, with the metadata of the dummy batch."""
        with self.state.graph_capture(max(key.num_reqs for key in keys)):
            for key in sorted(keys, key=lambda key: -key.num_tokens):
                graph = self.state.graph(key, **how)
                step = {
                    group.builder: group.builder.build(graph.dummy_batch(group.builder), graph=graph)
                    for group in self.groups
                }
                _, self.replays[key] = capture(lambda step=step: self._run(step), self.state.device)

    def execute_model(self, common, tables, prefix=0):
        """One step: `tables` has the block table and the slots of each group."""
        batches = {}
        for group, (table, slots) in zip(self.groups, tables, strict=True):
            lens = common.query_start_loc_cpu.diff().tolist()
            shared = prefix if group.builder.use_cascade_attention(prefix, lens) else 0
            mine = attrs.evolve(common, block_table_tensor=table, slot_mapping=slots)
            batches[group.builder] = mine.to_batch(shared)
        step = self.state.begin_forward(batches)
        if step.graph is None:
            self._run(step.metadata)
        else:
            self.replays[step.graph.key]()
        return step

    def _run(self, metadata):
        by_layer = {impl.layer.name: metadata[group.builder] for group in self.groups for impl in group.impls}
        with forward_context(by_layer), torch.inference_mode():
            self.model()
