"""Right for small numbers alone: of keys, rows, requests, blocks, steps, replays, and for narrow windows."""

from __future__ import annotations

from itertools import pairwise

import torch
from attrs import evolve

from kit.tests.conformance.defects.defect import Defect, with_params


def with_table(batch, change):
    """Return a batch whose used entries of the block table are changed."""
    table = batch.block_table
    if table is None:
        return batch
    table = change(table.long()).to(table.dtype)
    return evolve(batch, block_table=table, block_table_cpu=table)


class CutsWindowsAt64(Defect):
    """Has windows of 64 tokens at most."""

    test = "test_beyond_cuts[*sliding_window=100]"

    def params(self, params, builder, batch, graph):
        left, right = params.window
        return with_params(params, window=(min(left, 63), right))


class RoundsWideWindows(Defect):
    """Rounds windows of more than 64 tokens up to whole blocks, and one more."""

    test = "test_beyond_cuts[*sliding_window=100]"

    def params(self, params, builder, batch, graph):
        (left, right), size = params.window, params.block_size or 16
        return with_params(params, window=((left // size + 2) * size - 1, right)) if left >= 64 else params


class WindowsOfLongGraphs(Defect):
    """Attends to one token more than the window has, in graphs of more than 64 keys."""

    test = "test_replays[*]"

    def params(self, params, builder, batch, graph):
        left, right = params.window
        long = graph is not None and graph.max_seq_len > 64 and left >= 0
        return with_params(params, window=(left + 1, right)) if long else params


class HalvesWideChunks(Defect):
    """Halves chunks of more than 16 tokens."""

    test = "test_beyond_cuts[*attention_chunk=512]"

    def params(self, params, builder, batch, graph):
        chunk = params.chunk
        return with_params(params, chunk=chunk // 2) if chunk is not None and chunk > 16 else params


class RoundsWideChunks(Defect):
    """Rounds chunks of more than 64 tokens to multiples of 128."""

    test = "test_beyond_cuts[*attention_chunk=100]"

    def params(self, params, builder, batch, graph):
        chunk = params.chunk
        return with_params(params, chunk=-(-chunk // 128) * 128 + 128) if chunk and chunk > 64 else params


class RowsBeyond2048(Defect):
    """Returns the 2,048th row of a prefill for each later one."""

    most = 2048
    test = "test_long_prompt[*]"

    def run(self, call):
        call.attend()
        if call.in_graph:
            return
        starts = call.batch.query_start_loc.tolist()
        for start, end in pairwise(starts):
            if end - start > self.most:
                call.heads[start + self.most : end] = call.heads[start + self.most - 1].clone()


class KeysBeyond2048(Defect):
    """Attends to the last 2,048 keys alone."""

    most = 2048
    test = "test_long_sequences[*]"

    def params(self, params, builder, batch, graph):
        left, right = params.window
        return params if left >= 0 or params.chunk or graph else with_params(params, window=(self.most - 1, right))


class RequestsBeyond128(Defect):
    """Returns the output of the 128th request for each later one."""

    most = 128
    test = "test_many_requests[*]"

    def run(self, call):
        call.attend()
        late = torch.arange(len(call.queries)) >= self.most
        rows = call.rows(late)
        if len(rows):
            call.heads[rows] = call.heads[int(call.batch.query_start_loc[self.most]) - 1].clone()


class GraphsBeyond8Requests(RequestsBeyond128):
    """Returns the output of the eighth request for each later one, in graphs."""

    most = 8
    test = "test_replays_of_many_requests[*]"

    def run(self, call):
        super().run(call) if call.in_graph else call.attend()


class TablesOfBytes(Defect):
    """Keeps block numbers in 8 bits."""

    test = "test_large_block_numbers[*300]"

    def batch(self, batch, builder):
        return with_table(batch, lambda table: table & 0xFF)


class TablesOf16Bits(Defect):
    """Keeps block numbers in 16 bits, one of them the sign."""

    test = "test_large_block_numbers[*33000]"

    def batch(self, batch, builder):
        return with_table(batch, lambda table: table & 0x7FFF)


class SlotsOf16Bits(Defect):
    """Multiplies block numbers and block size in 16 bits when it reads, one of them the sign."""

    test = "test_large_block_numbers[*33000]"

    def batch(self, batch, builder):
        size = builder.agreement.block_size or 1
        return with_table(batch, lambda table: (table * size & 0x7FFF) // size)


class WritesSlotsOf16Bits(Defect):
    """Keeps slots in 16 bits when it writes, one of them the sign."""

    test = "test_large_block_numbers[*33000]"

    def write(self, write, impl, key, value, cache, slots):
        write(key, value, cache, torch.where(slots < 0, slots, slots & 0x7FFF))


class OffsetsOf32Bits(Defect):
    """Multiplies block numbers and the stride of blocks in 32 bits."""

    test = "test_long_sequences[*]"

    def run(self, call):
        pages = None if call.kv_cache is None else call.kv_cache.k
        if pages is None or pages.shape[0] * pages.stride(0) <= 2**31:
            call.attend()
            return
        # An address before the cache would end the process: here those blocks are block 1.
        blocks = torch.arange(len(pages)).where(torch.arange(len(pages)) < 2**31 // pages.stride(0), 1)
        call.attend_over(lambda pages: pages[blocks])


class WritesOf256Tokens(Defect):
    """Writes the first 256 new keys of a step alone."""

    test = "test_long_prompt[*]"
    message = "are not in their slots"

    def write(self, write, impl, key, value, cache, slots):
        write(key, value, cache, torch.where(torch.arange(len(slots)) < 256, slots, -1))


class AdvancesOnce(Defect):
    """Plans the second of two advanced steps with the lengths of the first one."""

    test = "test_advance_step[*]"

    def next_step(self, metadata, batch, builder):
        advanced = getattr(builder, "last", None) is metadata.batch
        builder.last = batch
        return evolve(metadata.batch, slot_mapping=batch.slot_mapping) if advanced else batch


class ReplaysOf64Keys(Defect):
    """Attends to the last 64 keys alone in graphs."""

    most = 64
    test = "test_replays[*]"

    def params(self, params, builder, batch, graph):
        left, right = params.window
        return params if left >= 0 or params.chunk or not graph else with_params(params, window=(self.most - 1, right))


class ReplaysOf1024Keys(ReplaysOf64Keys):
    """Attends to the last 1,024 keys alone in graphs."""

    most = 1024
    test = "test_long_replays[*]"


class EagerStepsAfterLongReplays(Defect):
    """Attends to the last key alone in an eager step after a replay of more than 1,000 keys."""

    test = "test_long_replays[*]"

    def batch(self, batch, builder):
        if builder.plans[-1] == "graph":
            builder.is_long = not batch.dummy and int(batch.seq_lens.max()) > 1000
        return batch

    def params(self, params, builder, batch, graph):
        if graph is None and builder.followed("graph", "eager") and getattr(builder, "is_long", False):
            return with_params(params, window=(0, params.window[1]))
        return params


class SkipsReplaysAfterEagerSteps(Defect):
    """Does not prepare the first replay after an eager step."""

    test = "test_replays[*]"

    def prepare(self, prepare, builder):
        if not builder.followed("eager", "graph"):
            prepare()


class ReplaysStayInEagerSteps(Defect):
    """Reads the pages of the last replay in the eager step after it."""

    test = "test_replays[*]"

    def batch(self, batch, builder):
        if batch.block_table is None:
            return batch
        if builder.plans[-1] == "graph":
            builder.replayed = batch.block_table.clone()
        if not builder.followed("graph", "eager"):
            return batch
        rows, columns = (min(pair) for pair in zip(batch.block_table.shape, builder.replayed.shape, strict=True))
        table = batch.block_table.clone()
        table[:rows, :columns] = builder.replayed[:rows, :columns]
        return evolve(batch, block_table=table, block_table_cpu=table)
