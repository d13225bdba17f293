"""Graphs of decode steps: captured per batch size and sequence length, and replayed without launching each kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import frozen
from torch import Tensor

from attnplug.contract import GraphBuffers, GraphShape, capture

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attnplug.contract import Metadata, StepBuilder
    from attnplug_transformers.engine.runner import Inputs

_SMALL: Final = (1, 2, 4, 8)
_INCREMENT: Final = 16
_LARGEST: Final = 256


def capture_sizes(max_num_reqs: int) -> tuple[int, ...]:
    """
    Return the batch sizes to capture, such that few requests are padded little, and many by less than 16.

    Steps of more than 256 requests run eagerly: kernel time hides their launches, and each graph takes memory.
    """
    largest = min(max_num_reqs, _LARGEST)
    sizes = {*_SMALL, *range(_INCREMENT, largest, _INCREMENT), largest}
    return tuple(sorted(size for size in sizes if size <= largest))


def common_lengths(graph_lengths: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """
    Return the sequence lengths to capture, rising: those of every builder, up to what each of them supports.

    Args:
        graph_lengths: The `graph_lengths` of each builder.
    """
    longest = min(max(lengths) for lengths in graph_lengths)
    return tuple(sorted({length for lengths in graph_lengths for length in lengths if length <= longest}))


@frozen(eq=False)
class CapturedStep:
    """
    One captured decode step.

    Attributes:
        graphs: The graph buffers of each group.
        logits: ``(requests, vocabulary)``, the output of a replay.
        replay: Runs the step again.
    """

    graphs: tuple[GraphBuffers, ...]
    logits: Tensor
    replay: Callable[[], object]


class DecodeGraphs:
    """
    The captured decode steps of a model, by number of requests and longest sequence.

    Args:
        builders: The builder of each group.
        forward: `Runner.forward`.
        device: The model's device.
    """

    def __init__(
        self,
        builders: Sequence[StepBuilder],
        forward: Callable[[Tensor, Tensor, None, Sequence[Metadata]], Tensor],
        device: torch.device,
    ) -> None:
        self._builders = tuple(builders)
        self._forward = forward
        self._device = device
        most = builders[0].limits.max_num_reqs
        self._ids, self._positions = torch.zeros(2, 1, most, dtype=torch.int64, device=device)
        # Both rise: `find` takes the first that fits.
        self._sizes = capture_sizes(most)
        self._lengths = common_lengths([builder.graph_lengths for builder in self._builders])
        self._captured: dict[tuple[int, int], CapturedStep] = {}
        pool: Any = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        # The largest step first: the smaller ones fit into its memory.
        for length in reversed(self._lengths):
            for size in reversed(self._sizes):
                self._captured[size, length] = self._capture(GraphShape(size, size, 1, length), pool)

    def __len__(self) -> int:
        return len(self._captured)

    def find(self, inputs: Inputs) -> CapturedStep | None:
        """Return the smallest captured step that this one fits into, or None."""
        batch = inputs.batch
        if batch.max_query_len > 1 or inputs.rows is not None:
            return None
        size = next((size for size in self._sizes if size >= batch.num_reqs), None)
        length = next((length for length in self._lengths if length >= batch.max_seq_len), None)
        if size is None or length is None or not all(one.can_run_in_cudagraph(batch) for one in self._builders):
            return None
        return self._captured.get((size, length))

    def replay(self, captured: CapturedStep, inputs: Inputs) -> Tensor:
        """Write a step's inputs where the captured one reads them, replay it, and return its logits."""
        count = inputs.batch.num_reqs
        self._ids[:, :count].copy_(inputs.input_ids)
        self._positions[:, :count].copy_(inputs.positions)
        for builder, graph in zip(self._builders, captured.graphs, strict=True):
            builder.build(inputs.batch, graph=graph)
        captured.replay()
        return captured.logits[:count]

    def _capture(self, shape: GraphShape, pool: Any) -> CapturedStep:
        graphs, metadata = [], []
        for builder in self._builders:
            with builder.state.graph_capture(builder.limits.max_num_reqs):
                graphs.append(builder.state.graph(shape))
                metadata.append(builder.build(graphs[-1].dummy_batch(builder), graph=graphs[-1]))
        forward, ids, positions = self._forward, self._ids[:, : shape.num_reqs], self._positions[:, : shape.num_reqs]
        logits, replay = capture(lambda: forward(ids, positions, None, metadata), self._device, pool=pool)
        return CapturedStep(tuple(graphs), logits, replay)
