"""Reads metadata in a profiling run."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    def run_profile(self, query, key, value, output, lse):
        self.run(query, key, value, None, None, output, lse)
