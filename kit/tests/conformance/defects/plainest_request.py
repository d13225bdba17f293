"""Right for the plainest request alone: float32, NHD, blocks of 16, one head size, two KV heads, the default scale."""

from __future__ import annotations

import torch
from attrs import evolve

from kit.tests.conformance.defects.defect import Defect, with_params


def as_nhd(pages):
    """Return pages as if tokens came before heads in memory."""
    _, _, heads, width = pages.shape
    return pages.as_strided(pages.shape, (pages.stride(0), heads * width, width, 1))


def wrapped(heads):
    """Return a change of rows or pages: KV head h is h modulo `heads`."""
    return lambda rows: None if rows is None else rows[..., torch.arange(rows.shape[-2]) % heads, :]


class HndAsNhdAtLength(Defect):
    """Reads HND pages as NHD if a request has more than 1,000 keys."""

    test = "test_long_sequences[*]"

    def run(self, call):
        call.attend_over(as_nhd) if call.is_hnd and call.is_long else call.attend()


class HndAsNhdInAdvancedSteps(Defect):
    """Reads HND pages as NHD in advanced steps."""

    test = "test_advance_step[*]"

    def run(self, call):
        call.attend_over(as_nhd) if call.is_hnd and call.is_advanced else call.attend()


class DefaultScaleAtLength(Defect):
    """Uses the default scale if a request has more than 1,000 keys."""

    test = "test_long_sequences[*]"

    def run(self, call):
        call.attend(call.default if call.is_long else 1.0)


class DefaultScaleInGraphs(Defect):
    """Uses the default scale in graphs."""

    test = "test_replays[*]"

    def run(self, call):
        call.attend(call.default if call.in_graph else 1.0)


class DefaultScaleInCascade(Defect):
    """Uses the default scale in cascade attention."""

    test = "test_cascade_equals_flat[*]"

    def run(self, call):
        call.attend(call.default if call.batch.common_prefix_len else 1.0)


class DefaultScaleInAdvancedSteps(Defect):
    """Uses the default scale in advanced steps."""

    test = "test_advance_step[*]"

    def run(self, call):
        call.attend(call.default if call.is_advanced else 1.0)


class DefaultScaleOfLse(Defect):
    """Computes the LSE, but not the output, with the default scale."""

    test = "test_base[*]"
    message = "lse: "

    def run(self, call):
        call.attend()
        if call.lse is not None:
            call.attend(call.default, output=torch.empty_like(call.output))


class OnePageOf32(Defect):
    """Reads the first block of a request for all of its blocks, where blocks have 32 slots."""

    size = 32
    test = "test_any_order[*]"

    def batch(self, batch, builder):
        if builder.agreement.block_size != self.size or batch.block_table is None:
            return batch
        table = batch.block_table[:, :1].expand_as(batch.block_table).contiguous()
        return evolve(batch, block_table=table, block_table_cpu=table)


class OnePageOf64(OnePageOf32):
    """Reads the first block of a request for all of its blocks, where blocks have 64 slots."""

    size = 64
    test = "test_long_sequences[*]"


class OnePageOf128(OnePageOf32):
    """Reads the first block of a request for all of its blocks, where blocks have 128 slots."""

    size = 128
    test = "test_long_sequences[*]"


class OnePageOf256(OnePageOf32):
    """Reads the first block of a request for all of its blocks, where blocks have 256 slots."""

    size = 256
    test = "test_long_sequences[*]"


