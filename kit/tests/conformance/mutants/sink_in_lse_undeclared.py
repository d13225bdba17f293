"""Includes the sink in the LSE, and declares that it does not."""

from __future__ import annotations

from attnplug.torch_backend.impl import TorchImpl


class MutantImpl(TorchImpl):
    lse_includes_sink = False
