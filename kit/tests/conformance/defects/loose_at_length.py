"""Wrong by less than half precision rounds the largest value, and by much of what a long row's output is."""

from __future__ import annotations

import torch

from kit.tests.conformance.defects.defect import Defect, with_kernel


def softmax(scores):
    highest = scores.amax(-1, keepdim=True)
    weights = (scores - highest).exp()
    return weights, weights.sum(-1, keepdim=True), highest


def result(weights, total, highest, value):
    return (weights @ value) / total, (total.log() + highest).squeeze(-1)


class KernelOfHalf(Defect):
    """A defect of a kernel for bfloat16 and float16, over more than 500 keys."""

    alone = True

    def changed(self, weights):
        """Return the softmax weights, before their sum divides them."""
        return weights

    def params(self, params, builder, batch, graph):
        if builder.agreement.requirements.dtype == "float32":
            return params
        return with_kernel(params, self.weigh)

    def weigh(self, scores, value):
        weights, total, highest = softmax(scores)
        if scores.shape[-1] > 500:
            weights = self.changed(weights)
        return result(weights, total, highest, value)


class ZeroAtLength(Defect):
    """Returns zero for requests with more than 1,000 keys, in bfloat16."""

    test = "test_long_sequences[*]"

    def run(self, call):
        call.attend()
        if call.query.dtype == torch.bfloat16 and not call.in_graph and not call.requested.attn_type.startswith("enc"):
            call.heads[call.rows(call.batch.seq_lens[: len(call.queries)] > 1000)] = 0


class DropsSmallWeights(KernelOfHalf):
    """Drops softmax weights below 1/128 of the largest, and keeps their sum, in half precision beyond 500 keys."""

    test = "test_long_sequences[*]"

    def changed(self, weights):
        return weights.where(weights >= 2**-7, 0)


class LosesKeysOfSplits(KernelOfHalf):
    """Loses the first key of each 256, in half precision beyond 500 keys."""

    test = "test_long_sequences[*]"

    def changed(self, weights):
        return weights.where(torch.arange(weights.shape[-1]) % 256 > 0, 0)


class WeightsOfFp8(KernelOfHalf):
    """Rounds softmax weights to three bits, in half precision beyond 500 keys."""

    test = "test_long_sequences[*]"

    def changed(self, weights):
        return weights.to(torch.float8_e4m3fn).float()


class SplitsWeighAlike(KernelOfHalf):
    """Merges two splits of the keys as if their weights had equal sums, in half precision beyond 500 keys."""

    test = "test_long_sequences[*]"

    def changed(self, weights):
        half = weights.shape[-1] // 2
        total = weights.sum(-1, keepdim=True)
        parts = weights[..., :half], weights[..., half:]
        return torch.cat([part * (total / (2 * part.sum(-1, keepdim=True).clamp(min=1e-30))) for part in parts], -1)


class HalfEpsTooLarge(Defect):
    """Returns outputs that are half an eps too large, in half precision."""

    test = "test_capability[*]"

    def run(self, call):
        call.attend()
        if call.is_half and not call.in_graph:
            heads = call.heads
            bias = 1 + torch.finfo(heads.dtype).eps / 2
            kept = heads.isfinite()
            heads.copy_(torch.where(kept, heads.float() * bias * (1 + 2**-12), heads.float()).to(heads.dtype))


class ShiftedMean(Defect):
    """Adds a quarter of an eps to each output, in half precision."""

    test = "test_capability[*]"

    def run(self, call):
        call.attend()
        if call.is_half and not call.in_graph:
            call.heads.add_(torch.finfo(call.heads.dtype).eps / 4)


class LseWithoutOneSplit(Defect):
    """Returns an LSE without a tenth of the weights, in half precision beyond 1,000 keys."""

    test = "test_long_sequences[*]"
    message = "lse: "

    def run(self, call):
        call.attend()
        if call.lse is not None and call.is_half and call.is_long:
            call.lse[: call.batch.num_actual_tokens] -= 0.1


class LseOfBfloat16(Defect):
    """Rounds the LSE to bfloat16 for layers of bfloat16."""

    test = "test_precision[*bfloat16*"
    message = "the LSE is rounded"

    def run(self, call):
        call.attend()
        if call.lse is not None and call.query.dtype == torch.bfloat16:
            rows = call.lse[: call.batch.num_actual_tokens]
            rows.copy_(rows.bfloat16())
