"""The conformance kit on a CPU, interpreted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.triton_on_cpu import run_interpreted_kit

pytestmark = pytest.mark.long


def test_what_is_declared_is_served_and_the_rest_is_refused(tmp_path):
    run_interpreted_kit(Path(__file__).with_name("interpreted_conformance.py"), tmp_path)
