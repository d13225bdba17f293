"""The conformance kit: what the manifest declares is served and right, and the rest is refused."""

from __future__ import annotations

import pytest

from attnplug_kit.conformance import Conformance
from tests.backends.triton_on_cpu import MARKS, skip_overflow_checks

pytestmark = MARKS
skip_overflow_checks()


class TestByInterpreter(Conformance):
    backend = "blocksparse/triton"
    device = "cpu"

    def test_threads(self):
        """The interpreter changes Triton's modules while it runs a kernel."""
        pytest.skip("Triton's interpreter runs in one thread")
