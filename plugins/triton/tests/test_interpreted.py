"""The GPU tests and the conformance kit on a CPU, in Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.backends.triton_on_cpu import run_interpreted, run_interpreted_kit

FOLDER = Path(__file__).parent


def test_each_kernel_once():
    few = "mixed_batch and 16 or merged and sinks"
    run_interpreted(FOLDER / "test_backend_on_gpu.py", "-k", few)


def test_ranks_of_dcp():
    run_interpreted(FOLDER / "test_dcp_on_gpu.py", "-k", "mixed or window or quantized")


def test_the_basic_tier():
    run_interpreted(FOLDER / "interpreted_conformance.py", "-k", "TestBasic")


def test_scales_per_token_and_head():
    few = "per_token_head and (test_capability or test_written_slots or test_slots_written_by_the_host)"
    run_interpreted(FOLDER / "interpreted_conformance.py", "-k", f"TestAll and {few}")
    run_interpreted(FOLDER / "test_backend_on_gpu.py", "-k", "per_token_head")


@pytest.mark.slow
@pytest.mark.long
def test_gpu_tests():
    for name in ("test_backend_on_gpu.py", "test_dcp_on_gpu.py"):
        run_interpreted(FOLDER / name, measured=False)


@pytest.mark.exhaustive
@pytest.mark.long
def test_conformance(tmp_path):
    run_interpreted_kit(FOLDER / "interpreted_conformance.py", tmp_path)
