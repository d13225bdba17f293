"""The conformance kit, on the double: what the manifest declares is served and right, and the rest is refused."""

from __future__ import annotations

import pytest

from attnplug_kit.conformance import Conformance

pytestmark = pytest.mark.long


@pytest.mark.usefixtures("fakes")
class TestFa2OnDouble(Conformance):
    backend = "flashinfer_double/fa2"
    device = "cpu"


@pytest.mark.usefixtures("fakes")
class TestFa3OnDouble(Conformance):
    backend = "flashinfer_double/fa3"
    device = "cpu"
