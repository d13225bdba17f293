"""The kit on the built-in backend: it passes."""

from __future__ import annotations

from attnplug_kit.conformance import Conformance


class TestBuiltIn(Conformance):
    backend = "torch/sdpa"
    device = "cpu"
