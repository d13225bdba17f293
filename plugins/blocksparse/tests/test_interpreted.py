"""The GPU tests and the conformance kit on a CPU, in Triton's interpreter and the emulator of Gluon."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.triton_on_cpu import interpreted_runs, run_interpreted, run_interpreted_kit

FOLDER = Path(__file__).parent


def test_each_kernel_once():
    few = "a_token_affects and head and not contiguous"
    run_interpreted(FOLDER / "test_kernels_on_gpu.py", str(FOLDER / "test_specialized_on_gpu.py"), "-k", few)


@pytest.mark.exhaustive
@pytest.mark.long
@pytest.mark.parametrize(("words", "measured"), interpreted_runs(FOLDER))
def test_gpu_tests(words, measured):
    run_interpreted(*words, measured=measured)


@pytest.mark.exhaustive
@pytest.mark.long
def test_conformance(tmp_path):
    run_interpreted_kit(FOLDER / "interpreted_conformance.py", tmp_path)
