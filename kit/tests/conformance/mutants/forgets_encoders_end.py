"""Attends to all encoder tokens but the last."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def _plan(self, key, shape, batch, graph):
        if batch.encoder_seq_lens is not None:
            names = ("encoder_seq_lens", "encoder_seq_lens_cpu")
            batch = evolve(batch, **{name: (getattr(batch, name) - 16).clamp(min=1) for name in names})
        return super()._plan(key, shape, batch, graph)
