"""The conformance kit, on the fake: what the manifest declares is served and right, and the rest is refused."""

from __future__ import annotations

import pytest

from attnplug_kit.conformance import Conformance

pytestmark = pytest.mark.long


@pytest.mark.usefixtures("fakes")
class TestFa2OnFake(Conformance):
    backend = "flashinfer_fake/fa2"
    device = "cpu"


@pytest.mark.usefixtures("fakes")
class TestFa3OnFake(Conformance):
    backend = "flashinfer_fake/fa3"
    device = "cpu"
