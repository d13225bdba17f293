"""The conformance kit on the CPU, for a process whose kernels are interpreted: see test_interpreted.py."""

from __future__ import annotations

import pytest

from attnplug_kit.conformance import Basic, Conformance
from tests.backends.triton_on_cpu import MARKS, speed_up_interpreter

pytestmark = MARKS
speed_up_interpreter()


class TestBasic(Basic):
    backend = "triton/unified"
    device = "cpu"


class TestAll(Conformance):
    backend = "triton/unified"
    device = "cpu"

    def test_threads(self):
        """The interpreter patches Triton's modules during a launch."""
        pytest.skip("Triton's interpreter is not thread-safe")
