"""The kernels, the backend and a model on a CPU: the tests for a GPU, interpreted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.interpreting import check, runs

pytestmark = pytest.mark.long


@pytest.mark.parametrize(("words", "measured"), runs(Path(__file__).parent))
def test_interpreted(words, measured):
    check(*words, measured=measured)
