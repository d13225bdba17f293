"""Runs a step on the model: prepare its inputs, build metadata once per group, call the model or replay a graph."""

from __future__ import annotations

import inspect
import logging
from math import isqrt
from typing import TYPE_CHECKING, Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from attnplug.batching import BatchAssembler, positions_of
from attnplug.contract import Batch, upload
from attnplug.dense import use_device
from attnplug.errors import NotNegotiatedError
from attnplug_transformers.engine.graphs import DecodeGraphs
from attnplug_transformers.engine.indexer import Indexers, IndexStep
from attnplug_transformers.engine.latent import LatentCache
from attnplug_transformers.engine.model_attention import StepAttention, placeholder_mask, serving
from attnplug_transformers.engine.prefills import PrefillStep, part_of
from attnplug_transformers.engine.scales import RangeCheck

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from attnplug.contract import KVCache, Metadata, StepBuilder
    from attnplug_transformers.engine.layers import Groups
    from attnplug_transformers.engine.prefills import LatentPrefills
    from attnplug_transformers.engine.schedule import ScheduledRequest, Step

_log = logging.getLogger(__name__)


@frozen(eq=False)
class Inputs:
    """
    The tensors of one step, with the tokens of all requests concatenated.

    Attributes:
        input_ids: ``(1, tokens)`` int64 token ids; if the step was scheduled ahead, indices into the sampled tokens of
            the previous step.
        positions: ``(1, tokens)`` int64, of each token in its request.
        batch: Lengths, block table and slots, for the builders.
        rows: ``(requests that sample,)`` int64, the tokens whose logits are sampled from; None for all tokens.
        num_absorbed: Requests before the long prefills of latents: all, where none is long.
    """

    input_ids: Tensor
    positions: Tensor
    batch: Batch
    rows: Tensor | None
    num_absorbed: int


def prepare(
    step: Step, assembler: BatchAssembler, device: torch.device, is_long: Callable[[int, int], bool] | None = None
) -> Inputs:
    """
    Return the tensors of a step.

    Args:
        step: The step.
        assembler: Makes the batch; it is cleared first, of a step that failed halfway.
        device: The model's device.
        is_long: Whether so many new tokens behind so many cached ones are a long prefill of latents: these requests
            are the last ones of the batch. None without latents.
    """
    assembler.clear()
    tokens = list(step.follows or ())
    requests, num_absorbed = list(step), len(step)
    if is_long is not None and step.follows is None:
        requests.sort(key=lambda one: is_long(one.num_new_tokens, one.start))
        num_absorbed -= sum(is_long(one.num_new_tokens, one.start) for one in step)
    last: dict[ScheduledRequest, int] = {}
    for one in requests:
        assembler.add(one.num_new_tokens, one.start, one.request.blocks)
        if step.follows is None:
            tokens += one.request.tokens[one.start : one.stop]
        last[one] = len(tokens) - 1
    rows = [last[one] for one in step if one.samples]  # logits are in the order of `Step.sampling`
    batch = assembler.finish()
    ids = upload(torch.tensor(tokens, dtype=torch.int64), device)[None]
    every = len(rows) == len(tokens)
    return Inputs(
        ids,
        positions_of(batch)[None],
        batch,
        None if every else upload(torch.tensor(rows, dtype=torch.int64), device),
        num_absorbed,
    )


