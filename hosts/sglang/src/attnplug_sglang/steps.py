"""The agreements for a kind of step: the decision of each layer, loaded, and the metadata of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import define, frozen

import attnplug
from attnplug.errors import NoBackendError, NotNegotiatedError
from attnplug_sglang.batches import batch_of
from attnplug_sglang.layers import contract_layer, requirements_of, scale_of, scales_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from attnplug import Limits, Plan
    from attnplug.contract import Attention, Batch, Captures, GraphShape, KVCache, Metadata, StepBuilder
    from attnplug_sglang.batches import Lengths
    from attnplug_sglang.layers import HostLayer
    from attnplug_sglang.pools import Pools

_PAGE_SIZES = (1, 16, 32, 64, 128, 256)
"""Page sizes that a refusal looks for."""


@frozen(eq=False)
class Engine:
    """
    What all kinds of steps share.

    Attributes:
        layers: The attention layers of the model.
        pools: Where their K/V are.
        table: SGLang's table of slots, ``(rows, tokens)``.
        dtype: The model's.
        device: As `attnplug.plan` takes it.
        limits: The most that steps need.
        backend: The candidate that was named; None lets attnplug decide.
    """

    layers: tuple[HostLayer, ...]
    pools: Pools
    table: Tensor
    dtype: Any
    device: Any
    limits: Limits
    backend: str | None


@define(eq=False)
class BoundLayer:
    """
    A layer, carried out.

    Attributes:
        host: SGLang's.
        impl: Its implementation.
        builder: Who builds its metadata.
        scales: What its scales were made of, in a quantized pool; None in others, where SGLang reads no scale.
        cache: Its KV cache; bound at the first call.
    """

    host: HostLayer
    impl: Attention
    builder: StepBuilder
    scales: tuple[Any, ...] | None = None
    cache: KVCache | None = None
    _sinks: tuple[Tensor, Tensor] | None = None

    def renew_scales(self) -> None:
        """
        Take scales over that SGLang has replaced: it may load weights again while it runs, and resets the pool then.

        Raises:
            NotNegotiatedError: The backend takes scales when it is made only, or the layer has one for each head.
            LayerError: A captured graph has the former ones.
        """
        if self.scales is None:
            return
        found = scales_in(self.host)
        if all(new is old for new, old in zip(found, self.scales, strict=True)):
            return
        k_scale, v_scale = (scale_of(self.host, name) for name in ("k_scale", "v_scale"))
        self.impl.update_scales(
            k_scale=1.0 if k_scale is None else k_scale, v_scale=1.0 if v_scale is None else v_scale
        )
        self.scales = found

    def sinks_of(self, given: Tensor, dtype: Any) -> Tensor:
        """
        Return the sinks of a call as a backend takes them: the same tensor for the same tensor.

        Some models keep theirs in bfloat16, whatever the dtype of the model is.

        Args:
            given: ``(num_q_heads,)``, what the model passes.
            dtype: Dtype of the queries.
        """
        if given.dtype in {torch.float32, dtype}:
            return given
        if self._sinks is None or self._sinks[0] is not given:
            self._sinks = (given, given.detach().float())
        return self._sinks[1]


@frozen(eq=False)
class Step:
    """
    A step, built.

    Attributes:
        kind: The kind of step.
        metadata: By builder.
        num_tokens: Query tokens, those of a graph's padding included.
        is_captured: Whether a graph reads the metadata.
    """

    kind: Kind
    metadata: Mapping[StepBuilder, Metadata]
    num_tokens: int
    is_captured: bool = False


class Kind:
    """A kind of step, and what carries it out."""

    def __init__(self, engine: Engine, **requested: Any) -> None:
        self.engine, self.requested = engine, requested
        self.plan = plan_of(engine, requested)
        self.layers: dict[int, BoundLayer] = {}
        self.parts: dict[StepBuilder, tuple[str, bool]] = {}
        self.states: dict[str, Captures] = {}
        self._max_captured = 0
        by_name = {layer.name: layer for layer in engine.layers}
        for group in self.plan.groups:
            backend = group.selection.load()
            if backend.id not in self.states:
                self.states[backend.id] = backend.make_state(engine.limits)
            of_part: dict[str, list[HostLayer]] = {}
            for name in group.layers:
                of_part.setdefault(engine.pools.part_of(by_name[name].module.layer_id), []).append(by_name[name])
            for part, members in of_part.items():
                self._bind(backend, members, part)

    def _bind(self, backend: Any, members: list[HostLayer], part: str) -> None:
        """Make what carries out layers that share an agreement and a block table."""
        wanted = backend.agreement.requirements
        quantized = wanted.kv_cache_dtype != wanted.dtype
        impls = [backend.make_impl(contract_layer(layer, quantized=quantized)) for layer in members]
        builder = backend.make_builder(impls, self.states[backend.id])
        self.parts[builder] = (part, wanted.causal)
        for layer, impl in zip(members, impls, strict=True):
            self.layers[id(layer.module)] = BoundLayer(layer, impl, builder, scales_in(layer) if quantized else None)

    def cache_of(self, layer: BoundLayer) -> KVCache:
        """
        Return the KV cache of a layer: views of SGLang's pool, made once.

        Raises:
            CacheError: The pool is not as its class says.
        """
        layer_id = layer.host.module.layer_id
        if layer.cache is None:
            layer.cache = layer.impl.backend.bind_cache(self.engine.pools.views(layer_id), impl=layer.impl)
        else:
            self.engine.pools.wait(layer_id)
        return layer.cache

    def build(self, step: Any, lengths: Lengths) -> Step:
        """Return a step that runs eagerly."""
        self._renew_scales()
        batches = self._batches(step, lengths)
        built = {builder: builder.build(batch) for builder, batch in batches.items()}
        return Step(self, built, sum(lengths.queries))

    def capture(self, shape: GraphShape, max_batch_size: int) -> Step:
        """Return the step of a graph that is about to be captured: its tensors keep their addresses."""
        # SGLang says when it captures a shape, and not when it has captured all: each is a capture by itself, the first
        # of the largest size.
        self._max_captured = self._max_captured or max_batch_size
        built: dict[StepBuilder, Metadata] = {}
        for state, builders in self._by_state():
            with state.graph_capture(self._max_captured):
                graph = state.graph(shape)
                built |= {b: b.build(graph.dummy_batch(b), graph=graph) for b in builders}
        return Step(self, built, shape.num_tokens, is_captured=True)

    def replay(self, step: Any, lengths: Lengths, shape: GraphShape) -> Step:
        """
        Write a step into the tensors that the captured graph of a shape reads.

        A rank without a request replays the graph beside ranks that have some: it gets a step that writes nothing.
        """
        self._renew_scales()
        batches = self._batches(step, lengths) if lengths.queries else {}
        built: dict[StepBuilder, Metadata] = {}
        for state, builders in self._by_state():
            graph = state.graph(shape)
            given = {b: batches[b] if batches else graph.dummy_batch(b) for b in builders}
            built |= state.begin_forward(given, key=shape).metadata
        return Step(self, built, shape.num_tokens, is_captured=True)

    def _renew_scales(self) -> None:
        for layer in self.layers.values():
            layer.renew_scales()

    def _by_state(self) -> Iterator[tuple[Captures, list[StepBuilder]]]:
        for state in self.states.values():
            yield state, [builder for builder in self.parts if builder.state is state]

    def _batches(self, step: Any, lengths: Lengths) -> dict[StepBuilder, Batch]:
        made: dict[tuple[str, bool], Batch] = {}
        for part, causal in self.parts.values():
            if (part, causal) not in made:
                engine = self.engine
                made[part, causal] = batch_of(step, lengths, engine.pools, part, engine.table, causal=causal)
        return {builder: made[key] for builder, key in self.parts.items()}

    def release(self) -> None:
        """Release the graphs' buffers."""
        for state in self.states.values():
            state.release_graphs()


