"""The script that compares backends on a GPU, tried on the CPU: its report, and its exit status for a wrong backend."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

NEEDS = "SGLang is not installed here; `make test-hosts` runs these"
SCRIPT = Path(__file__).parents[3] / "benchmarks" / "sglang_host.py"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("sglang") is None, reason="SGLang is not installed here; `make test-hosts` runs these"
    ),
]


def run(report: Path, *options: str) -> tuple[int, str]:
    """Return the exit status, and the report."""
    command = [sys.executable, str(SCRIPT), str(report), "--device", "cpu", "--tiny", "--repeats", "1", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert report.is_file(), done.stderr[-4000:]
    return done.returncode, report.read_text()


def test_the_report_has_errors_and_times(tmp_path):
    status, text = run(tmp_path / "report.md", "--ours", "attnplug")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    errors = {tuple(row[:2]): float(row[3]) for row in rows if row[2] == "attnplug" and len(row) == 4}
    assert set(errors) == {(v, p) for v in ("plain", "window", "cap", "sinks") for p in ("eager", "graph")}
    assert max(errors.values()) < 1e-5
    assert status == 0
    assert "x torch_native)" in next(row[3] for row in rows if row[:2] == ["decode 4 x 64", "eager"])
    assert "sglang 0.5." in text


def test_a_backend_that_drops_the_soft_cap_is_an_error(tmp_path):
    """SGLang's own torch_native does: named as one of ours, it ends the script with 1."""
    status, text = run(tmp_path / "report.md", "--ours", "torch_native", "--beside", "--only", "cap, eager")
    assert "| cap | eager | torch_native | " in text
    assert status == 1


@pytest.mark.slow
def test_an_engine_has_the_log_probabilities_of_transformers(tmp_path):
    status, text = run(tmp_path / "report.md", "--ours", "attnplug", "--beside", "--only", "engine, eager", "--engines")
    row = next(line for line in text.splitlines() if line.startswith("| attnplug | no |"))
    assert float(row.split("|")[3]) < 1e-5
    assert status == 0


def test_a_pair_of_engines_takes_turns(tmp_path):
    """The program that measures SGLang's backend beside attnplug, tried with a tiny model."""
    out = tmp_path / "pair.json"
    words = [
        "--pair",
        "torch_native=torch/sdpa",
        "--size",
        "tiny",
        "--device",
        "cpu",
        "--rounds",
        "2",
        "--out",
        str(out),
    ]
    command = [sys.executable, str(SCRIPT.with_name("sglang_engines.py")), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    (load,) = json.loads(out.read_text())["loads"].values()
    for what in ("tokens_per_s", "between_tokens_ms"):
        own, plugged = load[what]["torch_native"], load[what]["torch/sdpa"]
        assert own["spread"][0] <= own["median"] <= own["spread"][1]
        assert len(load[what]["ratios"]) == 2
        assert plugged["median"] > 0 < load[what]["ratio"]
