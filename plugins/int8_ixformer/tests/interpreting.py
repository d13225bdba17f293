"""Runs tests whose kernels Triton's interpreter runs: a process each, since Triton settles that when it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import pytest

FOLDER: Final = Path(__file__).parent


def check(file: str, *options: str, measured: bool = True) -> None:
    """
    Run the tests of a file of this folder, and assert that they pass.

    Args:
        file: The file.
        options: For pytest.
        measured: Whether coverage measures them where it measures this process; tracing takes its time.
    """
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        *options,
        str(FOLDER / file),
    ]

    kept = {name: value for name, value in os.environ.items() if measured or not name.startswith("COVERAGE_")}

    done = subprocess.run(command, env={**kept, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