def plan_of(engine: Engine, requested: Mapping[str, Any]) -> Plan:
    """
    Return the decision of each layer, for the form that the pool has.

    Raises:
        NoBackendError: No backend serves a layer.
        NotNegotiatedError: Only another page size would be served; the fix names it.
    """
    first: NoBackendError | None = None
    for form in engine.pools.forms(engine.layers[0].module.layer_id):
        try:
            return _planned(engine, {**requested, "kv_cache_form": form}, engine.pools.page_size)
        except NoBackendError as error:
            first = first or error
    assert first is not None  # noqa: S101 - a pool has a form
    sizes = [str(size) for size in _PAGE_SIZES if _is_served(engine, requested, size)]
    if sizes:
        raise NotNegotiatedError(
            f"SGLang's pages have {engine.pools.page_size} tokens, and no permitted backend serves that:\n{first}",
            f"with this model, pages of {', '.join(sizes)} tokens are served",
            f"start SGLang with --page-size {sizes[0]}",
        ) from first
    raise first


def _is_served(engine: Engine, requested: Mapping[str, Any], page_size: int) -> bool:
    try:
        _planned(engine, dict(requested), page_size)
    except NoBackendError:
        return False
    return True


def _planned(engine: Engine, requested: dict[str, Any], page_size: int) -> Plan:
    pools = engine.pools
    requests = {
        layer.name: requirements_of(
            layer,
            dtype=engine.dtype,
            kv_cache_dtype=pools.dtype,
            block_size=page_size,
            kv_layout=pools.kv_layout,
            **requested,
        )
        for layer in engine.layers
    }
    return attnplug.plan(requests, engine.device, backend=engine.backend)
