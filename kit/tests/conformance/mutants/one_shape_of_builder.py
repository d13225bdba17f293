"""Keeps the plan of the first captured shape for all of a builder."""

from __future__ import annotations

from attnplug.torch_backend.builder import TorchBuilder


class MutantBuilder(TorchBuilder):
    def _captured(self, key, graph):
        kept = self.__dict__.setdefault("kept", {})
        return kept.setdefault(key, super()._captured(key, graph))
