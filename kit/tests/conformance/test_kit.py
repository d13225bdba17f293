"""The kit on the built-in backend: it passes."""

from __future__ import annotations

import pytest

from attnplug_kit.conformance import Basic, Conformance

OTHER_TIERS = tuple(tier for tier in Conformance.__bases__ if tier is not Basic)


class TestBasicTier(Basic):
    backend = "torch/sdpa"
    device = "cpu"


@pytest.mark.slow
class TestOtherTiers(*OTHER_TIERS):
    backend = "torch/sdpa"
    device = "cpu"
