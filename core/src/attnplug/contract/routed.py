"""
A routed pair as a backend: pure decodes run on one vendor's classes, all other batches on another's.

The host holds it like any other backend. Each batch is planned by one of the two builders, and forwarded by the
implementation of the same side. What both sides read is given to both: the layer's tensors, the KV cache, the limits.
"""

from __future__ import annotations

from functools import cache
from math import lcm
from typing import TYPE_CHECKING, Any, Final

from attrs import evolve, frozen

from attnplug.contract.calls.check import check_made
from attnplug.contract.guards.cache import by_phase
from attnplug.contract.guards.scales import SCALELESS
from attnplug.contract.metadata import assemble
from attnplug.contract.step_builder import check_supports_graphs
from attnplug.contract.vendor import AttentionImpl, Backend, Metadata, MetadataBuilder, State
from attnplug.errors import PluginContractError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    import torch
    from torch import Tensor

    from attnplug.contract.graphs.buffers import GraphBuffers
    from attnplug.contract.graphs.shape import GraphShape
    from attnplug.contract.inputs.batch import Batch
    from attnplug.contract.inputs.kv_cache import CacheTensor
    from attnplug.contract.inputs.layer import Layer
    from attnplug.contract.inputs.limits import Limits, Parallel
    from attnplug.contract.inputs.phase import BatchSplit
    from attnplug.contract.loaded import LoadedBackend
    from attnplug.negotiation.agreement import Agreement
    from attnplug.request.device import Device


def route_pair(agreement: Agreement, device: Device, decode: LoadedBackend, rest: LoadedBackend) -> RoutedBackend | str:
    """
    Return the backend of a routed pair, or what the two do not share.

    Args:
        agreement: The terms of the pair.
        device: The device that was selected for.
        decode: The backend of pure decodes.
        rest: The backend of all other batches.
    """
    differences = "; ".join(_differences(decode, rest))
    return differences or _backend_class(decode, rest, agreement.cudagraph)(agreement, device, decode, rest)


class RoutedBackend(Backend):
    """
    A backend of two.

    Attributes:
        decode: The backend of pure decodes.
        rest: The backend of all other batches.
    """

    decode: LoadedBackend
    rest: LoadedBackend

    def __init__(self, agreement: Agreement, device: Device, decode: LoadedBackend, rest: LoadedBackend) -> None:
        super().__init__(agreement, device)
        self.decode, self.rest = decode, rest

    def cache_tensors(self, num_blocks: int) -> dict[str, CacheTensor]:
        """Describe the KV cache of both: aligned, and without room between blocks, where either needs it."""
        decode, rest = (side.cache_tensors(num_blocks) for side in (self.decode, self.rest))
        return {role: _common_tensor(decode[role], one) for role, one in rest.items()}

    def workspace_bytes(self, limits: Limits) -> int:
        """Return the size of both workspaces: neither side may find what the other one has written."""
        return self.decode.workspace_bytes(limits) + self.rest.workspace_bytes(limits)

    @property
    def supports_max_num_splits(self) -> bool:
        """Whether both keep `Limits.max_num_splits`."""
        return self.decode.supports_max_num_splits and self.rest.supports_max_num_splits

    def warmup(self, loaded: Any, shapes: Sequence[GraphShape]) -> None:
        """Warm up each side with the shapes that are routed to it."""
        del loaded
        for side, is_decode in ((self.decode, True), (self.rest, False)):
            own = [shape for shape in shapes if self.decodes(shape) is is_decode]
            if own:
                side.warmup(own)

    def dummy_batch(self, key: GraphShape) -> Batch:
        """Return the dummy batch of the side that the shape is routed to."""
        return (self.decode if self.decodes(key) else self.rest).dummy_batch(key)

    def move_blocks(self, src: Any, dst: Any, pairs: Tensor) -> None:
        """Copy whole blocks, as the backend of all other batches does: both have the same KV cache."""
        self.rest.wrapped.move_blocks(src, dst, pairs)

    def decodes(self, key: GraphShape) -> bool:
        """Whether a shape is that of pure decodes, by the rule that `Captures` and `StepBuilder` split it by."""
        return key.query_len is not None and key.query_len <= self.agreement.requirements.decode_query_len


