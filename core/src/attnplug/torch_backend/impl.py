"""One layer on torch's own kernels, and where its results go."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

import torch
from attrs import frozen
from torch import Tensor

from attnplug.contract.impl import AttentionImpl
from attnplug.contract.inputs.batch import Batch
from attnplug.ops.merge import merge_attention_states
from attnplug.ops.write import key_and_value_pages, write_kv
from attnplug.torch_backend.builder import plan_params_of
from attnplug.torch_backend.codec import codec_of
from attnplug.torch_backend.plan import make_plan
from attnplug.torch_backend.sdpa import Call
from attnplug.torch_backend.sources import Source, part

if TYPE_CHECKING:
    from collections.abc import Hashable

    from attnplug.contract.backend import Backend
    from attnplug.contract.impl import CacheWrite
    from attnplug.contract.inputs.kv_cache import Cache
    from attnplug.contract.inputs.layer import Layer
    from attnplug.contract.metadata import Metadata
    from attnplug.contract.state import State
    from attnplug.torch_backend.masks import Tile
    from attnplug.torch_backend.plan import Group, Plan


class TorchImpl(AttentionImpl):
    """
    Attends group by group, tile by tile, as the plan says.

    The LSE counts the sink. A sink enters after the kernel, and exactly: see `Results`.
    """

    cache_write: ClassVar[CacheWrite] = "either"
    lse_includes_sink = True
    static_scales: ClassVar[frozenset[str]] = frozenset("kv")

    def __init__(self, layer: Layer, backend: Backend) -> None:
        super().__init__(layer, backend)
        self._heads = (self.num_kv_heads, self.num_queries_per_kv)
        # A copy: the compiler looks through views at what they are views of.
        slopes = None if layer.alibi_slopes is None else layer.alibi_slopes.clone()
        self._codec = codec_of(layer, self.agreement)
        scale = self.scale if self._codec is None else self.scale * self._codec.score_factor
        self._call = Call(scale, self.logits_soft_cap, self.agreement.requirements.alibi, slopes)
        self._sinks = None if layer.sinks is None else layer.sinks.float().view(self._heads)

    @property
    def plan_key(self) -> Hashable:
        """Scale, cap and slopes enter at the kernel call: layers that see the same keys share a plan."""
        return self.window

    def update_kv_cache(
        self, key: Tensor, value: Tensor, kv_cache: Cache, slot_mapping: Tensor, *, padded: bool = True
    ) -> None:
        """Write the rows into their slots, encoded where the cache is narrower than the rows."""
        if self._codec is not None and key.dtype != self._codec.narrow:
            key, value = self._codec.encode(key, value)
        write_kv(key, value, *key_and_value_pages(kv_cache), slot_mapping, padded=padded)

    def run(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Cache | None,
        metadata: Metadata,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Write the rows into the cache where forward does, then run the kernel calls of the plan."""
        plan, slots = self.plan_of(metadata), metadata.batch.slot_mapping
        if self._codec is not None and key is not None and value is not None:
            key, value = self._codec.encode(key, value)
        if self.forward_writes and key is not None and value is not None and kv_cache is not None and slots is not None:
            self.update_kv_cache(key, value, kv_cache, slots, padded=_may_be_padded(metadata))
        # Without K/V everything is cached, and the plan reads nothing else.
        source = Source(
            cast("Tensor", key), cast("Tensor", value), kv_cache, cast("State", metadata.state).workspace, self._codec
        )
        self._run(plan, query, source, self._results(output, lse))

    def run_profile(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, output: Tensor, lse: Tensor | None
    ) -> None:
        """Attend the given K/V, dense, as one sequence."""
        if key is None or value is None or not query.shape[0]:
            return
        batch = Batch.from_lengths([query.shape[0]], [key.shape[0]])
        shape = plan_params_of(self.agreement, self.window, query.device.type)
        if self._codec is not None:
            key, value = self._codec.encode(key, value)
        source = Source(key, value, codec=self._codec)
        self._run(make_plan(shape, batch, query.device), query, source, self._results(output, lse))

    def _results(self, output: Tensor, lse: Tensor | None) -> Results:
        heads = output.view(-1, *self._heads, self.head_size_v)
        return Results(heads, None if lse is None else lse.view(-1, *self._heads), self._sinks)

    def _run(self, plan: Plan, query: Tensor, source: Source, results: Results) -> None:
        for start, end in plan.empty:
            results.clear(start, end)
        if plan.prefix is None:
            self._run_groups(plan, plan.groups, query, source, results)
            return
        prefix, rest = (pass_of(results, plan.prefix.rows, sinks) for sinks in (None, self._sinks))
        self._run_groups(plan, (plan.prefix,), query, source, prefix)
        self._run_groups(plan, plan.groups, query, source, rest)
        merge(results, prefix, rest)

    def _run_groups(
        self, plan: Plan, groups: tuple[Group, ...], query: Tensor, source: Source, results: Results
    ) -> None:
        wide: tuple[list[Tensor], list[Tensor]] = ([], [])
        for group in groups:
            taken = group.queries.taken
            rows = part(query, taken) if isinstance(taken, slice) else query.index_select(0, taken)
            rows = rows.view(group.members, group.rows, *query.shape[1:])
            target, step = results.of(group), group.per_gather or group.members
            for first in range(0, group.members, step):
                members = slice(first, min(first + step, group.members))
                key, value = source.of(group, members)
                if not plan.kernel.fused:
                    key, value = _as_float32(key, wide[0]), _as_float32(value, wide[1])
                for tile in group.tiles:
                    self._attend(plan, tile, part(rows, members), key, value, target.part(members))
            results.keep(group, target)

    def _attend(self, plan: Plan, tile: Tile, query: Tensor, key: Tensor, value: Tensor, results: Results) -> None:
        (first, last), seen = tile.rows, slice(*tile.keys)
        rows = part(query, slice(first, last), axis=1)
        folded = rows.transpose(1, 2) if tile.causal else self._fold(rows)
        key, value = part(key, seen, axis=2), part(value, seen, axis=2)
        out, lse = plan.kernel.attend(folded, key, value, tile.mask, self._call, causal=tile.causal)
        out = self._unfold(out, last - first, folded=not tile.causal)
        if lse is not None and results.needs_lse:
            lse = self._unfold(lse.unsqueeze(-1), last - first, folded=not tile.causal).squeeze(-1)
        else:
            lse = None
        if tile.fully_masked is not None:
            out, lse = _without(tile.fully_masked[:, :, None, None], out, lse)
        if self._codec is not None and self._codec.output_factor is not None:
            out = out * self._codec.output_factor
        results.put(first, last, out, lse)

    def _fold(self, rows: Tensor) -> Tensor:
        """Put the query heads of a KV head side by side: ``(members, num_kv_heads, rows * ratio, head_size)``."""
        members, count, _, size = rows.shape
        if count == 1:  # of decodes, which are the short calls: one view in place of three
            return rows.view(members, *self._heads, size)
        grouped = rows.view(members, count, *self._heads, size).transpose(1, 2)
        return grouped.reshape(members, self.num_kv_heads, -1, size)

    def _unfold(self, out: Tensor, rows: int, *, folded: bool) -> Tensor:
        """Return ``(members, rows, num_kv_heads, ratio, size)``, a view."""
        if folded and rows == 1:
            return out.unsqueeze(1)
        if folded:
            return out.view(*out.shape[:2], rows, -1, out.shape[-1]).transpose(1, 2)
        return out.view(-1, *self._heads, rows, out.shape[-1]).permute(0, 3, 1, 2, 4)


