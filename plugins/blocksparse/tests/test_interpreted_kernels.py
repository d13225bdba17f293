"""The kernels, the backend and a model on a CPU: the tests for a GPU, interpreted."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.interpreting import check

pytestmark = pytest.mark.long

FILES = sorted(Path(__file__).parent.glob("test_*_on_gpu.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_interpreted(file):
    check(file)
