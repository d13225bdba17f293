"""One layer on torch's own kernels, and the rows of output and LSE that its results go to."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, cast

import torch
from attrs import frozen
from torch import Tensor

from attnplug.contract.inputs.batch import Batch
from attnplug.contract.vendor import AttentionImpl
from attnplug.ops.merge import merge_attention_states
from attnplug.ops.write import write_kv, write_pages
from attnplug.torch_backend.builder import plan_params_of, sizes_on
from attnplug.torch_backend.codec import codec_of
from attnplug.torch_backend.plan import make_plan
from attnplug.torch_backend.sdpa import ScoreParams
from attnplug.torch_backend.selected import attend_selected
from attnplug.torch_backend.sources import Sources, narrow

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from attnplug.contract.inputs.kv_cache import KVCache
    from attnplug.contract.inputs.layer import Layer
    from attnplug.contract.vendor import Backend, CacheWrite, Metadata, State
    from attnplug.torch_backend.masks import Tile
    from attnplug.torch_backend.plan import Group, Plan, WholeCall
    from attnplug.torch_backend.sdpa import TileKernel


class TorchImpl(AttentionImpl):
    """
    Computes a plan group by group and tile by tile.

    The LSE includes the sink, which enters exactly and after the kernel: see `Results`.
    """

    cache_write: ClassVar[CacheWrite] = "either"
    lse_includes_sink = True
    static_scales: ClassVar[frozenset[str]] = frozenset("kv")

    def __init__(self, layer: Layer, backend: Backend) -> None:
        super().__init__(layer, backend)
        self._heads = (self.num_kv_heads, self.num_queries_per_kv)
        self._size_of_latents = self.head_size_v if self.agreement.requirements.latent else None
        self.parameters_changed()

    def parameters_changed(self) -> None:
        """Derive what depends on the layer's scales, sinks and slopes."""
        layer = self.layer
        # A copy: the compiler tracks the storage behind a view.
        slopes = None if layer.alibi_slopes is None else layer.alibi_slopes.clone()
        self._codec = codec_of(layer, self.agreement)
        scale = self.scale if self._codec is None else self.scale * self._codec.score_factor
        self._score_params = ScoreParams(scale, self.logits_soft_cap, self.agreement.requirements.alibi, slopes)
        self._sinks = None if layer.sinks is None else layer.sinks.float().view(self._heads)

    @property
    def plan_key(self) -> Hashable:
        """The window: scale, cap and slopes enter at the kernel call, so that layers with one window share a plan."""
        return self.window

    def update_kv_cache(
        self, key: Tensor, value: Tensor, kv_cache: KVCache, slot_mapping: Tensor, *, padded: bool = True
    ) -> None:
        """Write K/V, quantized where the KV cache is FP8; `padded` is False if no slot is negative."""
        if self._size_of_latents is not None:
            if self._codec is not None and key.dtype != self._codec.narrow:
                key, _ = self._codec.encode(key, key[..., : self._size_of_latents])
            write_pages(key, kv_cache.k, slot_mapping, padded=padded)
            return
        if self._codec is not None and key.dtype != self._codec.narrow:
            key, value = self._codec.encode(key, value)
        write_kv(key, value, kv_cache.k, kv_cache.v, slot_mapping, padded=padded)

    def run(
        self,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: KVCache | None,
        metadata: Metadata,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Write K/V of the call where this layer does, then compute its plan."""
        plan, slots = self.plan_of(metadata), metadata.batch.slot_mapping
        if key is not None and self._size_of_latents is not None:
            value = key[..., : self._size_of_latents]
        if self._codec is not None and key is not None and value is not None:
            key, value = self._codec.encode(key, value)
        if self.forward_writes and key is not None and value is not None and kv_cache is not None and slots is not None:
            self.update_kv_cache(key, value, kv_cache, slots, padded=_may_be_padded(metadata))
        whole = plan.whole
        if whole is not None and self._codec is None and key is not None and value is not None:
            self._run_whole(plan.kernel, whole, query, key, value, output, lse)
            return
        # Without K/V everything is cached, and the plan reads nothing else.
        sources = Sources(
            cast("Tensor", key),
            cast("Tensor", value),
            kv_cache,
            cast("State", metadata.state).workspace,
            self._codec,
            self._size_of_latents,
        )
        self._run(plan, query, sources, self._results(output, lse))

    def run_sparse(
        self,
        query: Tensor,
        key: Tensor | None,
        kv_cache: KVCache,
        metadata: Metadata,
        indices: Tensor,
        index_lens: Tensor | None,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Write latents of the call where this layer does, then attend to the selected ones; no plan is read."""
        batch, size = metadata.batch, self.head_size_v
        if self.forward_writes and key is not None and batch.slot_mapping is not None:
            self.update_kv_cache(key, key[..., :size], kv_cache, batch.slot_mapping, padded=_may_be_padded(metadata))
        rows = slice(0, batch.num_actual_tokens)
        results = self._results(output, lse)
        target = Results(results.output[None], None if results.lse is None else results.lse[None], self._sinks)
        most = sizes_on(query.device.type).gathered
        lens = None if index_lens is None else index_lens[rows]
        chosen, params, codec = indices[rows], self._score_params, self._codec
        parts = attend_selected(query[rows], kv_cache.k, chosen, lens, params, size, most, codec)
        for first, last, out, found, nothing in parts:
            heads = (1, last - first, *self._heads)
            clean = _without(nothing[None, :, None, None], out.view(*heads, size), found.view(heads))
            if self._codec is not None and self._codec.output_factor is not None:
                clean = (clean[0] * self._codec.output_factor, clean[1])
            target.write_tile(first, last, *clean)

    def run_profile(
        self, query: Tensor, key: Tensor | None, value: Tensor | None, output: Tensor, lse: Tensor | None
    ) -> None:
        """Compute dense attention over the given K/V, as one sequence."""
        if key is not None and self._size_of_latents is not None:
            value = key[..., : self._size_of_latents]
        if key is None or value is None or not query.shape[0]:
            return
        batch = Batch.from_lengths([query.shape[0]], [key.shape[0]])
        params = plan_params_of(self.agreement, self.window, query.device.type)
        if self._codec is not None:
            key, value = self._codec.encode(key, value)
        sources = Sources(key, value, codec=self._codec)
        self._run(make_plan(params, batch, query.device), query, sources, self._results(output, lse))

    def _results(self, output: Tensor, lse: Tensor | None) -> Results:
        heads = output.view(-1, *self._heads, self.head_size_v)
        return Results(heads, None if lse is None else lse.view(-1, *self._heads), self._sinks)

    def _run(self, plan: Plan, query: Tensor, sources: Sources, results: Results) -> None:
        for start, end in plan.empty:
            results.fill_empty(start, end)
        if plan.prefix is None:
            self._run_groups(plan, plan.groups, query, sources, results)
            return
        # A sink enters one of the two passes: it counts once.
        prefix, rest = (results_of_pass(results, plan.prefix.rows, sinks) for sinks in (None, self._sinks))
        self._run_groups(plan, (plan.prefix,), query, sources, prefix)
        self._run_groups(plan, plan.groups, query, sources, rest)
        merge_passes(results, prefix, rest)

    def _run_whole(
        self,
        kernel: TileKernel,
        whole: WholeCall,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        lse: Tensor | None,
    ) -> None:
        """Do what `_run` does for a plan of one kernel call, in a third of the time around it."""
        members, tile = whole.members, whole.tile
        query = _by_head(query, whole.rows, members)
        key, value = _by_head(key, whole.keys, members), _by_head(value, whole.keys, members)
        if not kernel.fused:
            key, value = key.float().contiguous(), value.float().contiguous()
        # The query heads of a KV head become rows, as in `_fold`.
        heads: tuple[int, ...] = (self.num_q_heads,)
        if not tile.causal and self.num_queries_per_kv > 1:
            heads = self._heads
            query = query.view(members, *heads, *query.shape[2:]).transpose(2, 3).flatten(2, 3)
        out, found = kernel.attend(query, key, value, tile.mask, self._score_params, causal=tile.causal)
        target = narrow(output, whole.rows).view(members, -1, *heads, self.head_size_v)
        # The kernels return tokens before heads in memory, as the output is: then this copies one block.
        out = out.transpose(1, 2) if len(heads) == 1 else _unfolded(out, target.shape)
        if lse is None and self._sinks is None:
            found = None
        if found is not None:
            found = found.transpose(1, 2) if len(heads) == 1 else _unfolded(found, target.shape[:-1])
        if self._sinks is None and tile.fully_masked is None:
            target.copy_(out)
        else:
            out, found = self._adjusted(tile, out, found)
            target.copy_(out)
        if lse is not None and found is not None:
            narrow(lse, whole.rows).view(found.shape).copy_(found)

    def _adjusted(self, tile: Tile, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return results ``(members, rows, heads...)`` with the rows that attend to nothing, and the sinks."""
        if tile.fully_masked is not None:
            rows = tile.fully_masked.view(*tile.fully_masked.shape, *(1,) * (out.ndim - 3))
            out, lse = _without(rows, out, lse)
        if self._sinks is not None and lse is not None:
            sinks = self._sinks.view(lse.shape[2:])
            out, lse = out * torch.sigmoid(lse - sinks).unsqueeze(-1), torch.logaddexp(lse, sinks)
        return out, lse

    def _run_groups(
        self, plan: Plan, groups: tuple[Group, ...], query: Tensor, sources: Sources, results: Results
    ) -> None:
        key_memory, value_memory = list[Tensor](), list[Tensor]()
        for group in groups:
            where = group.queries.source
            rows = narrow(query, where) if isinstance(where, slice) else query.index_select(0, where)
            rows = rows.view(group.members, group.rows, *query.shape[1:])
            target = results.of_group(group)
            for first in range(0, group.members, group.per_gather):
                members = slice(first, min(first + group.per_gather, group.members))
                key, value = sources.of(group, members)
                if not plan.kernel.fused:
                    key, value = _as_float32(key, key_memory), _as_float32(value, value_memory)
                for tile in group.tiles:
                    self._run_tile(plan, tile, narrow(rows, members), key, value, target.of_members(members))
            results.write_group(group, target)

    def _run_tile(self, plan: Plan, tile: Tile, query: Tensor, key: Tensor, value: Tensor, results: Results) -> None:
        (first, last), keys = tile.rows, slice(*tile.keys)
        rows = narrow(query, slice(first, last), axis=1)
        folded = rows.transpose(1, 2) if tile.causal else self._fold(rows)
        key, value = narrow(key, keys, axis=2), narrow(value, keys, axis=2)
        out, lse = plan.kernel.attend(folded, key, value, tile.mask, self._score_params, causal=tile.causal)
        out = self._unfold(out, last - first, folded=not tile.causal)
        if lse is not None and results.needs_lse:
            lse = self._unfold(lse.unsqueeze(-1), last - first, folded=not tile.causal).squeeze(-1)
        else:
            lse = None
        if tile.fully_masked is not None:
            out, lse = _without(tile.fully_masked[:, :, None, None], out, lse)
        if self._codec is not None and self._codec.output_factor is not None:
            out = out * self._codec.output_factor
        results.write_tile(first, last, out, lse)

    def _fold(self, rows: Tensor) -> Tensor:
        """Return ``(members, num_kv_heads, rows * ratio, head_size)``: the query heads of a KV head become rows."""
        members, count, _, size = rows.shape
        if count == 1:  # decodes, which are the short calls: one view in place of three
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


@frozen(eq=False)
class Results:
    """
    Output and LSE, their heads grouped by KV head.

    Attributes:
        output: ``(tokens, num_kv_heads, ratio, head_size_v)``; of a group ``(members, rows, num_kv_heads, ...)``.
        lse: The same without the last axis, float32; None where it is not requested.
        sinks: ``(num_kv_heads, ratio)`` float32, applied to results as they are written; None for none. With sink ``s``
            the denominator grows from ``exp(lse)`` to ``exp(lse) + exp(s)``: the output shrinks by
            ``sigmoid(lse - s)``.
    """

    output: Tensor
    lse: Tensor | None
    sinks: Tensor | None

    @property
    def needs_lse(self) -> bool:
        """Whether results are written with their LSE: for the caller, or to apply the sinks."""
        return self.lse is not None or self.sinks is not None

    def fill_empty(self, start: int, end: int) -> None:
        """Write rows that attend to no key: output 0, and the sinks, or -inf, as the LSE."""
        self.output[start:end] = 0
        if self.lse is not None:
            self.lse[start:end] = -torch.inf if self.sinks is None else self.sinks

    def of_group(self, group: Group) -> Results:
        """Return a group's results: views of these where its rows are contiguous, else memory for `write_group`."""
        shape, where = (group.members, group.rows), group.queries.target
        if isinstance(where, slice):
            lse = None if self.lse is None else narrow(self.lse, where).view(*shape, *self.lse.shape[1:])
            return Results(narrow(self.output, where).view(*shape, *self.output.shape[1:]), lse, self.sinks)
        lse = None if self.lse is None else self.lse.new_empty(*shape, *self.lse.shape[1:])
        return Results(self.output.new_empty(*shape, *self.output.shape[1:]), lse, self.sinks)

    def of_members(self, members: slice) -> Results:
        """Return the results of some members of a group, as views."""
        if members.stop - members.start == self.output.shape[0]:
            return self
        return Results(self.output[members], None if self.lse is None else self.lse[members], self.sinks)

    def write_tile(self, start: int, end: int, output: Tensor, lse: Tensor | None) -> None:
        """Write the rows of a tile into a group's results, with the sinks applied."""
        if self.sinks is not None and lse is not None:
            output = output * torch.sigmoid(lse - self.sinks).unsqueeze(-1)
            lse = torch.logaddexp(lse, self.sinks)
        rows = slice(start, end)
        narrow(self.output, rows, axis=1).copy_(output)
        if self.lse is not None and lse is not None:
            narrow(self.lse, rows, axis=1).copy_(lse)

    def write_group(self, group: Group, results: Results) -> None:
        """Write a group's results without their padding; nothing to do where they are views."""
        kept, target = group.queries.kept, group.queries.target
        if isinstance(target, slice):
            return
        for mine, theirs in ((self.output, results.output), (self.lse, results.lse)):
            if mine is not None and theirs is not None:
                rows = theirs.flatten(0, 1)
                mine.index_copy_(0, target, rows if kept is None else rows.index_select(0, kept))


def _by_head(tokens: Tensor, where: slice, members: int) -> Tensor:
    """Return ``(members, heads, rows, size)`` of a slice of ``(tokens, heads, size)``: one view in place of three."""
    (_, heads, size), (row, head, element) = tokens.shape, tokens.stride()
    rows = (where.stop - where.start) // members
    shape, strides = (members, heads, rows, size), (rows * row, head, row, element)
    if not where.start:  # the offset is the tensor's
        return tokens.as_strided(shape, strides)
    return tokens.as_strided(shape, strides, tokens.storage_offset() + where.start * row)


def _unfolded(rows: Tensor, shape: Sequence[int]) -> Tensor:
    """Return ``(members, rows, num_kv_heads, ratio, ...)`` of ``(members, num_kv_heads, rows * ratio, ...)``."""
    members, _, heads, ratio = shape[:4]
    return rows.view(members, heads, -1, ratio, *shape[4:]).transpose(1, 2)


def results_of_pass(results: Results, rows: int, sinks: Tensor | None) -> Results:
    """Return memory for one pass of a cascade, in float32, so that the merged output is rounded once."""
    shape, device = (rows, *results.output.shape[1:]), results.output.device
    output = torch.empty(shape, dtype=torch.float32, device=device)
    return Results(output, torch.empty(shape[:-1], dtype=torch.float32, device=device), sinks)


def merge_passes(results: Results, prefix: Results, rest: Results) -> None:
    """Merge the two passes of a cascade by LSE, and write the result."""
    rows = prefix.output.shape[0]
    states = [part.flatten(1, 2) for pair in (prefix, rest) for part in (pair.output, pair.lse) if part is not None]
    output, lse = merge_attention_states(*states, sink_in_b=rest.sinks is not None)
    results.output[:rows].copy_(output.view(prefix.output.shape))
    if results.lse is not None:
        results.lse[:rows].copy_(lse.view(rows, *results.lse.shape[1:]))


def _may_be_padded(metadata: Metadata) -> bool:
    """Whether a row may have no slot. The CPU slot mapping is read once a step; a graph is ready for any padding."""
    batch = metadata.batch
    slots = batch.slot_mapping_cpu
    if metadata.graph is not None or slots is None:
        return True
    return batch.cached("torch: padded", lambda: bool(slots.numel()) and int(slots.amin()) < 0)


def _without(fully_masked: Tensor, out: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return results in which fully masked rows have output 0 and LSE -inf."""
    lse = None if lse is None else lse.masked_fill(fully_masked, -torch.inf)
    return out.masked_fill(fully_masked.unsqueeze(-1), 0), lse


def _as_float32(rows: Tensor, memory: list[Tensor]) -> Tensor:
    """Return rows in float32, contiguous by head: matmuls would copy them at every tile, and slower."""
    if rows.dtype == torch.float32 and rows.is_contiguous():
        return rows
    # On the CPU, fresh memory costs more than the copy.
    if not memory or memory[0].numel() < rows.numel():
        memory[:] = [torch.empty(rows.numel(), dtype=torch.float32, device=rows.device)]
    return memory[0][: rows.numel()].view(rows.shape).copy_(rows)
