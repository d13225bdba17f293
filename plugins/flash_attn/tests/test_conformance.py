"""The conformance kit, on the doubles: what the manifest declares is served and right, and the rest is refused."""

from __future__ import annotations

import pytest

from attnplug_kit.conformance import Conformance

pytestmark = pytest.mark.long


@pytest.mark.usefixtures("fakes")
class TestFa2OnDouble(Conformance):
    backend = "flash_attn_double/fa2"
    device = "cpu"


@pytest.mark.usefixtures("fakes")
class TestFa2OfVllmOnDouble(Conformance):
    backend = "flash_attn_double/fa2_vllm"
    device = "cpu"


@pytest.mark.usefixtures("fakes")
class TestFa3OnDouble(Conformance):
    backend = "flash_attn_double/fa3"
    device = "cpu"


@pytest.mark.usefixtures("fakes")
class TestFa3OfVllmOnDouble(Conformance):
    backend = "flash_attn_double/fa3_vllm"
    device = "cpu"


@pytest.mark.usefixtures("fakes")
class TestFa4OnDouble(Conformance):
    backend = "flash_attn_double/fa4"
    device = "cpu"


@pytest.mark.usefixtures("fakes")
class TestTorchOnDouble(Conformance):
    backend = "flash_attn_double/torch"
    device = "cpu"
