"""Decode steps recorded once, and replayed: the model's launches cost the host nothing then."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from attrs import frozen
from torch import Tensor

from attnplug.contract import GraphBuffers, GraphShape, capture

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from attnplug.contract import Metadata, MetadataBuilder
    from attnplug_transformers.engine.runner import Inputs

_DENSE: Final = (1, 2, 4, 8)
_STEP: Final = 16
_MOST: Final = 256


def capture_sizes(max_num_reqs: int) -> tuple[int, ...]:
    """
    Return the batch sizes that are recorded: few requests pad little, and so do many in steps of 16.

    Steps of more than 256 requests run eagerly: their work hides the launches, and each graph takes memory.
    """
    most = min(max_num_reqs, _MOST)
    sizes = {*_DENSE, *range(_STEP, most, _STEP), most}
    return tuple(sorted(size for size in sizes if size <= most))


def common_lengths(given: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """
    Return the longest sequences that are recorded, rising: all that some builder asks for, up to what each can serve.

    Args:
        given: The `graph_lengths` of each builder.
    """
    most = min(max(lengths) for lengths in given)
    return tuple(sorted({length for lengths in given for length in lengths if length <= most}))


@frozen(eq=False)
class CapturedStep:
    """
    One recorded decode step.

    Attributes:
        slots: The slot of each group.
        logits: ``(requests, vocabulary)``, which a replay writes.
        replay: Runs the step again.
    """

    graphs: tuple[GraphBuffers, ...]
    logits: Tensor
    replay: Callable[[], object]


class DecodeGraphs:
    """
    The recorded decode steps of a model, by number of requests and longest sequence.

    Args:
        builders: The builder of each group.
        call: Runs the model on ``(1, requests)`` token ids and positions, and returns the logits of every row.
        device: Where the model is.
    """

    def __init__(
        self,
        builders: Sequence[MetadataBuilder],
        call: Callable[[Tensor, Tensor, Sequence[Metadata]], Tensor],
        device: torch.device,
    ) -> None:
        self._builders = tuple(builders)
        self._call = call
        self._device = device
        most = builders[0].limits.max_num_reqs
        self._ids, self._positions = torch.zeros(2, 1, most, dtype=torch.int64, device=device)
        self._recorded: dict[tuple[int, int], CapturedStep] = {}
        # The smallest that fits is looked for: sizes and lengths rise.
        self._sizes = capture_sizes(most)
        self._lengths = common_lengths([builder.graph_lengths for builder in self._builders])
        self._record_all()

    def __len__(self) -> int:
        return len(self._recorded)

    def find(self, inputs: Inputs) -> CapturedStep | None:
        """Return the recorded step that this one can be replayed from, or None."""
        batch = inputs.batch
        if batch.max_query_len > 1 or inputs.rows is not None:
            return None
        size = next((size for size in self._sizes if size >= batch.num_reqs), None)
        length = next((length for length in self._lengths if length >= batch.max_seq_len), None)
        if size is None or length is None or not all(one.can_run_in_cudagraph(batch) for one in self._builders):
            return None
        return self._recorded.get((size, length))

    def run(self, recorded: CapturedStep, inputs: Inputs) -> Tensor:
        """Write the step's inputs where the recorded one reads them, replay it, and return its logits."""
        count = inputs.batch.num_reqs
        self._ids[:, :count].copy_(inputs.input_ids)
        self._positions[:, :count].copy_(inputs.positions)
        for builder, graph in zip(self._builders, recorded.graphs, strict=True):
            builder.build(inputs.batch, graph=graph)
        recorded.replay()
        return recorded.logits[:count]

    def _record_all(self) -> None:
        """Record the largest step first: the smaller ones fit into its memory."""
        pool: Any = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        for length in reversed(self._lengths):
            for size in reversed(self._sizes):
                self._recorded[size, length] = self._record(GraphShape(size, size, 1, length), pool)

    def _record(self, key: GraphShape, pool: Any) -> CapturedStep:
        graphs, metadata = [], []
        for builder in self._builders:
            with builder.state.graph_capture(builder.limits.max_num_reqs):
                graphs.append(builder.state.graph(key))
                metadata.append(builder.build(graphs[-1].dummy_batch(builder), graph=graphs[-1]))
        call, ids, positions = self._call, self._ids[:, : key.num_reqs], self._positions[:, : key.num_reqs]
        logits, replay = capture(lambda: call(ids, positions, metadata), self._device, pool=pool)
        return CapturedStep(tuple(graphs), logits, replay)
