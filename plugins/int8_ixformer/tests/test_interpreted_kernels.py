"""The kernels, the backend and a model on a CPU: the tests for a GPU, interpreted."""

from __future__ import annotations

import pytest

from plugins.int8_ixformer.tests.interpreting import FOLDER, check


@pytest.mark.parametrize("file", sorted(file.name for file in FOLDER.glob("test_*_on_gpu.py")))
def test_interpreted(file):
    check(file)
