"""Layers with caches that outlive the steps, eager and in graphs."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import torch

from attnplug.contract import Batch, GraphBuffers, GraphShape, Layer, capture
from tests.backends.setting import Setting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import Tensor

    from attnplug.contract import Metadata

LONG: Final = 40_000_000
"""Cycles of a kernel that does nothing: tens of milliseconds."""


@contextmanager
def nothing_waits() -> Iterator[None]:
    """Let what waits for the device raise."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def again(batch: Batch, **changed: Any) -> Batch:
    """Return the batch without what earlier builds derived from it."""
    return Batch(**{**batch.to_dict(), **changed})


class Captured:
    """
    A forward of every layer, captured in a slot.

    Args:
        setting: The layers.
        key: The shape.
    """

    graph: GraphBuffers
    rows: tuple[Tensor, ...]
    outputs: list[Tensor]
    replay: Callable[[], object]

    def __init__(self, setting: Graphs, key: GraphShape) -> None:
        asked = setting.backend.agreement.requirements
        heads = (asked.num_q_heads, asked.num_kv_heads, asked.num_kv_heads)
        self.rows = tuple(setting.rows(key.num_tokens, number).zero_() for number in heads)
        self.graph = setting.state.graph(key)
        metadata = setting.builder.build(self.graph.dummy_batch(setting.builder), graph=self.graph)
        self.outputs = [self.rows[0].new_zeros(key.num_tokens, impl.output_width) for impl in setting.impls]

        def forward() -> None:
            for impl, cache, output in zip(setting.impls, setting.caches, self.outputs, strict=True):
                impl.forward(*self.rows, cache, metadata, output)

        _, self.replay = capture(forward, setting.backend.device)


class Graphs(Setting):
    """Two layers with different scales, each with a cache."""

    def __init__(self, load: Callable[..., Any], variant: str, **asked: Any) -> None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
        sinks = torch.linspace(-1, 1, 8, device=device) if asked.get("sinks") else None
        layers = [Layer(name=f"layers.{i}", scale=0.05 * (i + 1), sinks=sinks) for i in range(2)]
        asked = {"head_size": 128, "num_q_heads": 8, "cudagraph": "uniform_batch", **asked}
        super().__init__(load, layers, variant, **asked)
        self.caches = [self.backend.make_cache(64) for _ in layers]
        for cache in self.caches:
            cache.copy_(torch.randn(cache.shape, device=device))

    def rows(self, tokens: int, heads: int) -> Tensor:
        """Return random rows."""
        size = self.backend.agreement.requirements.head_size
        return torch.randn(tokens, heads, size, device=self.backend.device).bfloat16()

    def eagerly(self, batch: Batch, rows: list[Tensor]) -> list[Tensor]:
        """Return what every layer gives without a graph."""
        return self.run(self.builder.build(batch), rows)

    def run(self, metadata: Metadata, rows: list[Tensor]) -> list[Tensor]:
        """Return what every layer gives on metadata of an eager step."""
        outputs: list[Tensor] = []
        for impl, cache in zip(self.impls, self.caches, strict=True):
            outputs.append(rows[0].new_zeros(metadata.batch.num_actual_tokens, impl.output_width))
            impl.forward(*rows, cache, metadata, outputs[-1])
        return outputs
