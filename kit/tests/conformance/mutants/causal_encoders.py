"""Applies causality to encoders."""

from __future__ import annotations

from attrs import evolve

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def _plan(self, key, shape, batch, graph):
        if self.agreement.requirements.attn_type in ("encoder", "encoder_only"):
            shape = evolve(shape, causal=True)
        return super()._plan(key, shape, batch, graph)
