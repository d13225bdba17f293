"""Right for kind inputs alone: contiguous tensors, unshared blocks, few large scores, values that FP8 holds."""

from __future__ import annotations

from weakref import WeakKeyDictionary

import torch
from attrs import evolve

from kit.tests.conformance.defects.defect import Defect, with_kernel

BUILT = WeakKeyDictionary()
"""The last step of each builder, by state and agreement; the step that was built last comes last."""


def dense_heads(rows):
    """Return rows as if their heads were side by side in memory, whatever is between tokens."""
    if rows is None or rows.numel() == 0:
        return rows
    width = rows.shape[2]
    room = rows.untyped_storage().nbytes() // rows.itemsize - rows.storage_offset()
    if (rows.shape[0] - 1) * rows.stride(0) + rows.shape[1] * width > room:
        return rows.flip(1)  # beyond the memory
    return rows.as_strided(rows.shape, (rows.stride(0), width, 1), rows.storage_offset())


class DenseHeadsOfQueries(Defect):
    """Assumes that the query heads of a token are side by side in memory."""

    test = "test_plain_attention[*]"

    def run(self, call):
        call.attend(query=dense_heads(call.query))


class DenseHeadsOfKeys(Defect):
    """Assumes that the heads of a new key are side by side in memory."""

    test = "test_plain_attention[*]"

    def run(self, call):
        call.attend(key=dense_heads(call.key))


class DenseHeadsOfValues(Defect):
    """Assumes that the heads of a new value are side by side in memory."""

    test = "test_plain_attention[*]"

    def run(self, call):
        call.attend(value=dense_heads(call.value))


class PackedOutput(Defect):
    """Writes output rows one after another, whatever is between them."""

    alone = True
    test = "test_rows_of_wider_tensors[*]"
    message = "output"

    def run(self, call):
        out = torch.empty(call.output.shape, dtype=call.output.dtype)
        call.attend(output=out)
        rows = call.batch.num_actual_tokens
        call.output.as_strided((rows, out.shape[1]), (out.shape[1], 1), call.output.storage_offset()).copy_(out[:rows])


class PackedLse(Defect):
    """Writes rows of the LSE one after another, whatever is between them."""

    test = "test_long_sequences[*return_lse*"
    message = "lse"

    def run(self, call):
        if call.lse is None:
            call.attend()
            return
        out = torch.empty(call.lse.shape)
        call.attend(lse=out)
        rows = call.batch.num_actual_tokens
        call.lse.as_strided((rows, out.shape[1]), (out.shape[1], 1), call.lse.storage_offset()).copy_(out[:rows])


class PackedSlotsOfHnd(Defect):
    """Assumes that the heads of an HND block are side by side in memory, in bfloat16 and float16."""

    test = "test_pairs[*]"

    def run(self, call):
        call.attend_over(_packed_heads) if call.is_hnd and call.is_half else call.attend()


def _packed_heads(pages):
    _, size, _, width = pages.shape
    return pages.as_strided(pages.shape, (pages.stride(0), width, size * width, 1))


