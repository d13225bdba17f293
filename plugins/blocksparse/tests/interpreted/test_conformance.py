"""The conformance kit: what the manifest declares is served and right, and the rest is refused."""

from __future__ import annotations

import pytest

from attnplug.testing.kit import Conformance

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in")  # what numpy says of infinities that cancel


class TestByInterpreter(Conformance):
    backend = "blocksparse/triton"
    device = "cpu"

    def test_threads(self):
        """The interpreter changes Triton's modules while it runs a kernel."""
        pytest.skip("Triton's interpreter runs in one thread")
