"""The conformance kit on the fakes: every declared value is served and right, and everything else is refused."""

from __future__ import annotations

import pytest

from attnplug_kit.conformance import Basic, Batches, Conformance, Graphs, Models

# Not `Models`: a fake has no kernel that could be wrong after thousands of tokens, and takes minutes for them.
OTHER_TIERS = tuple(tier for tier in Conformance.__bases__ if tier not in (Basic, Batches, Models, Graphs))


@pytest.mark.usefixtures("fakes")
class TestBasicTier(Basic, Batches):
    backend = "flash_attn_fake"
    device = "cpu"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.usefixtures("fakes")
class TestGraphs(Graphs):
    backend = "flash_attn_fake"
    device = "cpu"


# The two variants that differ most stand for all in CI: of these, one writes the cache through vLLM's op.
@pytest.mark.slow
@pytest.mark.usefixtures("fakes")
class TestOtherTiersOfFa3Vllm(*OTHER_TIERS):
    backend = "flash_attn_fake/fa3_vllm"
    device = "cpu"


@pytest.mark.slow
@pytest.mark.usefixtures("fakes")
class TestOtherTiersOfFa4(*OTHER_TIERS):
    backend = "flash_attn_fake/fa4"
    device = "cpu"


@pytest.mark.exhaustive
@pytest.mark.usefixtures("fakes")
class TestOtherTiers(*OTHER_TIERS):
    backend = "flash_attn_fake"
    device = "cpu"
