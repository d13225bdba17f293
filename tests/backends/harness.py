"""Layers of a backend with their state, builder and caches: for tests of single builds, steps and CUDA graphs."""

from __future__ import annotations

from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

import torch

from attnplug import Requirements
from attnplug.contract import Batch, GraphShape, Layer, Limits, capture, torch_dtype

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from attnplug.contract import Attention, GraphBuffers, LoadedBackend, Metadata

BLOCK: Final = 16
BLOCKS: Final = 64
MODEL: Final = {"head_size": 64, "num_q_heads": 4, "num_kv_heads": 2, "dtype": "bfloat16", "block_size": BLOCK}
BUSY_CYCLES: Final = 40_000_000
"""Cycles of a kernel that only waits: tens of milliseconds."""


class Harness:
    """
    Layers that share a builder.

    Args:
        load: Loads a backend for requirements.
        layers: The layers; by default one plain layer.
        variant: The variant; None is the default of `load`.
        requirements: Requirements beyond those of MODEL.

    Attributes:
        limits: The limits of the state.
    """

    limits = Limits(max_num_reqs=8, max_num_tokens=64, max_seq_len=128)

    def __init__(
        self,
        load: Callable[..., LoadedBackend],
        layers: Sequence[Layer] = (Layer(name="layers.0"),),
        variant: str | None = None,
        **requirements: Any,
    ) -> None:
        self.backend = load(Requirements(**{**MODEL, **requirements}), *([variant] if variant else []))
        self.impls = [self.backend.make_impl(layer) for layer in layers]
        self.state = self.backend.make_state(self.limits)
        self.builder = self.backend.make_builder(self.impls, self.state)

    def batch(
        self, query_lens: Sequence[int], seq_lens: Sequence[int] | None = None, *, first_block: int = 1, **more: Any
    ) -> Batch:
        """Return a batch whose requests have consecutive pages."""
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
        self, metadata: Metadata, impl: Attention | None = None, *, lse: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run one layer on random rows and a fresh cache, and return its output."""
        layer, requirements = impl or self.impls[0], self.backend.agreement.requirements
        tokens, generator = metadata.batch.num_actual_tokens, torch.Generator().manual_seed(3)
        query, key, value = (
            torch.randn(tokens, heads, requirements.head_size, generator=generator).to(
                self.backend.device, torch_dtype(requirements.dtype)
            )
            for heads in (requirements.num_q_heads, requirements.num_kv_heads, requirements.num_kv_heads)
        )
        cache = self.backend.make_cache(BLOCKS) if requirements.paged else None
        output = query.new_empty(tokens, layer.output_width)
        layer.forward(query, key, value, cache, metadata, output, lse=lse)
        return output

    def graph(self, num_reqs: int = 4, query_len: int = 1) -> GraphBuffers:
        """Return graph buffers that were built into, as for a capture."""
        shape = GraphShape(num_reqs, num_reqs * query_len, query_len, 64)
        with self.state.graph_capture(num_reqs):
            graph = self.state.graph(shape)
            self.builder.build(graph.dummy_batch(self.builder), graph=graph)
        return graph


class GraphHarness(Harness):
    """Two layers with different scales, each with a cache that is kept between steps."""

    def __init__(self, load: Callable[..., Any], variant: str, **requirements: Any) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        sinks = torch.linspace(-1, 1, 8, device=device) if requirements.get("sinks") else None
        layers = [Layer(name=f"layers.{i}", scale=0.05 * (i + 1), sinks=sinks) for i in range(2)]
        requirements = {"head_size": 128, "num_q_heads": 8, "cudagraph": "uniform_batch", **requirements}
        super().__init__(load, layers, variant, **requirements)
        self.caches = [self.backend.make_cache(64) for _ in layers]
        for cache in self.caches:
            for pages in (cache.k, cache.v):
                pages.copy_(torch.randn(pages.shape, device=device))

    def rows(self, tokens: int, heads: int) -> Tensor:
        """Return random rows, ``(tokens, heads, head_size)``."""
        size = self.backend.agreement.requirements.head_size
        return torch.randn(tokens, heads, size, device=self.backend.device).bfloat16()

    def run_eager(self, batch: Batch, rows: list[Tensor]) -> list[Tensor]:
        """Build without a graph, and return the output of every layer."""
        return self.run(self.builder.build(batch), rows)

    def run(self, metadata: Metadata, rows: list[Tensor]) -> list[Tensor]:
        """Return the output of every layer on metadata of an eager step."""
        outputs: list[Tensor] = []
        for impl, cache in zip(self.impls, self.caches, strict=True):
            outputs.append(rows[0].new_zeros(metadata.batch.num_actual_tokens, impl.output_width))
            impl.forward(*rows, cache, metadata, outputs[-1])
        return outputs


class CapturedForward:
    """
    A forward of every layer, captured in a graph.

    Args:
        harness: The layers.
        shape: The shape of the graph.
    """

    graph: GraphBuffers
    rows: tuple[Tensor, ...]
    outputs: list[Tensor]
    replay: Callable[[], object]

    def __init__(self, harness: GraphHarness, shape: GraphShape) -> None:
        requirements = harness.backend.agreement.requirements
        heads = (requirements.num_q_heads, requirements.num_kv_heads, requirements.num_kv_heads)
        self.rows = tuple(harness.rows(shape.num_tokens, number).zero_() for number in heads)
        self.graph = harness.state.graph(shape)
        metadata = harness.builder.build(self.graph.dummy_batch(harness.builder), graph=self.graph)
        self.outputs = [self.rows[0].new_zeros(shape.num_tokens, impl.output_width) for impl in harness.impls]

        def forward() -> None:
            for impl, cache, output in zip(harness.impls, harness.caches, self.outputs, strict=True):
                impl.forward(*self.rows, cache, metadata, output)

        _, self.replay = capture(forward, harness.backend.device)


@contextmanager
def no_synchronization() -> Iterator[None]:
    """Make each synchronization with the device an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def uncached(batch: Batch, **changed: Any) -> Batch:
    """Return the batch without the values that earlier builds derived from it."""
    return Batch(**{**batch.to_dict(), **changed})
