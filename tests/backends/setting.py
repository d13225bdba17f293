"""A backend with layers, state and builder, for tests that look at what a build asks of a kernel library."""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import torch

from attnplug import Requirements
from attnplug.contract import Batch, GraphShape, Layer, Limits

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attnplug.contract import AttentionImpl, Backend, GraphBuffers, Metadata

BLOCK: Final = 16
BLOCKS: Final = 64
MODEL: Final = {"head_size": 64, "num_q_heads": 4, "num_kv_heads": 2, "dtype": "bfloat16", "block_size": BLOCK}


class Setting:
    """
    Layers that share a builder.

    Args:
        load: What loads a backend for requirements.
        layers: The layers; one plain layer by default.
        variant: The variant; None is what `load` takes by itself.
        asked: Requirements beyond those of MODEL.

    Attributes:
        limits: Of the state.
    """

    limits = Limits(max_num_reqs=8, max_num_tokens=64, max_seq_len=128)

    def __init__(
        self,
        load: Callable[..., Backend],
        layers: Sequence[Layer] = (Layer(name="layers.0"),),
        variant: str | None = None,
        **asked: Any,
    ) -> None:
        self.backend = load(Requirements(**{**MODEL, **asked}), *([variant] if variant else []))
        self.impls = [self.backend.make_impl(layer) for layer in layers]
        self.state = self.backend.make_state(self.limits)
        self.builder = self.backend.make_builder(self.impls, self.state)

    def batch(
        self, query_lens: Sequence[int], seq_lens: Sequence[int] | None = None, *, first_block: int = 1, **more: Any
    ) -> Batch:
        """Return a batch whose requests have pages of their own, one after another."""
        lengths = list(query_lens if seq_lens is None else seq_lens)
        size = self.backend.agreement.block_size or BLOCK
        counts = [-(-length // size) for length in lengths]
        table = torch.zeros(len(lengths), max([*counts, 1]), dtype=torch.int32)
        for row, count, last in zip(table, counts, accumulate(counts), strict=True):
            row[:count] = torch.arange(last - count, last) + first_block
        slots = [
            int(table[request, place // size]) * size + place % size
            for request, (query, length) in enumerate(zip(query_lens, lengths, strict=True))
            for place in range(length - query, length)
        ]
        given = {"block_table": table, "slot_mapping": torch.tensor(slots), **more}
        return Batch.from_lengths(query_lens, lengths, device=self.backend.device, **given)

    def forward(
        self, metadata: Metadata, impl: AttentionImpl | None = None, *, lse: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run one layer on random rows and a fresh cache, and return its output."""
        layer, asked = impl or self.impls[0], self.backend.agreement.requirements
        tokens, generator = metadata.batch.num_actual_tokens, torch.Generator().manual_seed(3)
        query, key, value = (
            torch.randn(tokens, heads, asked.head_size, generator=generator).bfloat16().to(self.backend.device)
            for heads in (asked.num_q_heads, asked.num_kv_heads, asked.num_kv_heads)
        )
        cache = self.backend.make_cache(BLOCKS) if asked.paged else None
        output = query.new_empty(tokens, layer.output_width)
        layer.forward(query, key, value, cache, metadata, output, lse=lse)
        return output

    def graph(self, num_reqs: int = 4, query_len: int = 1) -> GraphBuffers:
        """Return a slot that was built into, as for a capture."""
        key = GraphShape(num_reqs, num_reqs * query_len, query_len, 64)
        with self.state.graph_capture(num_reqs):
            graph = self.state.graph(key)
            self.builder.build(graph.dummy_batch(self.builder), graph=graph)
        return graph
