"""The kit on the built-in backend: green, all of it."""

from __future__ import annotations

from attnplug_kit.conformance import Conformance


class TestEmbedded(Conformance):
    backend = "torch/sdpa"
    device = "cpu"
