"""Triton's interpreter runs kernels on a CPU: in a process each, since Triton settles that when it is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from pathlib import Path

INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"
"""Whether the kernels of this process are interpreted."""

DEVICE: Final = "cpu" if INTERPRETED else "cuda"
"""Where they run."""

MARKS: Final = (
    # What numpy says of infinities that cancel, and of rows of nothing but NaN.
    [pytest.mark.filterwarnings("ignore:.*encountered in", "ignore:All-NaN slice encountered")]
    if INTERPRETED
    else [pytest.mark.gpu]
)
"""Of a module whose tests run kernels."""


def check(file: Path, *options: str, measured: bool = True) -> None:
    """
    Run the tests of a file in a process whose kernels are interpreted, and assert that they pass.

    Args:
        file: The file.
        options: For pytest.
        measured: Whether coverage measures them where it measures this process: that doubles their time.
    """
    if find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", *options, str(file)]
    kept = {name: value for name, value in os.environ.items() if measured or not name.startswith("COVERAGE_")}

    done = subprocess.run(command, env={**kept, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


def runs(folder: Path) -> list[Any]:
    """
    Return arguments of `check`, as parameters of a test, that together run all tests for a GPU of a folder.

    Random examples of the kernels and the tests of the backend are measured: together they run nearly every line.
    """
    found = []
    for file in sorted(folder.glob("test_*_on_gpu.py")):
        if file.name == "test_kernels_on_gpu.py":
            examples, others = ((file, "-m", which) for which in ("hypothesis", "not hypothesis"))
            found += [(examples, True, "random kernels"), (others, False, "kernels")]
        else:
            name = file.stem.removeprefix("test_").removesuffix("_on_gpu")
            found.append(((file,), name == "backend", name))
    return [pytest.param(words, measured, id=name) for words, measured, name in found]


def check_kit(file: Path, folder: Path) -> None:
    """
    Run the tests of the conformance kit in a file, as `check` does, and assert that every declared value was exercised.

    Args:
        file: The file.
        folder: Where the kit's report goes.
    """
    check(file, f"--attn-report={folder}", measured=False)

    (found,) = json.loads((folder / "report.json").read_text("utf-8"))
    assert found["missing"] == []


def leave_out_overflow_checks() -> None:
    """
    Let whole numbers wrap where kernels are interpreted, as they do on a GPU.

    That takes the interpreter a quarter less time. Tests of the kernels themselves keep the checks.
    """
    if not INTERPRETED:
        return
    from triton.runtime.interpreter import interpreter_builder  # noqa: PLC0415 - not on every platform

    interpreter_builder.options = replace(interpreter_builder.options, sanitize_overflow=False)
