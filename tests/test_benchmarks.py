"""The benchmarks of hosts on the CPU: they run, compare results, and write a report; and they report what is wrong."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attnplug_kit.bench import Contender

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def beside(monkeypatch):
    """Return the module that the benchmarks of hosts share."""
    monkeypatch.syspath_prepend(str(FOLDER))
    sys.modules.pop("beside", None)
    yield importlib.import_module("beside")
    del sys.modules["beside"]  # other tests make packages of this name


def contenders(**outputs):
    return {name: Contender(lambda _, output=output: output) for name, output in outputs.items()}


def report(beside, works):
    made = beside.Report("A title", "About it.", "cpu", ("native", "ours"))
    for work in works:
        made.add(work.measured("cpu", 1))
    return made


def test_equal_results_are_a_report_without_failures(beside, tmp_path) -> None:
    output = torch.randn(4, 3)
    work = beside.Work("equal", contenders(native=output, ours=output), torch.float32, output.double())

    made = report(beside, [work])

    assert made.write(tmp_path / "report.md", tmp_path / "data.json") == 0
    text = (tmp_path / "report.md").read_text("utf-8")
    assert text.startswith("# A title\n\nAbout it.\n\n- device: ")
    assert f"torch {torch.__version__}" in text
    assert "| native / ours |" in text
    (row,) = json.loads((tmp_path / "data.json").read_text("utf-8"))["rows"]
    assert row["microseconds"].keys() == {"native", "ours"}
    assert row["ratios"].keys() == {"ours"}


@pytest.mark.parametrize("factor", [1.001, float("nan"), float("inf")])
def test_a_wrong_result_is_a_failure(factor, beside, capsys) -> None:
    output = torch.randn(4, 3)
    work = beside.Work("wrong", contenders(native=output, ours=output * factor), torch.float32, output.double())

    made = report(beside, [work])

    assert made.write(None, None) == 1
    assert "WRONG: wrong: ours has an error of" in made.to_markdown() + capsys.readouterr().err


def test_what_does_not_run_is_named_and_is_no_success(beside) -> None:
    def fails(_):
        message = "there is no kernel. More of it"
        raise RuntimeError(message)

    output = torch.randn(4, 3)
    calls = contenders(native=output) | {"ours": Contender(fails)}

    made = report(beside, [beside.Work("absent", calls, torch.float32, output)])

    assert "- absent: ours does not run it: there is no kernel\n" in made.to_markdown()
    assert made.failures() == ["nothing ran beside native calls"]


def test_what_ran_elsewhere_is_not_measured(beside) -> None:
    output = torch.randn(4, 3)
    work = beside.Work(
        "elsewhere", contenders(native=output, ours=output), torch.float32, output,
        obstacle=lambda name: "torch's own operator ran" if name == "ours" else "",
    )  # fmt: skip

    (row,) = report(beside, [work]).rows

    assert row.microseconds.keys() == {"native"}
    assert row.refused == {"ours": "torch's own operator ran"}


@pytest.mark.parametrize("masked", ["no mask", "causal", "mask"])
def test_the_reference_is_attention(masked, beside) -> None:
    query, key, value = torch.randn(3, 2, 3, 70, 8, dtype=torch.float64)
    mask = torch.rand(2, 1, 70, 70) > 0.3 if masked == "mask" else None
    rows = beside.sampled(70)

    found = beside.attend_in_float64(query, key, value, rows, mask=mask, is_causal=masked == "causal")

    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, is_causal=masked == "causal")
    torch.testing.assert_close(found, wanted[:, :, rows])
    assert rows[0] == 0
    assert rows[-1] == 69


def test_the_share_in_which_a_gpu_works(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    engine = pytest.importorskip("engine", exc_type=ImportError)
    decodes = [(50.0 + 10 * step, 54.0 + 10 * step) for step in range(5)]

    assert engine.busy_share([]) is None
    assert engine.busy_share([(0.0, 100.0)]) == pytest.approx(1)
    assert engine.busy_share([(0.0, 1.0), (99.0, 100.0), *decodes]) == pytest.approx(0.4)
    overlapping = [(start, end + 4) for start, end in decodes] + [(start + 2, end + 1) for start, end in decodes]
    assert engine.busy_share([(99.0, 100.0), (0.0, 50.0), *overlapping]) == pytest.approx(0.8)


@pytest.mark.slow
def test_the_host_time_of_builds_is_measured_without_a_gpu(tmp_path) -> None:
    data = tmp_path / "data.json"

    subprocess.run(
        [sys.executable, str(FOLDER / "host_time.py"), "--requests", "2", "--repeats", "1", "--out", str(data)],
        check=True, capture_output=True, timeout=300,
    )  # fmt: skip

    found = json.loads(data.read_text("utf-8"))
    assert {"eager, 2 decodes", "graph, 2 decodes"} <= found.keys()
    assert all(microseconds > 0 for microseconds in found.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "rows"),
    [
        ("diffusers_host.py", {"Flux: a transformer of few layers, compiled by aot_eager", "one token"}),
        ("torch_registry.py", {"sdpa causal 1x4x8x64 + backward", "varlen causal 1x4x8x64"}),
    ],
)
def test_a_benchmark_of_a_host_runs_on_the_cpu(script, rows, tmp_path) -> None:
    if script == "diffusers_host.py":
        pytest.importorskip("diffusers", reason="diffusers is not installed; it requires Python 3.11")
    data, page = tmp_path / "data.json", tmp_path / "report.md"

    subprocess.run(
        [sys.executable, str(FOLDER / script), "--tiny", "--report", str(page), "--out", str(data)],
        check=True, capture_output=True, timeout=500,
    )  # fmt: skip

    found = {row["work"]: row for row in json.loads(data.read_text("utf-8"))["rows"]}
    assert rows <= found.keys()
    for name in rows:
        assert found[name]["errors"]["torch/sdpa"] < 1e-4, name
    assert f"python {script} --tiny --report report.md --out data.json" in page.read_text("utf-8")
