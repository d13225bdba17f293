"""The agreements for a kind of step: the decision of each layer, loaded, and the metadata of a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from attrs import define, field, frozen

import attnplug
from attnplug.batching import SlotTable
from attnplug.contract import GraphShape
from attnplug.errors import NoBackendError, NotNegotiatedError
from attnplug_sglang.batches import batch_of, lengths_of
from attnplug_sglang.inputs import Inputs
from attnplug_sglang.layers import contract_layer, requirements_of, scale_of, scales_in

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch import Tensor

    from attnplug import Agreement, Limits, Plan
    from attnplug.contract import Attention, Batch, Captures, KVCache, Metadata, StepBuilder
    from attnplug_sglang.batches import Lengths
    from attnplug_sglang.layers import HostLayer
    from attnplug_sglang.pools import Pools

_COLUMNS = 16
"""Block tables of eager steps have multiples of so many columns: Triton compiles anew for strides of another kind."""

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
        if self.host.latent:
            v_scale = k_scale  # values are in the keys
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


@define(eq=False)
class Step:
    """
    A step, built.

    Attributes:
        kind: The kind of step.
        metadata: By builder.
        num_tokens: Query tokens, those of a graph's padding included.
        is_captured: Whether a graph reads the metadata.
        inputs: What is written on the device before, or inside of, each replay; by part of the pools.
        is_recorded: Whether the graph writes it.
    """

    kind: Kind
    metadata: Mapping[StepBuilder, Metadata]
    num_tokens: int
    is_captured: bool = False
    inputs: Mapping[str, Inputs] = field(factory=dict)
    is_recorded: bool = False

    def prepare(self, step: Any) -> None:
        """
        Prepare a replay on the device, before the graph or inside of it.

        Args:
            step: SGLang's: that of the replay before the graph, that of the capture inside of it.
        """
        if self.kind.replays_without_build:
            self.write(step)
        recorded = [builder.prepare(metadata) for builder, metadata in self.metadata.items()]
        self.is_recorded = self.is_recorded or all(recorded)

    def write(self, step: Any) -> None:
        """Write what the graph reads of a step of SGLang, on the device."""
        given = step.req_pool_indices, step.seq_lens, step.out_cache_loc
        for inputs in self.inputs.values():
            inputs.write(*given, self.kind.query_len, self.kind.drafts)


class Kind:
    """
    A kind of step, and what carries it out.

    Args:
        engine: What it shares with other kinds.
        drafts: Drafts of each request that are verified in its graphs; 0 for decodes.
        requested: Further requirements, by name.

    Attributes:
        plan: The decision of each layer.
        layers: What carries them out, by the identity of SGLang's module.
        parts: The part of the pools of each builder, and whether its layers are causal.
        states: By backend.
        drafts: As given.
        query_len: Query tokens of each request in its graphs.
        reads_lengths: Whether a backend reads sequence lengths on the CPU when a step is built.
        replays_without_build: Whether the device computes all that changes from replay to replay.
    """

    def __init__(self, engine: Engine, drafts: int = 0, **requested: Any) -> None:
        self.engine, self.requested = engine, requested
        self.plan = plan_of(engine, requested)
        self.layers: dict[int, BoundLayer] = {}
        self.parts: dict[StepBuilder, tuple[str, bool]] = {}
        self.states: dict[str, Captures] = {}
        self.drafts, self.query_len = drafts, drafts or 1
        self._max_captured = 0
        self._steps: dict[int, Step] = {}
        self._inputs: dict[str, Inputs] = {}
        self._starts: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
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
        self._scaled = [layer for layer in self.layers.values() if layer.scales is not None]
        agreements = [builder.agreement for builder in self.parts]
        self.reads_lengths = not all(_reads_no_lengths(each) for each in agreements)
        self.replays_without_build = not requested.get("custom_mask") and all(
            builder.replays_without_build for builder in self.parts
        )

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

    def build_decode(self, step: Any) -> Step | None:
        """
        Return decodes that run eagerly, whose tensors one launch writes.

        None if the batch is empty, or each request has to be checked alone: one is too long, or a backend reads lengths
        that only the device has.
        """
        width, lengths = self.engine.table.shape[1], getattr(step, "seq_lens_cpu", None)
        count, longest = step.seq_lens.shape[0], width
        if lengths is not None:
            values, count = _running(lengths)
            longest = max(values, default=0)
        # Ranks that run together pad their steps.
        elif self.reads_lengths or getattr(step, "global_num_tokens_cpu", None) is not None:
            return None
        if not count or longest > width:
            return None
        self._renew_scales()
        starts, pages = self._starts_of(count, 1), -(-longest // self.engine.pools.page_size)
        pages = -(-pages // _COLUMNS) * _COLUMNS
        given = step.req_pool_indices[:count], step.seq_lens[:count], step.out_cache_loc
        exact = torch.tensor(values, dtype=torch.int32) if self.reads_lengths else None
        made: dict[tuple[str, bool], Batch] = {}
        for part, causal in self.parts.values():
            if (part, causal) not in made:
                inputs = Inputs.made(self._slots_of(part), count, 1, pages)
                inputs.write(*given, 1, 0)
                made[part, causal] = inputs.batch(starts, longest, exact, causal=causal)
        return Step(self, {builder: builder.build(made[key]) for builder, key in self.parts.items()}, count)

    def _slots_of(self, part: str) -> SlotTable:
        pools = self.engine.pools
        return SlotTable(self.engine.table, pools.page_size, pools.translation(part))

    def capture(self, size: int, max_batch_size: int) -> Step:
        """
        Return the step of a graph that is about to be captured: its tensors keep their addresses.

        Args:
            size: Requests of the graph.
            max_batch_size: The most requests of a graph.
        """
        # SGLang says when it captures a shape, and not when it has captured all: each is a capture by itself, the first
        # of the largest size.
        self._max_captured = self._max_captured or max_batch_size
        shape, built, inputs = self._shape(size), {}, self._inputs_of(size)
        batches = self._batches_of(inputs, size, ())
        for state, builders in self._by_state():
            with state.graph_capture(self._max_captured):
                graph = state.graph(shape, host_owned_inputs=bool(inputs))
                for builder in builders:
                    batch = batches[builder] if inputs else graph.dummy_batch(builder)
                    built[builder] = builder.build(batch, graph=graph)
        self._steps[size] = Step(self, built, shape.num_tokens, is_captured=True, inputs=inputs)
        return self._steps[size]

    @property
    def _dummy_length(self) -> int:
        """The length of a request that is made up for a capture: a token of context, where there is room."""
        return min(self.query_len + 1, self.engine.limits.max_seq_len)

    def _shape(self, size: int) -> GraphShape:
        return GraphShape(size, size * self.query_len, self.query_len)

    def _inputs_of(self, size: int) -> dict[str, Inputs]:
        """Return what the graph of a size reads, of each part; nothing where core keeps it, beside masks of a tree."""
        if self.requested.get("custom_mask"):
            return {}
        pages, found = -(-self.engine.limits.max_seq_len // self.engine.pools.page_size), {}
        with torch.inference_mode(mode=False):  # it is written in any mode
            for part, _ in self.parts.values():
                if part not in self._inputs:
                    most = Inputs.made(self._slots_of(part), self._max_captured, self.query_len, pages)
                    most.clear(0)
                    self._inputs[part] = most
                found[part] = self._inputs[part].first(size, self.query_len)
        return found

    def _batches_of(self, inputs: Mapping[str, Inputs], size: int, lengths: Sequence[int]) -> dict[StepBuilder, Batch]:
        """
        Return the batches of a graph's inputs.

        Args:
            inputs: What the graph reads, which was written; made up where there is no request.
            size: Requests of the graph.
            lengths: Sequence lengths of the requests that are no padding.
        """
        longest = max(lengths, default=self._dummy_length)
        if not lengths:
            for each in inputs.values():
                each.clear(longest)
        padding = size - len(lengths) if lengths else 0
        exact = torch.tensor([*lengths, *[0] * padding] if lengths else [longest] * size, dtype=torch.int32)
        starts, made = self._starts_of(size, self.query_len), {}
        for part, causal in self.parts.values() if inputs else ():
            if (part, causal) not in made:
                made[part, causal] = inputs[part].batch(
                    starts, longest, exact, causal=causal, dummy=not lengths, num_padded_reqs=padding
                )
        return {builder: made[key] for builder, key in self.parts.items()} if inputs else {}

    def _starts_of(self, reqs: int, query_len: int) -> tuple[Tensor, Tensor]:
        """Return where queries of one length start, on the device and on the CPU; made once."""
        found = self._starts.get((reqs, query_len))
        if found is None:
            most = max(reqs, self.engine.limits.max_num_reqs)
            if reqs != most:  # fewer requests have the first of them
                whole = self._starts_of(most, query_len)
                found = whole[0][: reqs + 1], whole[1][: reqs + 1]
            else:
                with torch.inference_mode(mode=False):
                    starts = torch.arange(reqs + 1, dtype=torch.int32, device="cpu") * query_len
                    found = starts.to(self.engine.device), starts
            self._starts[reqs, query_len] = found
        return found

    def replay(self, step: Any, size: int) -> Step:
        """
        Write a step into the tensors that the captured graph of a size reads, unless the graph does.

        A rank without a request replays the graph beside ranks that have some: it gets a step that writes nothing.
        """
        self._renew_scales()
        captured = self._steps.get(size)
        if captured is None or not captured.inputs:
            return self._replay_masked(step, size)
        if self.replays_without_build:
            if not captured.is_recorded:
                captured.prepare(step)
            return captured
        lengths = getattr(step, "seq_lens_cpu", None)
        values, _ = _running(step.seq_lens if lengths is None else lengths)
        if values:
            captured.write(step)
        batches = self._batches_of(captured.inputs, size, [value + self.drafts for value in values])
        built = {b: b.build(batches[b], graph=metadata.graph) for b, metadata in captured.metadata.items()}
        return Step(self, built, captured.num_tokens, is_captured=True)

    def _replay_masked(self, step: Any, size: int) -> Step:
        """Build a replay into tensors that core keeps: drafts in a tree have a mask."""
        lengths, shape = lengths_of(step), self._shape(size)
        batches = self._batches(step, lengths) if lengths.queries else {}
        built: dict[StepBuilder, Metadata] = {}
        for state, builders in self._by_state():
            graph = state.graph(shape)
            given = {b: batches[b] if batches else graph.dummy_batch(b) for b in builders}
            built |= state.begin_forward(given, key=shape).metadata
        return Step(self, built, shape.num_tokens, is_captured=True)

    def _renew_scales(self) -> None:
        for layer in self._scaled:
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
        self._steps.clear()
        self._inputs.clear()
        for state in self.states.values():
            state.release_graphs()


def _running(lengths: Tensor | list[int]) -> tuple[list[int], int]:
    """Return the lengths of the requests that are no padding, which comes last, and their number."""
    values: list[int] = lengths if isinstance(lengths, list) else lengths.tolist()
    if values and not values[-1]:
        values = values[: values.index(0)]
    return values, len(values)


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
            return _with_fewest_lengths(engine, {**requested, "kv_cache_form": form})
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


def _with_fewest_lengths(engine: Engine, requested: dict[str, Any]) -> Plan:
    """Return the decision, for steps without lengths on the CPU where what is chosen reads none."""
    page_size = engine.pools.page_size
    found = _planned(engine, requested, page_size)
    if requested.get("custom_mask"):
        return found
    try:
        bare = _planned(engine, {**requested, "seq_lens_cpu_kind": "absent"}, page_size)
    except NoBackendError:
        return found
    is_same = _chosen(bare) == _chosen(found)
    return bare if is_same and all(_reads_no_lengths(group.selection.agreement) for group in bare.groups) else found


def _chosen(plan: Plan) -> dict[str, str]:
    return {name: group.selection.agreement.id for group in plan.groups for name in group.layers}


def _reads_no_lengths(agreement: Agreement) -> bool:
    return agreement.requirements.seq_lens_cpu_kind == "absent" and not agreement.reads_lengths


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
