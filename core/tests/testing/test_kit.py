"""The kit on the embedded backend: green, all of it."""

from __future__ import annotations

from attnplug.testing.kit import Conformance


class TestEmbedded(Conformance):
    backend = "torch/sdpa"
    device = "cpu"