class Runner:
    """
    The model with its backends and KV caches.

    `prepare` makes the inputs of a step. `run` builds the metadata of each group, and calls the model. A captured graph
    takes the place of the last part: it reads inputs and metadata from fixed addresses.

    Args:
        model: The model, on the engine's attention.
        groups: Its backends.
        prefills: How prefills of latents run.

    Attributes:
        device: The model's device.
        num_replays: Steps that ran as a replay.
    """

    def __init__(self, model: Any, groups: Groups, prefills: LatentPrefills) -> None:
        self.device: torch.device = model.device
        self.num_replays = 0
        self._model = model
        self._weakest = groups.plan.weakest.selection
        self._layers = {layer.spec.module: layer for layer in groups.layers}
        self._groups = groups
        self._ranges = RangeCheck(self._layers)
        self._assembler: BatchAssembler | None = None
        self._mask = placeholder_mask(
            self.device, alibi=any(layer.spec.alibi_slopes is not None for layer in groups.layers)
        )
        self._prefills = prefills
        self._is_long = prefills.is_long if prefills.selections else None
        self._indexers = Indexers.of(groups.layers)
        self._index_pages: Mapping[int, Tensor] = {}
        self._takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._builders: Sequence[StepBuilder] = ()
        self._caches: Mapping[str, KVCache] = {}
        self._graphs: DecodeGraphs | None = None

    @property
    def num_graphs(self) -> int:
        """Decode steps that were captured."""
        return 0 if self._graphs is None else len(self._graphs)

    @torch.inference_mode()
    def profile(self, num_tokens: int, num_rows: int, max_seq_len: int) -> None:
        """Run a step of this size without KV caches, to measure its memory."""
        index = None
        if self._indexers is not None:
            most, topk = self._indexers.max_pairs, self._indexers.topk
            num_tokens = min(num_tokens, isqrt(most))
            index = IndexStep.profile(num_tokens, most, topk, self.device)
        ids = torch.zeros(1, num_tokens, dtype=torch.int64, device=self.device)
        positions = torch.arange(num_tokens, device=self.device)[None] % max_seq_len
        rows = torch.arange(min(num_rows, num_tokens), device=self.device)
        self.forward(ids, positions, rows, (), index=index)
        if self._is_long is not None:
            self.forward(ids, positions, rows, (), PrefillStep.profile(self._prefills, num_tokens, self.device))

    def init_caches(
        self, builders: Sequence[StepBuilder], caches: Mapping[str, KVCache], index_pages: Mapping[int, Tensor]
    ) -> None:
        """
        Set the builder of each group, the KV cache of each layer, by name, and the pages of each indexer's keys, by its
        number. All steps but `profile` need them.
        """
        self.free()
        self._builders, self._caches, self._index_pages = builders, caches, index_pages

    def free(self) -> None:
        """Drop KV caches, graphs and workspaces, which graph buffers hold through their state."""
        self._release_graphs()
        self._builders, self._caches, self._index_pages = (), {}, {}

    @torch.inference_mode()
    def prepare(self, step: Step) -> tuple[Inputs, ...]:
        """
        Return the inputs of a step: of one forward pass, or of several, which bound the memory that indexers take.

        If it was scheduled ahead, they do not depend on the previous step's tokens.
        """
        with use_device(self.device):
            if self._indexers is not None:
                passes = self._indexers.passes(step)
                return tuple(prepare(one, self._new_assembler(), self.device) for one in passes)
            # It keeps rows between steps; one that an exception left halfway is not used again.
            assembler, self._assembler = self._assembler or self._new_assembler(), None
            inputs = prepare(
                step, assembler, self.device, self._prefills.is_long if self._prefills.selections else None
            )
            self._assembler = assembler
            return (inputs,)

    @torch.inference_mode()
    def run(self, passes: Sequence[Inputs], sampled: Tensor | None = None) -> Tensor:
        """
        Launch a step, and return its logits: ``(requests that sample, vocabulary)``, in the order of ``step.sampling``.

        Args:
            passes: What `prepare` returned for it. The logits are valid until the next step.
            sampled: The tokens of the previous step, on the device, if this one was scheduled ahead.
        """
        logits = [self._run(inputs, sampled) for inputs in passes]
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def _run(self, inputs: Inputs, sampled: Tensor | None) -> Tensor:
        """Launch a forward pass, and return its logits."""
        with use_device(self.device):
            if sampled is not None:
                # NO_TOKEN of a failed request is no valid index; the result of this row is discarded.
                inputs = evolve(inputs, input_ids=sampled.clamp(min=0)[inputs.input_ids])
            captured = None if self._graphs is None else self._graphs.find(inputs)
            if self._graphs is not None and captured is not None:
                self.num_replays += 1
                return self._graphs.replay(captured, inputs)
            metadata, prefill = self._plan(inputs)
            # It waits for the device: decode steps, which are many, are not checked.
            ranges = self._ranges if self._ranges and inputs.batch.max_query_len > 1 else None
            index = None
            if self._indexers is not None:
                pages, topk = self._index_pages, self._indexers.topk
                index = IndexStep.of(inputs.batch, self._groups.block_size, pages, topk)
            logits = self.forward(inputs.input_ids, inputs.positions, inputs.rows, metadata, prefill, index, ranges)
            if ranges is not None:
                ranges.finish()
            return logits

    def _plan(self, inputs: Inputs) -> tuple[tuple[Metadata | None, ...], PrefillStep | None]:
        """Return the metadata of each group, and the long prefills of latents, which theirs leaves out."""
        batch, first = inputs.batch, inputs.num_absorbed
        if first == batch.num_reqs:
            return tuple(builder.build(batch) for builder in self._builders), None
        absorbed = part_of(batch, 0, first) if first else None
        batches = [absorbed if one.agreement.requirements.latent else batch for one in self._builders]
        metadata = tuple(
            None if part is None else builder.build(part) for builder, part in zip(self._builders, batches, strict=True)
        )
        tokens = 0 if absorbed is None else absorbed.num_actual_tokens
        return metadata, PrefillStep(self._prefills, part_of(batch, first, batch.num_reqs), tokens, self._caches)

    def _new_assembler(self) -> BatchAssembler:
        return BatchAssembler(self._groups.block_size, device=self.device, **self._groups.window)

    def forward(
        self,
        ids: Tensor,
        positions: Tensor,
        rows: Tensor | None,
        metadata: Sequence[Metadata | None],
        prefill: PrefillStep | None = None,
        index: IndexStep | None = None,
        ranges: RangeCheck | None = None,
    ) -> Tensor:
        """
        Call the model.

        Args:
            ids: ``(1, tokens)`` int64.
            positions: ``(1, tokens)`` int64.
            rows: The tokens whose logits are returned; None for all.
            metadata: The metadata of each group, None where a group has no query; empty without KV caches.
            prefill: The long prefills of latents, which are the last tokens; None without.
            index: The keys that indexers score; None without indexers.
            ranges: Records the keys and values of the step; None does not.

        Returns:
            ``(rows, vocabulary)`` logits.
        """
        mask = self._mask if index is None else index.mask
        step = StepAttention(self._layers, self._caches, metadata, mask, ranges)
        keep = {"logits_to_keep": 0 if rows is None else rows} if self._takes_rows else {}
        with serving(step, LatentCache(prefill=prefill, index=index) if self._prefills.layers else None) as cache:
            output = self._model(
                input_ids=ids,
                position_ids=positions,
                attention_mask=mask,
                use_cache=False,
                **keep,
                **cache,
            )
        step.check_complete()
        logits: Tensor = output.logits[0]
        return logits if rows is None or self._takes_rows else logits[rows]

    def capture(self, graphs: bool | None) -> str | None:  # noqa: FBT001 - the caller's option
        """
        Capture decode steps, for `run` to replay, where the caller, the backends and the model allow it.

        Args:
            graphs: True requires graphs, False forbids them; None captures on CUDA.

        Returns:
            Why all steps run eagerly; None where decode steps were captured.
        """
        if graphs is False:
            return "graphs=False was requested"
        if graphs is None and self.device.type != "cuda":
            return f"{self.device} has no graphs; graphs=True captures steps there too"
        if self._indexers is not None:
            reason = "the indexers of the model score as many keys as the requests of a step have"
            if graphs:
                raise NotNegotiatedError(f"graphs=True was given: {reason}", "a graph has fixed shapes", "leave it out")
            return reason
        if self._weakest.agreement.cudagraph == "never":
            return f"{self._weakest.id} runs without graphs here"
        try:
            self._capture()
        except Exception as error:
            if graphs:
                raise
            # A model may read values on the host, which a graph cannot capture. Eager steps give the same tokens.
            reason = f"{type(self._model).__name__} cannot be captured: {error}"
            _log.warning("%s; its steps run eagerly", reason)
            return reason
        return None

    @torch.inference_mode()
    def _capture(self) -> None:
        try:
            with use_device(self.device):
                self._graphs = DecodeGraphs(self._builders, self.forward, self.device)
        except BaseException:
            self._release_graphs()
            raise

    def _release_graphs(self) -> None:
        for builder in self._builders:
            builder.state.release_graphs()
        self._graphs = None
