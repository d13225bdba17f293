"""Wrong where one thing of the contract for hosts meets another: forms, orders, written keys, bounds, late values."""

from __future__ import annotations

import torch
from attrs import evolve

from kit.tests.conformance.defects.defect import Defect
from kit.tests.conformance.defects.plainest_request import as_nhd


class InterleavedHndInGraphs(Defect):
    """Reads HND pages as NHD in graphs, if the form is interleaved."""

    test = "test_replays[*]"

    def run(self, call):
        wrong = call.in_graph and call.is_hnd and call.agreement.kv_cache_form == "interleaved"
        call.attend_over(as_nhd) if wrong else call.attend()


class PackedHndAtLength(Defect):
    """Reads HND pages as NHD if the form is packed and a request has more than 1,000 keys."""

    test = "test_long_sequences[*]"

    def run(self, call):
        wrong = call.is_long and call.is_hnd and call.agreement.kv_cache_form == "packed"
        call.attend_over(as_nhd) if wrong else call.attend()


class DecodesBehindLongPrefills(Defect):
    """Clears the row of a decode behind a prefill, if a request has more than 1,000 keys."""

    test = "test_beyond_cuts[*sliding_window=1024]"

    def run(self, call):
        call.attend()
        queries = call.queries
        behind = ((queries > 1).cumsum(0) > 0) & (queries == 1)
        if call.is_long and not call.in_graph:
            call.heads[call.rows(behind)] = 0


class HndWithoutKv(Defect):
    """Reads HND pages as NHD in calls without K/V."""

    test = "test_plain_attention[*]"

    def run(self, call):
        wrong = call.is_hnd and call.key is None and call.requested.kv_in_cache
        call.attend_over(as_nhd) if wrong else call.attend()


class HndWithoutKvInGraphs(Defect):
    """Reads HND pages as NHD in graphs of calls without K/V."""

    test = "test_replays[*]"

    def run(self, call):
        wrong = call.is_hnd and call.key is None and call.in_graph
        call.attend_over(as_nhd) if wrong else call.attend()


class WithoutKvInAdvancedSteps(Defect):
    """Attends to one key less in advanced steps without K/V."""

    test = "test_advance_step[*]"

    def run(self, call):
        call.attend()
        if call.is_advanced and call.key is None:
            call.heads.mul_(0.5)


class ScalesWithoutKv(Defect):
    """Does not apply the value scale in calls without K/V."""

    test = "test_layers_of_one_builder[*]"

    def run(self, call):
        held = call.impl._codec
        if held is not None and call.key is None and call.requested.kv_in_cache:
            call.impl._codec = evolve(held, output_factor=None)
        call.attend()
        call.impl._codec = held


class LateSinksWithoutLse(Defect):
    """Counts the sinks of the constructor in the LSE, whatever sinks come with the call."""

    test = "test_sinks_with_call[*return_lse=True]"
    message = "lse"

    def settle(self, settle, impl):
        settle()
        impl.first = getattr(impl, "first", None) or (impl._sinks,)

    def run(self, call):
        call.attend()
        first, now = call.impl.first[0], call.impl._sinks
        if call.lse is not None and call.impl.layer.sinks_with_call and first is not None and now is not None:
            rows = call.lse[: call.batch.num_actual_tokens]
            rows.add_((first - now).flatten())


class ScalesChangedInPlace(Defect):
    """Keeps what follows from scales whose tensors are the same, with other numbers."""

    test = "test_late_scales[*]"

    def settle(self, settle, impl):
        now = (impl.layer.k_scale_tensor, impl.layer.v_scale_tensor)
        before = getattr(impl, "scales", None)
        if before is None or now[0] is None or any(one is not other for one, other in zip(before, now, strict=True)):
            settle()
        impl.scales = now


class ScalesOfTheCapture(Defect):
    """Says that graphs read scale tensors, and computes in graphs with the scales of the capture."""

    alone = True
    test = "test_scales_in_a_graph[*]"

    def settle(self, settle, impl):
        impl.graphs_read_scales = True
        settle()

    def run(self, call):
        held = call.impl._score_params
        if call.in_graph:
            call.impl._score_params = call.impl.captured = getattr(call.impl, "captured", held)
        call.attend()
        call.impl._score_params = held


