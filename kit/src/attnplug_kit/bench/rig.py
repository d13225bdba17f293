"""A step with everything that its layer needs: backend, cache with its past, inputs, metadata."""

from __future__ import annotations

import random
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from attrs import evolve, frozen

from attnplug_kit.bench.choice import dtype_on

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from attnplug.contract import AttentionImpl, Backend, Batch, Cache, GraphBuffers, Layer, Metadata, MetadataBuilder
    from attnplug_kit.bench.choice import Choice
    from attnplug_kit.bench.step import Step

LAYER = "layer"


@frozen(eq=False)
class Planner:
    """
    What builds the metadata of a step. There is no cache, which a build does not read.

    Attributes:
        step: The step.
        backend: The backend.
        layer: Its one layer.
        impl: The layer's implementation.
        builder: Its builder.
        blocks: Physical blocks of each request, in no order.
    """

    step: Step
    backend: Backend
    layer: Layer
    impl: AttentionImpl
    builder: MetadataBuilder
    blocks: tuple[list[int], ...]

    @property
    def block_size(self) -> int:
        """Slots per block."""
        return self.backend.agreement.block_size or 1

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache, the null block included."""
        return 1 + sum(map(len, self.blocks))

    def batch(self, step: Step | None = None, blocks: tuple[list[int], ...] | None = None) -> Batch:
        """Return the batch of the step, or of another one in the same blocks."""
        from attnplug.batching import BatchAssembler  # noqa: PLC0415 - imports torch

        return self.drafted(BatchAssembler.of(self.backend.agreement, self.backend.device), step, blocks)

    def drafted(self, draft: Any, step: Step | None = None, blocks: tuple[list[int], ...] | None = None) -> Batch:
        """Return the same, assembled in a draft that is used again."""
        step = step or self.step
        for new, old, mine in zip(step.query_lens, step.cached_lens, blocks or self.blocks, strict=True):
            draft.add(new, old, mine)
        found: Batch = draft.finish()
        return found


@frozen(eq=False)
class Rig:
    """
    A step that can run.

    Attributes:
        planner: What builds its metadata.
        cache: The layer's cache, with the K/V of the past.
        past: Keys and values of the past, ``(sum(cached_lens), num_kv_heads, head_size)`` each.
        query: ``(num_tokens, num_q_heads, head_size)``.
        key: ``(num_tokens, num_kv_heads, head_size)``.
        value: The same.
        output: ``(num_tokens, num_q_heads * head_size)``.
        metadata: Of the step.
    """

    planner: Planner
    cache: Cache
    past: tuple[Tensor, Tensor]
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    metadata: Metadata

    @property
    def step(self) -> Step:
        """The step."""
        return self.planner.step

    @property
    def block_size(self) -> int:
        """Slots per block."""
        return self.planner.block_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the cache, the null block included."""
        return self.planner.num_blocks

    @property
    def slots(self) -> Tensor:
        """``(num_tokens,)`` where the new K/V go."""
        found: Tensor = self.metadata.batch.slot_mapping  # type: ignore[assignment]
        return found

    @property
    def table(self) -> Tensor:
        """``(num_reqs, columns)`` blocks of each request."""
        found: Tensor = self.metadata.batch.block_table  # type: ignore[assignment]
        return found

    @property
    def cached(self) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of the past, and their slots."""
        import torch  # noqa: PLC0415 - only who measures pays for it

        size = self.block_size
        pairs = zip(self.planner.blocks, self.step.cached_lens, strict=True)
        slots = [blocks[place // size] * size + place % size for blocks, length in pairs for place in range(length)]
        return *self.past, torch.tensor(slots, dtype=torch.int64, device=self.query.device)

    def forward(self) -> Callable[[], Tensor]:
        """Return the layer's calls as a host makes them: the cache write where it is the host's, and forward."""
        impl, cache, slots = self.planner.impl, self.cache, self.slots
        query, key, value, metadata, output = self.query, self.key, self.value, self.metadata, self.output

        def call() -> Tensor:
            impl.forward(query, key, value, cache, metadata, output)
            return output

        def call_after_write() -> Tensor:
            impl.write_kv(key, value, cache, slots)
            return call()

        return call_after_write if impl.host_writes else call

    def attend(self) -> Callable[[], Tensor]:
        """Return them as a compiled model makes them: the opaque ops. The metadata has to be in force."""
        impl, cache, output = self.planner.impl, self.cache, self.output
        query, key, value = self.query, self.key, self.value

        def call() -> Tensor:
            impl.forward_op(query, key, value, cache, output)
            return output

        def call_after_write() -> Tensor:
            impl.write_kv_op(key, value, cache)
            return call()

        return call_after_write if impl.host_writes else call


def make_planner(step: Step, choice: Choice, **engine: Any) -> Planner:
    """
    Return what builds a step.

    Args:
        step: The step.
        choice: Backend and device.
        engine: Fields of the requirements that an engine sets.

    Raises:
        NoBackendError: Nothing can serve it.
        PluginError: The backend fails to load.
    """
    from attnplug import contract  # noqa: PLC0415 - imports torch

    backend = choice.load(step.requirements(dtype_on(choice.settle()), **engine))
    size = backend.agreement.block_size or 1
    counts = [-(-length // size) for length in step.seq_lens]
    limits = contract.Limits(
        max_num_reqs=step.num_reqs,
        max_num_tokens=max(step.num_tokens, *step.cached_lens),
        max_seq_len=max(step.seq_lens),
        num_blocks=1 + sum(counts),
    )
    layer = contract.Layer(name=LAYER)
    impl = backend.make_impl(layer)
    return Planner(
        step, backend, layer, impl, backend.make_builder([impl], backend.make_state(limits)), _shuffled(counts)
    )


def make_rig(step: Step, choice: Choice, **engine: Any) -> Rig:
    """Return a step that can run, its past computed by the backend. Arguments and errors as for `make_planner`."""
    import torch  # noqa: PLC0415 - only who measures pays for it

    from attnplug.contract import torch_dtype  # noqa: PLC0415 - imports torch

    planner = make_planner(step, choice, **engine)
    device, dtype = planner.backend.device, torch_dtype(planner.backend.agreement.requirements.dtype)
    generator = torch.Generator(device).manual_seed(0)

    def rows(count: int, heads: int) -> Tensor:
        return torch.randn(count, heads, step.head_size, generator=generator, device=device).to(dtype)

    tokens, kv_heads = step.num_tokens, step.num_kv_heads
    rig = Rig(
        planner=planner,
        cache=planner.backend.make_cache(planner.num_blocks, impl=planner.impl),
        past=(rows(sum(step.cached_lens), kv_heads), rows(sum(step.cached_lens), kv_heads)),
        query=rows(tokens, step.num_q_heads),
        key=rows(tokens, kv_heads),
        value=rows(tokens, kv_heads),
        output=torch.empty(tokens, step.num_q_heads * step.head_size, dtype=dtype, device=device),
        metadata=planner.builder.build(planner.batch()),
    )
    _fill(rig)
    return rig


def capture_graph(planner: Planner) -> tuple[GraphBuffers, Metadata]:
    """Return a slot as a capture uses it, of the shortest length that holds the step, and the metadata in it."""
    from attnplug.contract import GraphShape  # noqa: PLC0415 - imports torch

    step, builder, state = planner.step, planner.builder, planner.builder.state
    length = next(length for length in builder.graph_lengths if length >= max(step.seq_lens))
    with state.graph_capture(step.num_reqs):
        graph = state.graph(GraphShape(step.num_reqs, step.num_tokens, 1, length))
        return graph, builder.build(graph.dummy_batch(), graph=graph)


def _fill(rig: Rig) -> None:
    """Put the past into the cache, request by request, as the backend itself writes it: nobody else knows how."""
    step, planner = rig.step, rig.planner
    ends = list(accumulate(step.cached_lens))
    for length, end, blocks in zip(step.cached_lens, ends, planner.blocks, strict=True):
        if not length:
            continue
        alone = evolve(step, query_lens=(length,), cached_lens=(0,))
        key, value = (rows[end - length : end] for rows in rig.past)
        query = key.new_zeros(length, step.num_q_heads, step.head_size)
        output = key.new_empty(length, rig.output.shape[1])
        metadata = planner.builder.build(planner.batch(alone, (blocks,)))
        evolve(rig, query=query, key=key, value=value, output=output, metadata=metadata).forward()()


def _shuffled(counts: list[int]) -> tuple[list[int], ...]:
    """Return blocks for requests, in no order, none of them the null block."""
    blocks = list(range(1, 1 + sum(counts)))
    random.Random(0).shuffle(blocks)
    ends = list(accumulate(counts))
    return tuple(blocks[end - count : end] for count, end in zip(counts, ends, strict=True))