class SharesNoBlocks(Defect):
    """Takes each block for that of one request: the others that share it read the null block."""

    alone = True
    test = "test_capability[*]"

    def batch(self, batch, builder):
        table, lens = batch.block_table, batch.seq_lens
        if table is None or batch.common_prefix_len or builder.agreement.requirements.cascade or batch.dummy:
            return batch
        table, seen = table.clone(), set()
        used = -(-lens // builder.agreement.block_size)
        for request, count in enumerate(used.tolist()):
            for column in range(min(count, table.shape[1])):
                if int(table[request, column]) in seen:
                    table[request, column] = 0
            seen |= set(table[request, :count].tolist()) - {0}
        return evolve(batch, block_table=table, block_table_cpu=table)


class ClearsSharedBlocks(Defect):
    """Clears the first key of a block that two requests share, after it has attended to it."""

    test = "test_slots_written_by_the_host[*]"
    message = "which belongs to no token"

    def run(self, call):
        call.attend()
        table = call.batch.block_table
        if table is None or len(table) < 2 or call.in_graph or call.batch.dummy:
            return
        first = table[call.batch.seq_lens > 0, 0]
        blocks, counts = first.unique(return_counts=True)
        for pages in (call.kv_cache.k, call.kv_cache.v):
            pages.view(torch.uint8)[blocks[counts > 1].long(), 0] = 0


class EmptyRequestsLast(Defect):
    """Leaves out requests without queries, and not their lengths and pages."""

    test = "test_requests_without_tokens[*]"
    message = ""

    def batch(self, batch, builder):
        starts, lens = batch.query_start_loc_cpu, batch.seq_lens_cpu
        if starts is None or lens is None or builder.plans[-1] == "graph" or batch.block_table is None:
            return batch
        queries = starts.diff()
        running = queries > 0
        count = int(running.sum())
        if bool(running[:count].all()) or builder.agreement.requirements.attn_type == "encoder_decoder":
            return batch
        queries = torch.cat([queries[running], queries[~running]])
        starts = torch.cat([starts[:1], queries.cumsum(0)]).to(starts.dtype)
        lens = lens.maximum(queries)
        return evolve(batch, query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lens, seq_lens_cpu=lens)


class ClearsRowsOfIdleRequests(Defect):
    """Clears the row before a request that has keys, and no queries in this step."""

    test = "test_requests_without_tokens[*]"

    def run(self, call):
        call.attend()
        idle = (call.queries == 0) & (call.batch.seq_lens > 0)
        rows = call.batch.query_start_loc[:-1][idle].long() - 1
        if not call.in_graph and len(rows):
            call.heads[rows[rows >= 0]] = 0


class OneBuilderPerState(Defect):
    """Keeps the last plan of an agreement in the state, for the layers of all builders."""

    test = "test_builders_in_turns[*]"

    def params(self, params, builder, batch, graph):
        if batch is not None and batch.block_table is not None:
            steps = BUILT.setdefault(builder.state, {}).setdefault(builder.agreement, {})
            steps.pop(builder, None)  # so that the last one is that of the last build
            steps[builder] = batch
        return params

    def run(self, call):
        steps = BUILT.get(call.metadata.state, {}).get(call.agreement, {})
        mine = next((one for one, batch in steps.items() if batch is call.batch), None)
        builder, batch = next(reversed(steps.items()), (None, None))
        if mine is None or builder is mine or call.in_graph or batch.num_reqs != call.batch.num_reqs:
            call.attend()
            return
        plans = dict.fromkeys(
            call.metadata.plans, builder._plan(call.impl.plan_key, builder._params[call.impl.plan_key], batch, None)
        )
        call.attend(metadata=evolve(call.metadata, plans=plans))


def _without_maximum(scores, value):
    weights = scores.exp()
    total = weights.sum(-1, keepdim=True)
    return (weights @ value) / total, total.log().squeeze(-1)


def _without_maximum_in_half(scores, value):
    weights = scores.half().exp().float()
    total = weights.sum(-1, keepdim=True)
    return (weights @ value) / total, total.log().squeeze(-1)


class NoMaximum(Defect):
    """Does not subtract the maximum in the softmax."""

    alone = True
    test = "test_capability[*]"

    def params(self, params, builder, batch, graph):
        return with_kernel(params, _without_maximum)


class NoMaximumInFloat16(Defect):
    """Does not subtract the maximum in the softmax, whose weights are float16, for layers of float16."""

    alone = True
    test = "test_capability[*dtype=float16*"

    def params(self, params, builder, batch, graph):
        half = builder.agreement.requirements.dtype == "float16"
        return with_kernel(params, _without_maximum_in_half) if half else params


class OverflowsE4m3(Defect):
    """Writes NaN into an e4m3 cache for keys and values beyond its largest number."""

    test = "test_written_slots[*fp8_e4m3*"
    message = "are not in their slots"
    dtype, limit, instead = torch.float8_e4m3fn, 448.0, torch.nan

    def write(self, write, impl, key, value, cache, slots):
        write(key, value, cache, slots)
        codec = impl._codec
        if codec is None or codec.narrow != self.dtype:
            return
        for pages, rows in ((cache.k, key), (cache.v, value)):
            wide = rows.float()[: len(slots)]
            if rows.dtype != codec.narrow:
                wide = wide / (codec.key_scale if rows is key else codec.value_scale).view(-1, 1)
            kept = slots >= 0
            row = torch.where(wide.abs() >= self.limit, wide.sign() * self.instead, wide)[kept].to(pages.dtype)
            size = pages.shape[1]
            pages[slots[kept] // size, slots[kept] % size] = row


class OverflowsE5m2(OverflowsE4m3):
    """Writes infinity into an e5m2 cache for keys and values beyond its largest number."""

    test = "test_written_slots[*fp8_e5m2*"
    dtype, limit, instead = torch.float8_e5m2, 57344.0, torch.inf


class SaturatesE5m2Early(OverflowsE4m3):
    """Saturates an e5m2 cache at 448, the largest number of e4m3."""

    test = "test_written_slots[*fp8_e5m2*"
    dtype, limit, instead = torch.float8_e5m2, 448.0, 448.0


class StopsAtPadding(Defect):
    """Writes the keys before the first row without a slot alone."""

    alone = True
    test = "test_rows_without_slots[*]"

    def write(self, write, impl, key, value, cache, slots):
        write(key, value, cache, torch.where((slots < 0).cumsum(0) > 0, -1, slots))
