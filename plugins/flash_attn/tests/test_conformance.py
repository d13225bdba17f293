"""The conformance kit, on the fakes: what the manifest declares is served and right, and the rest is refused."""

from __future__ import annotations

import pytest

from attnplug_kit.conformance import Conformance

pytestmark = pytest.mark.long


@pytest.mark.usefixtures("fakes")
class TestFa2OnFake(Conformance):
    backend = "flash_attn_fake/fa2"
    device = "cpu"


@pytest.mark.usefixtures("fakes")
class TestFa2OfVllmOnFake(Conformance):
    backend = "flash_attn_fake/fa2_vllm"
    device = "cpu"


@pytest.mark.usefixtures("fakes")
class TestFa3OnFake(Conformance):
    backend = "flash_attn_fake/fa3"
    device = "cpu"


@pytest.mark.usefixtures("fakes")
class TestFa3OfVllmOnFake(Conformance):
    backend = "flash_attn_fake/fa3_vllm"
    device = "cpu"


@pytest.mark.usefixtures("fakes")
class TestFa4OnFake(Conformance):
    backend = "flash_attn_fake/fa4"
    device = "cpu"


@pytest.mark.usefixtures("fakes")
class TestTorchOnFake(Conformance):
    backend = "flash_attn_fake/torch"
    device = "cpu"
