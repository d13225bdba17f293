"""The kernels on a CPU, in processes of their own: whether Triton interprets is settled when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
FILES = sorted(file.name for file in (*FOLDER.glob("test_*_on_gpu.py"), *FOLDER.glob("test_*_by_interpreter.py")))


@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("file", FILES)
def test_by_the_interpreter(file):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(FOLDER / file)]

    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