class WritesHalfOfBlocksOf64(Defect):
    """Writes into the first half of a block alone, where blocks have 64 slots or more."""

    test = "test_features_at_page_ends[*]"

    def write(self, write, impl, key, value, cache, slots):
        size = impl.agreement.block_size
        if size >= 64:
            slots = torch.where(slots < 0, slots, slots // size * size + slots % size % (size // 2))
        write(key, value, cache, slots)


class InterleavesGroupsOf16(Defect):
    """Query head h reads KV head h % num_kv_heads, in groups of 16 or more."""

    test = "test_plain_attention[*]"

    def run(self, call):
        if call.impl.num_queries_per_kv < 16:
            call.attend()
            return
        shape = call.impl.num_queries_per_kv, call.impl.num_kv_heads
        call.attend(query=call.query.unflatten(1, shape).transpose(1, 2).flatten(1, 2))
        call.heads.copy_(call.groups.transpose(1, 2).flatten(1, 2))


class ReversesHeadsOfOneKvHead(Defect):
    """Returns the query heads of a single KV head in reverse order."""

    test = "test_plain_attention[*]"

    def run(self, call):
        call.attend()
        if call.impl.num_kv_heads == 1:
            call.heads.copy_(call.heads.flip(1))


class SixteenKvHeads(Defect):
    """Has 16 KV heads at most: those beyond read the first ones."""

    most = 16
    test = "test_plain_attention[*]"

    def run(self, call):
        if call.impl.num_kv_heads <= self.most or not self.applies(call):
            call.attend()
            return
        wrap = wrapped(self.most)
        rows = {"key": wrap(call.key), "value": wrap(call.value)}
        call.attend(**rows) if call.kv_cache is None else call.attend_over(wrap, **rows)

    def applies(self, call):
        return True


class FourKvHeadsInGraphs(SixteenKvHeads):
    """Has four KV heads at most in graphs: those beyond read the first ones."""

    most = 4
    test = "test_replays[*]"

    def applies(self, call):
        return call.in_graph


class FourKvHeadsAtLength(SixteenKvHeads):
    """Has four KV heads at most if a request has more than 1,000 keys: those beyond read the first ones."""

    most = 4
    test = "test_long_sequences[*]"

    def applies(self, call):
        return call.is_long


class GroupsOf4AtLength(Defect):
    """Loses the last query head of groups of four or more if a request has more than 1,000 keys."""

    test = "test_long_sequences[*]"

    def run(self, call):
        call.attend()
        if call.is_long and call.impl.num_queries_per_kv >= 4:
            call.groups[:, :, -1] = call.groups[:, :, -2]


class GroupsOf8InGraphs(Defect):
    """Loses the last query head of groups of eight or more in graphs."""

    test = "test_replays[*]"

    def run(self, call):
        call.attend()
        if call.in_graph and call.impl.num_queries_per_kv >= 8:
            call.groups[:, :, -1] = call.groups[:, :, -2]


class HeadsOf64AtLength(Defect):
    """Drops the elements of a head beyond 64 if a request has more than 1,000 keys."""

    test = "test_long_sequences[*]"

    def run(self, call):
        query = call.query
        if call.is_long and query.shape[-1] > 64:
            query = torch.cat([query[..., :64], torch.zeros_like(query[..., 64:])], -1)
        call.attend(query=query)


class FirstHeadsScaleInGraphs(Defect):
    """Uses the value scale of the first head for all heads, in graphs."""

    test = "test_replays[*per_head_scales=True*]"

    def run(self, call):
        held = call.impl._codec
        if call.in_graph and call.requested.per_head_scales:
            factor = held.output_factor
            call.impl._codec = evolve(held, output_factor=factor[:1].expand_as(factor))
        call.attend()
        call.impl._codec = held


class MutatesHalfQueries(Defect):
    """Scales queries in place, in bfloat16 and float16."""

    test = "test_calls_without_kv[*]"
    message = "output: "

    def run(self, call):
        if call.is_half and not call.in_graph:
            call.query.mul_(2)
        call.attend(0.5 if call.is_half and not call.in_graph else 1.0)


class RoundsKeysInPlace(Defect):
    """Rounds the given keys in place for an FP8 KV cache."""

    test = "test_forward_mutates_no_input[*]"
    message = "forward changed its input key"

    def run(self, call):
        call.attend()
        codec = call.impl._codec
        if codec is not None and call.key is not None:
            narrow = call.key.to(codec.narrow)
            call.key.copy_(narrow.to(call.key.dtype))


class BuildCutsTablesOfHnd(Defect):
    """Clears the first block of the last request in the host's block table, if pages are HND."""

    test = "test_forward_mutates_no_input[*]"
    message = "block_table"

    def batch(self, batch, builder):
        if builder.agreement.kv_layout == "HND" and batch.block_table is not None and not batch.dummy:
            kept = batch.block_table.clone()
            batch.block_table[-1, 0] = 0
            return evolve(batch, block_table=kept, block_table_cpu=kept)
        return batch


class MovesHalfOfHnd(Defect):
    """Copies the first half of an HND block, if elements have two bytes."""

    test = "test_copied_and_swapped_blocks[*]"
    message = "block"

    def move(self, move, backend, dst):
        held = dst.k.clone()
        move()
        heads = dst.k.shape[2]
        if backend.agreement.kv_layout == "HND" and dst.k.itemsize == 2 and heads > 1:
            dst.k[:, :, heads // 2 :] = held[:, :, heads // 2 :]


class MovesKeysOfIndependentHnd(Defect):
    """Copies the keys of a block without its values, if pages are HND and independent."""

    test = "test_copied_and_swapped_blocks[*]"
    message = "block"

    def move(self, move, backend, dst):
        held = dst.v.clone()
        move()
        if backend.agreement.kv_layout == "HND" and backend.agreement.kv_cache_form == "independent":
            dst.v.copy_(held)


class ForgetsWindowInAdvancedSteps(Defect):
    """Plans advanced steps without the window."""

    test = "test_advance_step[*sliding_window=7]"

    def params(self, params, builder, batch, graph):
        return with_params(params, window=(-1, params.window[1])) if builder.is_advancing else params


class AdvancesInBlocksOf16(Defect):
    """Writes the token of an advanced step where it would be if blocks had 16 slots."""

    test = "test_advance_step[*]"

    def run(self, call):
        size, batch = call.agreement.block_size, call.batch
        if not call.is_advanced or size <= 16:
            call.attend()
            return
        position = batch.seq_lens.long() - 1
        column = (position // 16).clamp(max=batch.block_table.shape[1] - 1)
        blocks = batch.block_table.long().gather(1, column.unsqueeze(1)).squeeze(1)
        slots = (blocks * 16 + position % 16).clamp(max=call.kv_cache.k.shape[0] * size - 1)
        slots = torch.where(batch.slot_mapping[: len(slots)] < 0, -1, slots)
        call.attend(metadata=evolve(call.metadata, batch=evolve(batch, slot_mapping=slots, slot_mapping_cpu=slots)))


class FastBuildForgetsWindow(Defect):
    """Plans without the window in a fast build."""

    test = "test_fast_steps[*sliding_window=7]"

    def params(self, params, builder, batch, graph):
        return with_params(params, window=(-1, params.window[1])) if builder.is_fast else params


class DefaultScaleInLaterSteps(Defect):
    """Uses the default scale in bfloat16 and float16, in all steps after a layer's first one."""

    test = "test_step_after_step[*]"

    def run(self, call):
        steps = getattr(call.impl, "steps", 0)
        call.impl.steps = steps + 1
        call.attend(call.default if steps and call.is_half and not call.in_graph else 1.0)
