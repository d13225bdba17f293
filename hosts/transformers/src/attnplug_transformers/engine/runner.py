"""What the model is given in one step: the tokens of all requests behind one another."""

from __future__ import annotations

import inspect
import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import Tensor

from attnplug.batching import BatchAssembler, positions_of
from attnplug.contract import Batch, upload
from attnplug_transformers.engine.graphs import DecodeGraphs
from attnplug_transformers.engine.inspection import placeholder_mask
from attnplug_transformers.engine.model_attention import StepAttention

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager

    from attnplug.contract import Cache, Metadata, MetadataBuilder
    from attnplug_transformers.engine.layers import Groups
    from attnplug_transformers.engine.scheduler import Step


@frozen(eq=False)
class Inputs:
    """
    One step as tensors.

    Attributes:
        input_ids: ``(1, tokens)`` int64.
        positions: ``(1, tokens)`` int64, of each token in its request.
        batch: Lengths, pages and slots, for the builders.
        rows: ``(requests that sample,)`` int64, the tokens whose logits choose the next ones; None for all.
    """

    input_ids: Tensor
    positions: Tensor
    batch: Batch
    rows: Tensor | None


class InputMaker:
    """
    Makes the inputs of one step after another.

    Args:
        block_size: Tokens per block.
        device: Where the tensors go.
    """

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._draft = BatchAssembler(block_size, device=device)
        self._device = device

    def make(self, step: Step) -> Inputs:
        """Return the inputs of a step."""
        self._draft.clear()  # of a step that was given up half-way
        tokens: list[int] = []
        rows: list[int] = []
        for one in step:
            request = one.request
            self._draft.add(one.num_new_tokens, one.start, request.blocks)
            tokens += request.tokens[one.start : one.stop]
            if one.samples:
                rows.append(len(tokens) - 1)
        batch = self._draft.finish()
        return Inputs(
            self._upload(tokens)[None],
            positions_of(batch)[None],
            batch,
            None if len(rows) == len(tokens) else self._upload(rows),
        )

    def _upload(self, numbers: list[int]) -> Tensor:
        return upload(torch.tensor(numbers, dtype=torch.int64), self._device)


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
        self._layers = {layer.spec.module: layer for layer in groups.layers}
        self._inputs = InputMaker(groups.block_size, self.device)
        self._mask = placeholder_mask(self.device)
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
        self._call(ids, positions, rows, StepAttention(self._layers, {}, (), self._mask))

    def prepare(self, step: Step) -> Inputs:
        """Return the step's tensors."""
        return self._inputs.make(step)

    def build(self, inputs: Inputs) -> tuple[Metadata, ...]:
        """Return the step's metadata, one for each group."""
        return tuple(builder.build(inputs.batch) for builder in self._builders)

    def forward(self, inputs: Inputs, metadata: Sequence[Metadata]) -> Tensor:
        """Call the model, and return the logits of the rows that sample."""
        step = StepAttention(self._layers, self._caches, metadata, self._mask)
        return self._call(inputs.input_ids, inputs.positions, inputs.rows, step)

    def _decode(self, ids: Tensor, positions: Tensor, metadata: Sequence[Metadata]) -> Tensor:
        return self._call(ids, positions, None, StepAttention(self._layers, self._caches, metadata, self._mask))

    def _call(self, ids: Tensor, positions: Tensor, rows: Tensor | None, step: StepAttention) -> Tensor:
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


_log = logging.getLogger(__name__)


def record(model: Any, groups: Groups, runner: Runner, graphs: bool | None) -> str | None:  # noqa: FBT001 - a caller's choice
    """
    Record decode steps where they are wanted.

    Args:
        model: The model.
        groups: Its backends.
        runner: What records.
        graphs: True where they have to be recorded, False where they are not to be; None records where that helps.

    Returns:
        Why all steps run eagerly, or None where they do not.
    """
    if graphs is False:
        return "graphs=False was asked for"
    if graphs is None and runner.device.type != "cuda":
        return f"{runner.device} has no graphs of its own; graphs=True records steps there too"
    weakest = groups.plan.weakest.selection
    if weakest.agreement.cudagraph == "never":
        return f"{weakest.id} runs without graphs here"
    try:
        runner.record()
    except Exception as error:
        if graphs:
            raise
        # A model may look at values on the host, which a graph cannot; its steps are as right without.
        reason = f"{type(model).__name__} cannot be recorded: {error}"
        _log.warning("%s; its steps run eagerly", reason)
        return reason
    return None
