"""The kernels, the backend and a model on a CPU: the tests for a GPU, interpreted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.triton_on_cpu import interpreted_runs, run_interpreted

pytestmark = pytest.mark.long


@pytest.mark.parametrize(("words", "measured"), interpreted_runs(Path(__file__).parent))
def test_interpreted(words, measured):
    run_interpreted(*words, measured=measured)
