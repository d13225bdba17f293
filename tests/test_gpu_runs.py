"""Tests marked gpu: deselected with a reason where there is no GPU, reported with their numbers where there is one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CASES = """\
import pytest

@pytest.mark.gpu
def test_decode(record_property):
    record_property("decode, 64 x 4096", "286 us")
    record_property("errors", "| size | error |\\n| --- | --- |\\n| 64 | 0.03 |")

@pytest.mark.gpu
def test_prefill():
    assert False

def test_anywhere():
    pass
"""


def _run(folder: Path, *arguments: str, gpu: bool) -> subprocess.CompletedProcess[str]:
    """Run CASES under the workspace's conftest, with a torch that sees a GPU or does not."""
    shutil.copy(ROOT / "conftest.py", folder)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = gpu: as in the workspace\n", encoding="utf-8")
    (folder / "test_cases.py").write_text(CASES, encoding="utf-8")
    (folder / "torch.py").write_text(
        f"class cuda:\n    is_available = staticmethod(lambda: {gpu})\nmanual_seed = print\n", encoding="utf-8"
    )
    path = os.pathsep.join([str(folder), str(ROOT)])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:randomly", *arguments]
    environment = {**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": ""}
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, env=environment)


def test_without_a_gpu_they_are_deselected_and_the_reason_is_printed(tmp_path: Path) -> None:
    done = _run(tmp_path, gpu=False)

    assert done.returncode == 0, done.stdout
    assert "1 passed, 2 deselected" in done.stdout
    assert "gpu tests: 2 deselected, since torch.cuda.is_available() is False here" in done.stdout


def test_with_a_gpu_they_run(tmp_path: Path) -> None:
    done = _run(tmp_path, gpu=True)

    assert done.returncode == 1
    assert "1 failed, 2 passed" in done.stdout


def test_the_report_names_device_command_outcomes_and_numbers(tmp_path: Path) -> None:
    _run(tmp_path, "-m", "gpu", "--gpu-report=evidence/gpu.md", gpu=True)

    page = (tmp_path / "evidence" / "gpu.md").read_text("utf-8")
    assert page.startswith("# GPU tests on ")
    assert "-m gpu`; not edited by hand." in page
    assert "evidence/gpu.md" not in page
    assert "| attnplug | " in page
    assert "| `test_cases.py::test_decode` | passed | decode, 64 x 4096: 286 us, errors: below |" in page
    assert "`test_cases.py::test_decode`, errors:\n\n| size | error |\n| --- | --- |\n| 64 | 0.03 |\n" in page
    assert "| `test_cases.py::test_prefill` | failed | - |" in page
    assert "test_anywhere" not in page


def test_a_run_without_a_gpu_publishes_nothing(tmp_path: Path) -> None:
    done = _run(tmp_path, "-m", "gpu", "--gpu-report=gpu.md", gpu=False)

    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED
    assert not (tmp_path / "gpu.md").exists()