def _may_be_padded(metadata: Metadata) -> bool:
    """Whether a row may have no slot. The host's copy tells, once a step; a graph has to be ready for padding."""
    batch = metadata.batch
    host = batch.slot_mapping_cpu
    if metadata.graph is not None or host is None:
        return True
    return batch.cached("torch: padded", lambda: bool(host.numel()) and int(host.amin()) < 0)


def _without(fully_masked: Tensor, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return what rows that attend nothing have: output 0 and LSE -inf. Which these are only the device knows."""
    lse = None if lse is None else lse.masked_fill(fully_masked, -torch.inf)
    return out.masked_fill(fully_masked.unsqueeze(-1), 0), lse


def _as_float32(rows: Tensor, memory: list[Tensor]) -> Tensor:
    """
    Return rows in float32, each head's together: matrix products would else copy them, slower, at every tile.

    They go into memory that the next rows use again: fresh memory costs the CPU more than the copy.
    """
    if rows.dtype == torch.float32 and rows.is_contiguous():
        return rows
    if not memory or memory[0].numel() < rows.numel():
        memory[:] = [torch.empty(rows.numel(), dtype=torch.float32, device=rows.device)]
    return memory[0][: rows.numel()].view(rows.shape).copy_(rows)


@frozen(eq=False)
class Results:
    """
    Output and LSE, their heads grouped by KV head.

    Attributes:
        output: ``(tokens, num_kv_heads, ratio, head_size_v)``, or of a group ``(members, rows, num_kv_heads, ...)``.
        lse: The same without the last axis, float32; None where nobody asked.
        sinks: ``(num_kv_heads, ratio)`` float32, what results are put with; None for none. With sink ``s`` the
            denominator grows from ``exp(lse)`` to ``exp(lse) + exp(s)``: the output shrinks by ``sigmoid(lse - s)``.
    """

    output: Tensor
    lse: Tensor | None
    sinks: Tensor | None

    def clear(self, start: int, end: int) -> None:
        """Set rows that attend nothing: output 0, and of the LSE what the sinks leave."""
        self.output[start:end] = 0
        if self.lse is not None:
            self.lse[start:end] = -torch.inf if self.sinks is None else self.sinks

    @property
    def needs_lse(self) -> bool:
        """Whether results are put with their LSE, be it that a sink enters by it."""
        return self.lse is not None or self.sinks is not None

    def of(self, group: Group) -> Results:
        """Return a group's results: views of these where its rows lie together, else fresh memory for `keep`."""
        shape, where = (group.members, group.rows), group.queries.put
        if isinstance(where, slice):
            lse = None if self.lse is None else part(self.lse, where).view(*shape, *self.lse.shape[1:])
            return Results(part(self.output, where).view(*shape, *self.output.shape[1:]), lse, self.sinks)
        lse = None if self.lse is None else self.lse.new_empty(*shape, *self.lse.shape[1:])
        return Results(self.output.new_empty(*shape, *self.output.shape[1:]), lse, self.sinks)

    def part(self, members: slice) -> Results:
        """Return those of some members of a group, as views."""
        if members.stop - members.start == self.output.shape[0]:
            return self
        return Results(self.output[members], None if self.lse is None else self.lse[members], self.sinks)

    def put(self, start: int, end: int, output: Tensor, lse: Tensor | None) -> None:
        """Write the rows of a tile into a group's results, as the sinks leave them."""
        if self.sinks is not None and lse is not None:
            output = output * torch.sigmoid(lse - self.sinks).unsqueeze(-1)
            lse = torch.logaddexp(lse, self.sinks)
        rows = slice(start, end)
        part(self.output, rows, axis=1).copy_(output)
        if self.lse is not None and lse is not None:
            part(self.lse, rows, axis=1).copy_(lse)

    def keep(self, group: Group, results: Results) -> None:
        """Take a group's results in, padding left out; nothing to do where they are views."""
        kept, put = group.queries.kept, group.queries.put
        if isinstance(put, slice):
            return
        for mine, theirs in ((self.output, results.output), (self.lse, results.lse)):
            if mine is not None and theirs is not None:
                rows = theirs.flatten(0, 1)
                mine.index_copy_(0, put, rows if kept is None else rows.index_select(0, kept))


def pass_of(results: Results, rows: int, sinks: Tensor | None) -> Results:
    """Return room for one pass, in float32: what is merged is rounded once. A sink enters one of the passes alone."""
    shape, device = (rows, *results.output.shape[1:]), results.output.device
    output = torch.empty(shape, dtype=torch.float32, device=device)
    return Results(output, torch.empty(shape[:-1], dtype=torch.float32, device=device), sinks)


def merge(results: Results, prefix: Results, rest: Results) -> None:
    """Write what two passes give together."""
    rows = prefix.output.shape[0]
    states = [part.flatten(1, 2) for pair in (prefix, rest) for part in (pair.output, pair.lse) if part is not None]
    output, lse = merge_attention_states(*states, sink_in_b=rest.sinks is not None)
    results.output[:rows].copy_(output.view(prefix.output.shape))
    if results.lse is not None:
        results.lse[:rows].copy_(lse.view(rows, *results.lse.shape[1:]))
