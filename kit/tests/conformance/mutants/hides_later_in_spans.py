"""Lets tokens attend to the earlier tokens of their span only."""

from __future__ import annotations

import torch
from attrs import evolve

from attnplug.torch_backend.builder import TorchBuilder


def causal(batch):
    ranges = batch.mm_prefix_range
    if ranges is None:
        return batch
    lens = batch.query_start_loc.diff()
    starts = torch.repeat_interleave(batch.seq_lens - batch.query_start_loc[1:], lens, output_size=int(lens.sum()))
    ends = (starts + torch.arange(len(starts))).int()
    cut = ranges[: len(ends)].clone()
    cut[:, 1] = torch.minimum(cut[:, 1], ends)
    return evolve(batch, mm_prefix_range=cut, mm_prefix_range_cpu=cut)


class MutantBuilder(TorchBuilder):
    def _plan(self, key, shape, batch, graph):
        return super()._plan(key, shape, causal(batch), graph)