class LateScalesOfHeads(Defect):
    """Uses the mean of the value scales of heads that come after make_impl."""

    test = "test_late_scales[*]"

    def settle(self, settle, impl):
        is_late = "_codec" in vars(impl)
        settle()
        if is_late and impl._codec is not None and impl._codec.output_factor is not None:
            factor = impl._codec.output_factor
            impl._codec = evolve(impl._codec, output_factor=factor.mean().expand_as(factor))


class BoundsOfDecodes(Defect):
    """Takes bounds of lengths for exact ones, if all requests decode."""

    least = True
    test = "test_advance_step[*seq_lens_cpu_kind=upper_bound]"
    message = ""

    def run(self, call):
        lengths, metadata = call.batch.seq_lens_cpu, call.metadata
        if lengths is not None and bool((call.queries == 1).all()):
            metadata = evolve(metadata, batch=evolve(call.batch, seq_lens=lengths))
        call.attend(metadata=metadata)


class ChunksBeforeDecodes(Defect):
    """Clears the first row of a chunk of a prompt, if a decode is behind it."""

    test = "test_chunked_equals_one_shot[*]"

    def run(self, call):
        call.attend()
        queries = call.queries
        contexts = call.batch.seq_lens - queries
        behind = (queries == 1).flip(0).cumsum(0).flip(0) > 0
        for row, wrong in zip(call.batch.query_start_loc.tolist(), (behind & (queries > 4) & (contexts > 8)).tolist()):  # noqa: B905 - the last is the end
            if wrong and not call.in_graph:
                call.heads[row] = 0


class AdvancedReplaysStay(Defect):
    """Does not prepare a replay of metadata that were advanced."""

    test = "test_advanced_replays[*]"

    def prepare(self, prepare, builder):
        if not builder.is_fast:
            prepare()


class LseOfAdvancedSteps(Defect):
    """Returns the LSE of the step before in advanced steps."""

    test = "test_advance_step[*return_lse=True]"
    message = "lse"

    def run(self, call):
        call.attend()
        if call.lse is not None:
            rows = call.lse[: call.batch.num_actual_tokens]
            before = getattr(call.impl, "before", rows)
            call.impl.before = rows.clone()
            if call.is_advanced:
                rows.copy_(before)


class HostWritesHnd(Defect):
    """Reads HND pages as NHD if the host has written them."""

    test = "test_slots_written_by_the_host[*]"

    def run(self, call):
        call.attend_over(as_nhd) if call.is_hnd and call.impl.host_writes else call.attend()


class SinkInLseOfEagerSteps(Defect):
    """Leaves the sink out of the LSE in graphs."""

    test = "test_replays[*sinks and LSE*]"
    message = "lse"

    def run(self, call):
        held = call.impl._sinks
        if call.in_graph and call.lse is not None and held is not None:
            call.attend(lse=None)
            call.impl._sinks = None
            call.attend(output=torch.empty_like(call.output))
            call.impl._sinks = held
        else:
            call.attend()


class LseOfRowsWithoutKeys(Defect):
    """Returns an LSE of zero for rows that attend to no key."""

    test = "test_pairs[*]"
    message = "lse"

    def run(self, call):
        call.attend()
        if call.lse is not None:
            rows = call.lse[: call.batch.num_actual_tokens]
            rows.copy_(rows.masked_fill(rows == -torch.inf, 0))


class BoundsInBfloat16(Defect):
    """Assumes in bfloat16 that CPU sequence lengths are exact."""

    least = True
    test = "test_plain_attention[*]"
    message = ""

    def run(self, call):
        lengths, metadata = call.batch.seq_lens_cpu, call.metadata
        if lengths is not None and call.is_half:
            metadata = evolve(metadata, batch=evolve(call.batch, seq_lens=lengths))
        call.attend(metadata=metadata)


class AbsentLengthsOfWideBlocks(Defect):
    """Uses the longest length for each request without CPU lengths, if blocks have more than 16 slots."""

    least = True
    test = "test_plain_attention[*]"
    message = ""

    def run(self, call):
        metadata = call.metadata
        if call.batch.seq_lens_cpu is None and (call.agreement.block_size or 0) > 16:
            lengths = torch.full_like(call.batch.seq_lens, call.batch.max_seq_len)
            metadata = evolve(metadata, batch=evolve(call.batch, seq_lens=lengths))
        call.attend(metadata=metadata)
