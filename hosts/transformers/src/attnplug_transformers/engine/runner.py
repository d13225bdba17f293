"""Runs one step on the model: prepare the inputs, build once per group, call the model."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attnplug_transformers.engine.graphs import DecodeGraphs
from attnplug_transformers.engine.inputs import InputMaker, Inputs
from attnplug_transformers.engine.paged import PagedStep
from attnplug_transformers.engine.trial import no_mask

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from attnplug.contract import Cache, Metadata, MetadataBuilder
    from attnplug_transformers.engine.groups import Groups
    from attnplug_transformers.engine.step import Step


class Runner:
    """
    The model with its backends.

    `prepare`, `build` and `forward` are the three parts of a step: a captured graph takes the place of the last one, on
    tensors that the first two have written.

    Args:
        model: The model, lent to the engine.
        groups: Its backends.

    Attributes:
        device: Where the model is.
        num_replays: Steps that were replayed.
    """

    def __init__(self, model: Any, groups: Groups) -> None:
        self.device: torch.device = model.device
        self._model = model
        self._layers = {layer.learned.module: layer for layer in groups.layers}
        self._inputs = InputMaker(groups.block_size, self.device)
        self._mask = no_mask(self.device)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._builders: Sequence[MetadataBuilder] = ()
        self._graphs: DecodeGraphs | None = None
        self._caches: Mapping[str, Cache] = {}
        self.num_replays = 0

    def equip(self, builders: Sequence[MetadataBuilder], caches: Mapping[str, Cache]) -> None:
        """Take the builder of each group and the cache of each layer; only `measure` runs without."""
        self._release()
        self._builders, self._caches, self._graphs = builders, caches, None

    def _release(self) -> None:
        """Drop the slots, which hold their state, workspace included."""
        for builder in self._builders:
            builder.state.release_graphs()

    @property
    def num_graphs(self) -> int:
        """Decode steps that were recorded."""
        return 0 if self._graphs is None else len(self._graphs)

    @torch.inference_mode()
    def record(self) -> None:
        """Record decode steps, which `run` then replays where one fits. A failure leaves none of them behind."""
        try:
            with current(self.device):
                self._graphs = DecodeGraphs(self._builders, self._decode, self.device)
        except BaseException:
            self._release()
            raise

    @torch.inference_mode()
    def run(self, step: Step) -> Tensor:
        """Return ``(requests that sample, vocabulary)`` logits, in the order of ``step.sampling``."""
        with current(self.device):
            inputs = self.prepare(step)
            recorded = None if self._graphs is None else self._graphs.find(inputs)
            if self._graphs is not None and recorded is not None:
                self.num_replays += 1
                return self._graphs.run(recorded, inputs)
            return self.forward(inputs, self.build(inputs))

    @torch.inference_mode()
    def measure(self, num_tokens: int, num_rows: int, max_seq_len: int) -> None:
        """Run a step of this size without caches."""
        ids = torch.zeros(1, num_tokens, dtype=torch.int64, device=self.device)
        positions = torch.arange(num_tokens, device=self.device)[None] % max_seq_len
        rows = torch.arange(min(num_rows, num_tokens), device=self.device)
        self._call(ids, positions, rows, PagedStep(self._layers, {}, (), self._mask))

    def prepare(self, step: Step) -> Inputs:
        """Return the step's tensors."""
        return self._inputs.make(step)

    def build(self, inputs: Inputs) -> tuple[Metadata, ...]:
        """Return the step's metadata, one for each group."""
        return tuple(builder.build(inputs.batch) for builder in self._builders)

    def forward(self, inputs: Inputs, metadata: Sequence[Metadata]) -> Tensor:
        """Call the model, and return the logits of the rows that sample."""
        step = PagedStep(self._layers, self._caches, metadata, self._mask)
        return self._call(inputs.input_ids, inputs.positions, inputs.rows, step)

    def _decode(self, ids: Tensor, positions: Tensor, metadata: Sequence[Metadata]) -> Tensor:
        return self._call(ids, positions, None, PagedStep(self._layers, self._caches, metadata, self._mask))

    def _call(self, ids: Tensor, positions: Tensor, rows: Tensor | None, step: PagedStep) -> Tensor:
        keep = {"logits_to_keep": 0 if rows is None else rows} if self._keeps else {}
        output = self._model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=self._mask,
            use_cache=False,
            attnplug_step=step,
            **keep,
        )
        step.check_complete()
        logits: Tensor = output.logits[0]
        return logits if rows is None or self._keeps else logits[rows]


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one: backends know its type, and a machine may have several of that type."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
