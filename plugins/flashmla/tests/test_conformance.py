"""The conformance kit on the fake: declared values are supported and correct, all others are refused."""

from __future__ import annotations

import pytest

from attnplug_kit.conformance import Basic, Batches, Conformance, Models

# Not `Models`: a fake has no kernel that could be wrong after thousands of tokens, and takes minutes for them.
OTHER_TIERS = tuple(tier for tier in Conformance.__bases__ if tier not in (Basic, Batches, Models))


@pytest.mark.usefixtures("fakes")
class TestBasicTier(Basic, Batches):
    backend = "flashmla_fake"
    device = "cpu"


@pytest.mark.slow
@pytest.mark.usefixtures("fakes")
class TestRoutedPair(Basic, Batches, *OTHER_TIERS):
    """Pure decodes on FlashMLA, all other batches on torch's kernels, over one KV cache."""

    backend = "flashmla_fake+torch/sdpa"
    device = "cpu"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("fakes")
class TestOtherTiers(*OTHER_TIERS):
    backend = "flashmla_fake"
    device = "cpu"
