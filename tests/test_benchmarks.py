"""The benchmarks of hosts on the CPU: they run, compare results, and write a report; and they report what is wrong."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attrs import evolve

import attnplug
from attnplug.request import Device
from attnplug_kit.bench import Contender
from attnplug_kit.tune.grid import layers_of_json
from tools.capabilities import only

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


@pytest.fixture
def tiles(monkeypatch):
    """Return the script that writes the tile sizes of the plugin triton."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("tiles")
    del sys.modules["tiles"]


def tried(key, keys, **seconds):
    row = {"key": {"arch": key}, "tiles": {"keys": keys}, "device": "NVIDIA H200", "triton": "3.7.1"}
    return [{**row, "step": step, "seconds": each} for step, each in seconds.items()]


def test_the_fastest_tiles_of_each_key_are_written(tiles) -> None:
    rows = [
        *tried("9.0", 32, decode=1.0, prefill=4.0),
        *tried("9.0", 64, decode=1.5, prefill=2.0),
        *tried("9.0", 128, decode=0.1),  # not measured in the other step
        *tried("8.9", 16, decode=9.0),
    ]

    found = tiles.fastest(rows)

    assert [(row["key"]["arch"], row["tiles"]["keys"]) for row in found] == [("9.0", 64), ("8.9", 16)]
    old = [{"key": {"arch": "9.0"}, "tiles": {"keys": 1}}, {"key": {"arch": "8.0"}, "tiles": {"keys": 2}}]
    table = json.loads(tiles.written(tiles.merged(old, found)))["rows"]
    assert [(row["key"]["arch"], row["tiles"]["keys"]) for row in table] == [("8.0", 2), ("8.9", 16), ("9.0", 64)]


def test_tried_tiles_are_kept_with_their_key(monkeypatch, tmp_path) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    paged, sizes = importlib.import_module("paged"), importlib.import_module("attnplug_triton.tiles")
    key = sizes.TileKey("9.0", "decode", 128, 128, "bfloat16", 16, 16)
    usual = sizes.Tiles(rows=16, keys=64, stages=5, warps=4)
    backend = SimpleNamespace(decode_tiles=usual, tile_key=lambda kernel: evolve(key, phase=kernel))
    rig = SimpleNamespace(
        backend=SimpleNamespace(wrapped=backend, device_properties=SimpleNamespace(name="NVIDIA H200"))
    )
    monkeypatch.setattr(paged, "version", lambda name: "3.7.1")
    tried = paged.Tried(tmp_path / "tiles.json", [("decode", {"keys": 32, "stages": 3})])

    tried.keep(
        "a step", rig, "triton/unified", {"triton/unified": [3.0, 1.0, 2.0], "decode with keys 32, stages 3": [0.5]}
    )

    rows = json.loads((tmp_path / "tiles.json").read_text("utf-8"))
    assert [(row["seconds"], sizes.Tiles(**row["tiles"])) for row in rows] == [
        (2.0, usual),
        (0.5, evolve(usual, keys=32, stages=3)),
    ]
    assert all(sizes.TileKey(**row["key"]) == key for row in rows)
    assert rows[0]["step"] == "a step"


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


def test_a_plugin_serves_each_layer_to_tune():
    layers = layers_of_json(f"@{FOLDER / 'tune_layers.json'}")
    assert len(layers) == len(json.loads((FOLDER / "tune_layers.json").read_text(encoding="utf-8")))
    with only(FOLDER.parent):
        for layer in layers:
            chosen = attnplug.explain(layer, Device.parse("h200"), assume_installed=True).chosen
            assert chosen is not None, str(layer)
            assert chosen.backend != "torch"
