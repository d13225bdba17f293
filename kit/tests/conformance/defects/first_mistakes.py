"""First mistakes of a vendor, in every request: window, scale, heads, LSE, sinks, chunks, the ends of pages."""

from __future__ import annotations

import torch
from attrs import evolve

from kit.tests.conformance.defects.defect import Defect, with_kernel, with_params
from kit.tests.conformance.defects.loose_at_length import result, softmax


class WindowOneTooFew(Defect):
    """Attends to one token fewer than the window has."""

    alone = True
    test = "test_features_at_page_ends[*sliding_window*"

    def params(self, params, builder, batch, graph):
        left, right = params.window
        return with_params(params, window=(left - 1, right)) if left > 0 else params


class WindowOfDecodesAlone(Defect):
    """Applies the window to decodes alone."""

    alone = True
    test = "test_features_at_page_ends[*sliding_window*"

    def params(self, params, builder, batch, graph):
        prefills = batch is not None and batch.max_query_len > 1
        return with_params(params, window=(-1, params.window[1])) if prefills else params


class NoScale(Defect):
    """Does not scale the scores."""

    alone = True
    test = "test_plain_attention[*]"

    def run(self, call):
        call.attend(1 / call.impl.scale)


class ScaleTwice(Defect):
    """Scales queries, and then scores."""

    alone = True
    test = "test_plain_attention[*]"

    def run(self, call):
        call.attend(call.impl.scale)


class InterleavedDecodes(Defect):
    """Query head h reads KV head h % num_kv_heads in batches of decodes."""

    alone = True
    test = "test_one_token[*]"

    def run(self, call):
        shape = call.impl.num_queries_per_kv, call.impl.num_kv_heads
        if call.batch.max_query_len > 1:
            call.attend()
            return
        call.attend(query=call.query.unflatten(1, shape).transpose(1, 2).flatten(1, 2))
        call.heads.copy_(call.groups.transpose(1, 2).flatten(1, 2))


class LseWithoutMaximum(Defect):
    """Returns the logarithm of the sum without the maximum that was subtracted."""

    alone = True
    test = "test_features_at_page_ends[*return_lse*"
    message = "lse"

    def params(self, params, builder, batch, graph):
        def weigh(scores, value):
            weights, total, highest = softmax(scores)
            return result(weights, total, highest * 0, value)

        is_plain = not builder.agreement.requirements.sinks and params.cascade is None
        return with_kernel(params, weigh) if is_plain else params


class LseOfDecodesToBase2(Defect):
    """Returns the LSE to base 2 in batches of decodes."""

    alone = True
    test = "test_merge[*]"
    message = "do not merge to the whole"

    def run(self, call):
        call.attend()
        if call.lse is not None and call.batch.max_query_len == 1:
            call.lse[: call.batch.num_actual_tokens] *= 1.4426950408889634


class SinksTimesScale(Defect):
    """Scales the sinks as if they were products."""

    alone = True
    test = "test_features_at_page_ends[*sinks*"

    def settle(self, settle, impl):
        settle()
        impl._sinks = None if impl._sinks is None else impl._sinks * impl.scale


class SinksOfKvHeads(Defect):
    """Uses the sink of the first query head of each group."""

    alone = True
    test = "test_capability[*sinks*"

    def settle(self, settle, impl):
        settle()
        impl._sinks = None if impl._sinks is None else impl._sinks[:, :1].expand_as(impl._sinks).contiguous()


class SlidingChunks(Defect):
    """Attends to the last tokens, as many as a chunk has, whatever chunk they are in."""

    alone = True
    test = "test_features_at_page_ends[*attention_chunk*"

    def params(self, params, builder, batch, graph):
        chunk = params.chunk
        return params if chunk is None else with_params(params, chunk=None, window=(chunk - 1, 0))


class ChunksFromOne(Defect):
    """Has chunks that are one token too long."""

    alone = True
    test = "test_features_at_page_ends[*attention_chunk*"

    def params(self, params, builder, batch, graph):
        return params if params.chunk is None else with_params(params, chunk=params.chunk + 1)


class SkipsPagesOfOneKey(Defect):
    """Skips the last page of a request where it holds a single key."""

    alone = True
    test = "test_features_at_page_ends[*]"

    def params(self, params, builder, batch, graph):
        size = params.block_size
        if batch is None or size is None or size == 1 or params.chunk is not None or batch.seq_lens_cpu is None:
            return params

        def weigh(scores, value):
            keys = scores.shape[-1]
            if keys % size == 1 and keys > 1:
                scores = scores.clone()
                scores[..., -1] = torch.where(scores[..., :-1].amax(-1).isfinite(), -torch.inf, scores[..., -1])
            return result(*softmax(scores), value)

        return with_kernel(params, weigh)


class ReadsWholePages(Defect):
    """Attends to all slots of a request's last page."""

    alone = True
    test = "test_decodes_alone[*]"

    def batch(self, batch, builder):
        lens, size = batch.seq_lens_cpu, builder.agreement.block_size
        if batch.block_table is None or lens is None or batch.max_query_len > 1 or batch.common_prefix_len:
            return batch
        whole = -(-lens // size) * size
        return evolve(batch, seq_lens=whole, seq_lens_cpu=whole, max_seq_len=int(whole.max()))


class StrictlyCausal(Defect):
    """Does not attend to a token's own key, unless there is no other."""

    alone = True
    test = "test_mixed_batch[*]"

    def params(self, params, builder, batch, graph):
        def weigh(scores, value):
            last = scores.isfinite().long().cumsum(-1)
            own = (last == last[..., -1:]) & (last > 1) & scores.isfinite()
            return result(*softmax(scores.masked_fill(own, -torch.inf)), value)

        return with_kernel(params, weigh) if params.causal else params


class CausalFromTheFirstKey(Defect):
    """Aligns the causal mask of a prefill with the first key, not the last."""

    alone = True
    test = "test_mixed_batch[*]"

    def params(self, params, builder, batch, graph):
        def weigh(scores, value):
            folded, keys = scores.shape[2:]
            rows = folded // params.ratio
            if rows > 1 and rows < keys:
                row = torch.arange(folded).unsqueeze(1) // params.ratio
                scores = scores.masked_fill(torch.arange(keys) > row, -torch.inf)
            return result(*softmax(scores), value)

        return with_kernel(params, weigh) if params.causal and params.window[0] < 0 and not params.chunk else params


class CapBeforeScale(Defect):
    """Caps scores before it scales them."""

    alone = True
    test = "test_features_at_page_ends[*logits_soft_cap*"

    def run(self, call):
        held = call.impl._score_params
        if held.soft_cap is not None:
            call.impl._score_params = evolve(held, soft_cap=held.soft_cap * held.scale)
        call.attend()
        call.impl._score_params = held


class AlibiGrows(Defect):
    """Adds the ALiBi bias in place of subtracting it."""

    alone = True
    test = "test_features_at_page_ends[*alibi*"

    def settle(self, settle, impl):
        settle()
        params = impl._score_params
        if params.slopes is not None:
            impl._score_params = evolve(params, slopes=-params.slopes)
