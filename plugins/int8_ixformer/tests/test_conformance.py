"""The conformance kit on ixformer's double: its calls serve what the manifest declares, and the rest is refused."""

from __future__ import annotations

import pytest

from attnplug_kit.conformance import Conformance
from plugins.int8_ixformer.tests.doubled import NAME


@pytest.mark.usefixtures("fakes")
class TestOnADouble(Conformance):
    backend = f"{NAME}/ixformer"
    device = "cpu"