class RoutedImpl(AttentionImpl):
    """
    One layer of a pair.

    Attributes:
        decode: The implementation that runs pure decodes.
        rest: The implementation that runs all other batches.
    """

    cache_write = "either"
    backend: RoutedBackend
    decode: AttentionImpl
    rest: AttentionImpl

    def __init__(self, layer: Layer, backend: RoutedBackend) -> None:
        super().__init__(layer, backend)
        # One writer for both, also where one side leaves it to the layer and the other does not.
        given = layer if self.forward_writes or not self.host_writes else evolve(layer, cache_write="host")
        self.decode, self.rest = (_made(side, given) for side in _sides(backend))
        decode, rest = self.decode, self.rest
        for name in ("query_dtype", "output_dtype", "output_width"):
            _check_same(self, name, getattr(decode, name), getattr(rest, name))
        # A batch of pure decodes has no other phase, and all other batches have both.
        only = frozenset({"decode"})
        _check_same(self, "forward_writes", decode.forward_writes & only, self.forward_writes & only)
        _check_same(self, "forward_writes", rest.forward_writes, self.forward_writes)

    @property
    def plan_key(self) -> Any:
        """The plan keys of both: layers share a plan where both sides share one."""
        return self.decode.plan_key, self.rest.plan_key

    @property
    def query_dtype(self) -> torch.dtype:
        """Dtype of the queries, the same of both."""
        return self.rest.query_dtype

    @property
    def output_dtype(self) -> torch.dtype:
        """Dtype of the output, the same of both."""
        return self.rest.output_dtype

    @property
    def output_width(self) -> int:
        """Elements of one output row, the same of both."""
        return self.rest.output_width

    def run(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Any,
        metadata: Any,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Run the side that has planned the batch."""
        side = self.decode if metadata.is_decode else self.rest
        side.run(query, key, value, kv_cache, metadata.routed, output, lse)

    def update_kv_cache(self, key: Tensor, value: Tensor, kv_cache: Any, slot_mapping: Tensor) -> None:
        """Write K/V into the KV cache that both read."""
        self.rest.update_kv_cache(key, value, kv_cache, slot_mapping)

    def init_cache(self, kv_cache: Any) -> None:
        """Let both write what is their own."""
        self.decode.init_cache(kv_cache)
        self.rest.init_cache(kv_cache)

    def run_profile(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, output: Tensor, lse: Tensor | None
    ) -> None:
        """Run what a profiling run measures of either: the memory is that of the larger one."""
        self.decode.run_profile(query, key, value, output, lse)
        self.rest.run_profile(query, key, value, output, lse)


class _SparseImpl(RoutedImpl):
    """A layer of a pair of which both sides attend to selected tokens."""

    def run_sparse(
        self,
        query: Tensor,
        key: Tensor | None,
        kv_cache: Any,
        metadata: Any,
        indices: Tensor,
        index_lens: Tensor | None,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Run the side that has planned the batch."""
        side = self.decode if metadata.is_decode else self.rest
        side.run_sparse(query, key, kv_cache, metadata.routed, indices, index_lens, output, lse)


class _LateImpl(RoutedImpl):
    """A layer of a pair of which both sides take parameters after they were made."""

    def parameters_changed(self) -> None:
        """Give both the layer's parameters of now."""
        for side in (self.decode, self.rest):
            side.layer = self.layer
            side.parameters_changed()


@frozen(eq=False, kw_only=True)
class RoutedMetadata(Metadata):
    """
    The metadata of a batch, and that of the side that it is routed to.

    Attributes:
        is_decode: Whether it is routed to the backend of pure decodes.
        routed: What that side's builder has planned.
    """

    is_decode: bool
    routed: Metadata


class RoutedState(State):
    """
    The states of both sides. Each has a workspace.

    Attributes:
        decode: The state of the backend of pure decodes.
        rest: The state of the backend of all other batches.
    """

    backend: RoutedBackend
    decode: State
    rest: State

    def __init__(
        self, backend: RoutedBackend, limits: Limits, device: torch.device, parallel: Parallel | None = None
    ) -> None:
        super().__init__(backend, limits, device, parallel)
        made = [side.wrapped.state_class(side.wrapped, limits, device, parallel) for side in _sides(backend)]
        for one in made:
            check_made(one, State)
        self.decode, self.rest = made

    @property
    def workspace(self) -> Tensor:
        """The workspace of all other batches, once both are allocated. Each side reads its own."""
        _ = self.decode.workspace
        return self.rest.workspace

    @property
    def workspace_bytes(self) -> int:
        """Bytes of both workspaces."""
        return self.decode.workspace_bytes + self.rest.workspace_bytes

    def lacks(self, backend: Backend) -> bool:
        """Whether a side's workspace is smaller than a further agreement of it needs."""
        return any(state.lacks(of_side) for state, of_side in self._pairs(backend))

    def enlarge(self, backend: Backend) -> None:
        """Make each side's workspace as large as a further agreement needs it."""
        for state, of_side in self._pairs(backend):
            if state.lacks(of_side):
                state.enlarge(of_side)

    def _pairs(self, backend: Backend) -> Iterator[tuple[State, Backend]]:
        assert isinstance(backend, RoutedBackend)  # noqa: S101 - its id has been compared
        yield self.decode, backend.decode.wrapped
        yield self.rest, backend.rest.wrapped


class RoutedBuilder(MetadataBuilder):
    """
    Plans each batch with the builder of the side that it is routed to.

    Attributes:
        decode: The builder of pure decodes.
        rest: The builder of all other batches.
    """

    backend: RoutedBackend
    decode: MetadataBuilder
    rest: MetadataBuilder

    def __init__(self, backend: RoutedBackend, impls: Sequence[RoutedImpl], state: RoutedState) -> None:
        super().__init__(backend, impls, state)
        of_sides = ([impl.decode for impl in impls], state.decode), ([impl.rest for impl in impls], state.rest)
        made = [
            side.wrapped.builder_class(side.wrapped, *of) for side, of in zip(_sides(backend), of_sides, strict=True)
        ]
        for one in made:
            check_made(one, MetadataBuilder)
            check_supports_graphs(one)
        self.decode, self.rest = made
        self._captures_mixed = self.graph_level == "always"

    def plan_batch(
        self, batch: Batch, split: BatchSplit, *, fast: bool, graph: GraphBuffers | None
    ) -> Mapping[str, Any]:
        """Plan with the builder that the batch is routed to; for a graph, with the one that its shape is routed to."""
        is_decode = _is_pure_decode(batch, split, graph)
        side = self.decode if is_decode else self.rest
        return _routed(side, split, side.plan_batch(batch, split, fast=fast, graph=graph), graph, is_decode=is_decode)

    def replan_block_table(self, metadata: Any, batch: Batch, split: BatchSplit) -> Mapping[str, Any]:
        """Plan again with the builder that has planned for the same requests."""
        side = self.decode if metadata.is_decode else self.rest
        fields = side.replan_block_table(metadata.routed, batch, split)
        return _routed(side, split, fields, None, is_decode=metadata.is_decode)

    def plan_next_step(self, metadata: Any, batch: Batch, split: BatchSplit) -> Mapping[str, Any]:
        """Advance the plan; the first step after a batch of the other side is planned anew."""
        is_decode = _is_pure_decode(batch, split, None)
        side = self.decode if is_decode else self.rest
        if is_decode is metadata.is_decode:
            fields = side.plan_next_step(metadata.routed, batch, split)
        else:
            fields = side.plan_batch(batch, split, fast=True, graph=None)
        return _routed(side, split, fields, None, is_decode=is_decode)

    def prepare_in_graph(self, metadata: Any) -> None:
        """Compute on the device what a replay of the metadata's side reads."""
        (self.decode if metadata.is_decode else self.rest).prepare_in_graph(metadata.routed)

    @property
    def decodes_first(self) -> bool:
        """Whether decodes go to the front of batches that have others: as their builder says."""
        return self.rest.decodes_first

    @property
    def replays_without_build(self) -> bool:
        """Whether every graph of the agreed level may be replayed again without a build."""
        return self.decode.replays_without_build and (not self._captures_mixed or self.rest.replays_without_build)

    @property
    def graph_lengths(self) -> tuple[int, ...]:
        """The lengths of either that captures graphs."""
        lengths = {*self.decode.graph_lengths, *(self.rest.graph_lengths if self._captures_mixed else ())}
        return tuple(sorted(lengths))

    def use_cascade_attention(self, common_prefix_len: int, query_lens: Sequence[int]) -> bool:
        """Whether the side that gets such a batch expects a shared prefix to be worth it."""
        longest = max(query_lens, default=0)
        is_decode = longest <= self.agreement.requirements.decode_query_len and set(query_lens) == {longest}
        return (self.decode if is_decode else self.rest).use_cascade_attention(common_prefix_len, query_lens)


class _ExcludingBuilder(RoutedBuilder):
    """The builder of a pair of which a side captures less than its graph level says."""

    def can_capture(self, batch: Batch) -> bool:
        """
        Whether the side whose graph takes a batch can capture it.

        Decodes may be replayed from the graph of a mixed shape too, where there are any.
        """
        is_decode = batch.max_query_len <= self.agreement.requirements.decode_query_len
        by_rest = not is_decode or self._captures_mixed
        return (not is_decode or self.decode.can_capture(batch)) and (not by_rest or self.rest.can_capture(batch))


# --- machinery ---

_WRITERS: Final[Mapping[str, frozenset[str]]] = {
    "forward": frozenset({"forward"}),
    "host": frozenset({"host"}),
    "either": frozenset({"forward", "host"}),
}


def _sides(backend: RoutedBackend) -> tuple[LoadedBackend, LoadedBackend]:
    return backend.decode, backend.rest


def _is_pure_decode(batch: Batch, split: BatchSplit, graph: GraphBuffers | None) -> bool:
    """
    Whether a batch is routed to the backend of pure decodes.

    It is decided by the shape alone, by which graphs are chosen too. The last token of a chunked prefill has the shape
    of a decode. In a graph the split is that of its shape, whatever is replayed from it.
    """
    if split.num_prefills:
        return False
    return graph is not None or batch.num_reqs * batch.max_query_len == batch.num_actual_tokens


def _routed(
    side: MetadataBuilder, split: BatchSplit, fields: Mapping[str, Any], graph: GraphBuffers | None, *, is_decode: bool
) -> Mapping[str, Any]:
    return {"is_decode": is_decode, "routed": assemble(side, split, fields, graph)}


def _made(side: LoadedBackend, layer: Layer) -> AttentionImpl:
    made = side.impl_class(layer, side.wrapped)
    check_made(made, AttentionImpl)
    return made


def _check_same(impl: RoutedImpl, name: str, decode: object, rest: object) -> None:
    if decode != rest:
        raise PluginContractError(
            f"layer {impl.layer.name!r} of {impl.agreement.id} was made, and {name} differs",
            f"it is {_shown(decode)} for pure decodes and {_shown(rest)} for all other batches; a host sees one",
            f"name {impl.backend.rest.id!r} alone, or another pair",
        )


def _shown(value: object) -> str:
    return ", ".join(sorted(map(repr, value))) or "none" if isinstance(value, (set, frozenset)) else repr(value)


def _common_tensor(decode: CacheTensor, rest: CacheTensor) -> CacheTensor:
    alignment = lcm(decode.alignment, rest.alignment)
    return evolve(rest, alignment=alignment, contiguous_blocks=decode.contiguous_blocks or rest.contiguous_blocks)


def _differences(decode: LoadedBackend, rest: LoadedBackend) -> Iterator[str]:
    """Yield what two backends do not share, which has to be the same for one layer and one KV cache."""
    kinds, agreed = (decode.impl_class, rest.impl_class), rest.agreement
    described = [_described(side.cache_tensors(2)) for side in (decode, rest)]
    if described[0] != described[1]:
        yield f"the KV cache of {decode.id} is {described[0]}, and that of {rest.id} is {described[1]}"
    if _writers(*kinds)["decode"] is None:
        who = [by_phase(kind.cache_write)["decode"] for kind in kinds]
        yield f"decodes are written into the KV cache by the {who[0]} with {decode.id}, by the {who[1]} with {rest.id}"
    requested = agreed.requirements
    if requested.sinks and requested.return_lse and kinds[0].lse_includes_sink is not kinds[1].lse_includes_sink:
        counted = [kind.lse_includes_sink for kind in kinds]
        yield f"lse_includes_sink is {counted[0]} in {decode.id}, {counted[1]} in {rest.id}"
    if agreed.kv_cache_dtype in SCALELESS:
        return
    for name in ("static_scales", "query_quantization"):
        values = [getattr(kind, name) for kind in kinds]
        if values[0] != values[1]:
            yield f"{name} is {_shown(values[0])} in {decode.id}, {_shown(values[1])} in {rest.id}"


def _described(tensors: Mapping[str, CacheTensor]) -> dict[str, str]:
    """Return what both sides have to see alike of each tensor, in words."""
    return {
        role: f"{one.shape} {str(one.dtype).removeprefix('torch.')} in the order {one.stride_order}, blocks on axis"
        f" {one.block_axis} with {one.block_padding} elements of padding, filled with {one.fill}"
        for role, one in tensors.items()
    }


def _writers(decode: type[AttentionImpl], rest: type[AttentionImpl]) -> dict[str, str | None]:
    """Return who may write the K/V of each phase, as `AttentionImpl.cache_write` has it; None where nobody may."""
    one, other = by_phase(decode.cache_write), by_phase(rest.cache_write)
    both = _WRITERS[one["decode"]] & _WRITERS[other["decode"]]
    return {
        "prefill": other["prefill"],
        "decode": next((name for name, writers in _WRITERS.items() if writers == both), None),
    }


def _backend_class(decode: LoadedBackend, rest: LoadedBackend, level: str) -> type[RoutedBackend]:
    decode_builder, rest_builder = decode.wrapped.builder_class, rest.wrapped.builder_class
    members = {
        "impl_class": _impl_class(decode.impl_class, rest.impl_class),
        "builder_class": _builder_class(decode_builder, rest_builder, captures_mixed=level == "always"),
        "metadata_class": RoutedMetadata,
        "state_class": RoutedState,
    }
    return type("RoutedBackend", (RoutedBackend,), members)


@cache  # one class for one pair: a layer that one load has made is known to another
def _impl_class(decode: type[AttentionImpl], rest: type[AttentionImpl]) -> type[RoutedImpl]:
    lse = decode.lse_includes_sink
    members: dict[str, Any] = {
        "cache_write": _writers(decode, rest),
        "lse_includes_sink": lse if lse is rest.lse_includes_sink else None,
        "static_scales": decode.static_scales & rest.static_scales,
        "graphs_read_scales": decode.graphs_read_scales and rest.graphs_read_scales,
        "needs_finite_null_block": decode.needs_finite_null_block or rest.needs_finite_null_block,
        "query_quantization": rest.query_quantization,
    }
    optional = {"run_sparse": _SparseImpl, "parameters_changed": _LateImpl}
    bases = [base for name, base in optional.items() if _both_override(name, decode, rest)]
    return type("RoutedImpl", (*bases, RoutedImpl), members)


def _both_override(name: str, decode: type[AttentionImpl], rest: type[AttentionImpl]) -> bool:
    own = getattr(AttentionImpl, name)
    return getattr(decode, name) is not own and getattr(rest, name) is not own


def _builder_class(
    decode: type[MetadataBuilder], rest: type[MetadataBuilder], *, captures_mixed: bool
) -> type[RoutedBuilder]:
    members: dict[str, Any] = {
        "supports_graphs": decode.supports_graphs and (rest.supports_graphs or not captures_mixed),
        # Decodes that are routed have one length.
        "requires_uniform_decodes": rest.requires_uniform_decodes,
    }
    # A builder without the method repeats the checks of a host's own inputs for less.
    excludes = any(kind.can_capture is not MetadataBuilder.can_capture for kind in (decode, rest))
    return type("RoutedBuilder", (_ExcludingBuilder if excludes else RoutedBuilder,), members)
