"""``attnplug check`` lists what evidence beside a manifest does not cover, and the command that exercises it."""

from __future__ import annotations

import json
import sys
from importlib.resources import files
from typing import TYPE_CHECKING

import pytest

from attnplug import torch_backend
from attnplug.evidence import read_folder
from attnplug.request.device import Device
from attnplug_kit.check import evidence as kit_evidence
from kit.tests.check.test_check_project import PYPROJECT

if TYPE_CHECKING:
    from pathlib import Path

MANIFEST = """\
api = "1.0"
backend = { name = "acme", summary = "an example" }
[supports]
device_type = ["cpu", "cuda"]
dtype = ["bfloat16", "float16"]
head_size = { min = 8, max = 256 }
block_size = 16
cudagraph = { max = "uniform_batch" }
features = ["paged", "sliding_window", "acme.rope"]
[variants.fast]
supports = { compute_capability = ["8.0", "9.0"] }
"""
PLUGIN = """\
from attnplug.contract import hookimpl

@hookimpl
def attnplug_backend(variant, agreement):
    ...
"""
RUN = "pytest --pyargs attnplug_kit --attn-backend=acme/fast"
A100, H200 = Device.cuda("8.0", name="NVIDIA A100"), Device.cuda("9.0", name="NVIDIA H200")
SERVED = {
    "dtype": ["bfloat16", "float16"],
    "head_size": [8, 64, 256],
    "block_size": [16],
    "kv_layout": ["NHD"],
    "kv_cache_form": ["joint"],
    "cudagraph": ["single_token_decode", "uniform_batch"],
    "paged": [True],
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "src" / "attnplug_acme"
    folder.mkdir(parents=True)
    (folder / "attnplug.toml").write_text(MANIFEST, "utf-8")
    (folder / "plugin.py").write_text(PLUGIN, "utf-8")
    (folder / "__init__.py").write_text("", "utf-8")
    (tmp_path / "pyproject.toml").write_text(PYPROJECT.replace('"1.0"', '"1.1"'), "utf-8")
    return folder


@pytest.fixture
def check(run, empty, package):
    def call() -> list[tuple[str, str]]:
        outcome = run("check", str(package.parents[1]), "--json")
        assert (outcome.code, outcome.json["problems"], outcome.json["notes"]) == (0, [], [])
        return [(f"{item['field']}={item['value']}", item["command"]) for item in outcome.json["unexercised"]]

    return call


def evidence(package: Path, name: str, device=H200, **changes) -> None:
    data = {
        "format": 2,
        "backend": "acme/fast",
        "distribution": "attnplug-acme 1.1",
        "device": device.to_dict(),
        "command": "pytest --pyargs attnplug_kit --attn-backend=acme/fast",
        "versions": {"python": "3.12.3", "platform": "linux", "attnplug": "0.1.0", "torch": "2.11.0"},
        "kit_tests": {"ran": 162, "of": 162},
        "features": [],
        "passed": True,
        "served": [{"field": field, "value": value} for field, values in SERVED.items() for value in values],
        "ranges": {"sliding_window": [1, 64]},
        "unreached": [],
        **changes,
    }
    (package / "evidence").mkdir(exist_ok=True)
    (package / "evidence" / f"{name}.json").write_text(json.dumps(data), "utf-8")


def test_without_evidence_each_declared_device_has_its_command(check) -> None:
    assert check() == [
        ("=None", f"{RUN} --attn-device=cpu --attn-report=report"),
        ("=None", f"{RUN} --attn-report=report"),
        ("=None", f"{RUN} --attn-report=report"),
    ]


def test_a_cpu_has_no_vendor_and_an_amd_gpu_no_capability(run, empty, package) -> None:
    manifest = package / "attnplug.toml"
    both = MANIFEST.replace("supports = {", 'supports = { vendor = ["nvidia", "amd"],')
    manifest.write_text(both, "utf-8")

    outcome = run("check", str(package.parents[1]))

    places = [line.rpartition(", on ")[2] for line in outcome.out.splitlines() if ", on a " in line]
    of_nvidia = [f"a CUDA device of compute capability {number} from nvidia:" for number in ("8.0", "9.0")]
    assert places == ["a CPU:", *of_nvidia, "a CUDA device from amd:"]


def test_with_all_of_it_nothing_is_listed(check, package) -> None:
    for name, device in (("a", Device.cpu()), ("b", A100), ("c", H200)):
        evidence(package, name, device)
    evidence(package, "d", features=["acme.rope"])

    assert check() == []


def test_a_device_a_value_and_a_feature_have_commands(check, package) -> None:
    served = [{"field": name, "value": v} for name, values in SERVED.items() for v in values if v != "float16"]
    evidence(package, "a", served=served, ranges={})

    assert check() == [
        ("device_type=cpu", f"{RUN} --attn-device=cpu --attn-report=report"),
        ("compute_capability=8.0", f"{RUN} --attn-report=report"),
        ("dtype=float16", f"{RUN} --attn-report=report"),
        ("sliding_window=1", f"{RUN} --attn-report=report"),
        ("features=acme.rope", f"{RUN} --attn-feature=acme.rope --attn-report=report"),
    ]


def test_what_the_kit_cannot_exercise_has_the_reason(run, empty, package) -> None:
    served = [{"field": name, "value": value} for name, values in SERVED.items() for value in values if value != 256]
    item = {"field": "head_size", "value": 256, "because": "the kit requests sizes up to 128"}
    for name, device in (("a", Device.cpu()), ("b", A100), ("c", H200)):
        evidence(package, name, device, served=served, unreached=[item])
    evidence(package, "d", features=["acme.rope"], served=[])

    outcome = run("check", str(package / "attnplug.toml"))

    assert outcome.out == (
        "acme/fast, not exercised by the conformance kit:\n"
        "    head_size=256 (the kit requests sizes up to 128)\n"
        "no problem, 1 file checked\n"
    )


def test_only_runs_of_this_version_count(check, package) -> None:
    evidence(package, "a", distribution="attnplug-acme 1.0")

    assert [value for value, _ in check()] == ["=None"] * 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"passed": False}, "the evidence records a run in which 'acme/fast' failed"),
        ({"kit_tests": {"ran": 9, "of": 162}}, "the evidence records part of the kit (9 of 162 tests)"),
        ({"backend": "acme/slow"}, "the evidence is about 'acme/slow', which is no variant of 'acme'"),
        ({"format": 9}, "the evidence is not read: its format is 9"),
        (None, "the evidence is not read: it is no JSON"),
    ],
)
def test_a_file_that_verifies_nothing_is_a_problem(run, empty, package, change, said) -> None:
    evidence(package, "a", **(change or {}))
    if change is None:
        (package / "evidence" / "a.json").write_text("{", "utf-8")

    outcome = run("check", str(package.parents[1]), "--json")

    (problem,) = outcome.json["problems"]
    assert outcome.code == 1
    assert problem["problem"].startswith(said)
    assert problem["path"] == str(package / "evidence" / "a.json")
    assert [item["field"] for item in outcome.json["unexercised"]] == [""] * 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"versions": {"python": "3.12.3", "platform": "linux", "attnplug": "0.1.0"}}, "has no version of torch"),
        ({"device": Device.cuda("9.0")}, "does not name its device"),
        ({"kit_tests": {"ran": 0, "of": 0}}, "has no number of tests"),
        ({"command": ""}, "has no command"),
        ({"hostname": "node7"}, "has 'hostname'"),
        ({"command": "pytest --rootdir=/home/kim"}, "names a place: 'pytest --rootdir=/home/kim'"),
        ({"unreached": [{"field": "sinks", "value": True, "because": "C:\\a b"}]}, "names a place: 'C:"),
    ],
)
def test_a_file_unfit_for_contribution_is_a_note(run, empty, package, change, said) -> None:
    evidence(package, "a", **change)

    outcome = run("check", str(package.parents[1]), "--json")

    (note,) = outcome.json["notes"]
    assert (outcome.code, outcome.json["problems"]) == (0, [])
    assert note["problem"].startswith(f"the evidence {said}")
    assert "attnplug check --evidence acme/fast" in note["fix"]


def test_a_person_reads_where_to_run_what(run, empty, package) -> None:
    evidence(package, "a", distribution="attnplug-acme 1.0")

    outcome = run("check", str(package.parents[1]))

    assert outcome.out == (
        "acme/fast, not exercised by the conformance kit:\n"
        "    any value (the evidence is of attnplug-acme 1.0), on a CPU:\n"
        f"      {RUN} --attn-device=cpu --attn-report=report\n"
        "    any value (the evidence is of attnplug-acme 1.0), on a CUDA device of compute capability 8.0:\n"
        f"      {RUN} --attn-report=report\n"
        "    any value (the evidence is of attnplug-acme 1.0), on a CUDA device of compute capability 9.0:\n"
        f"      {RUN} --attn-report=report\n"
        "then move report/evidence-*.json to evidence/VARIANT-DEVICE.json beside the manifest\n"
        "\n"
        "no problem, 3 files checked\n"
    )


WRITES = """\
import json, pathlib, sys
report, found, outcome = pathlib.Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
(report / "evidence-torch-sdpa.json").write_text(json.dumps(found))
test = {"id": "kit.py::TestBasic::test_mixed[a]", "outcome": outcome, "message": "output: wrong"}
(report / "report.json").write_text(json.dumps([{"tests": [test]}]))
print("1 " + outcome)
sys.exit(outcome == "failed")
"""


@pytest.fixture
def kit(monkeypatch):
    """Replace the kit by a process with this outcome, on a CPU."""
    written = (files(torch_backend) / "evidence" / "sdpa-cpu.json").read_text("utf-8")
    monkeypatch.setattr(Device, "current", Device.cpu)

    def use(outcome: str = "passed", **changes) -> None:
        found = json.dumps({**json.loads(written), "passed": outcome == "passed", **changes})
        program = [sys.executable, "-c", WRITES]
        monkeypatch.setattr(
            kit_evidence, "command_of_kit", lambda _, report, **__: [*program, str(report), found, outcome]
        )

    return use


@pytest.mark.parametrize("name", [(), ("torch/sdpa",)])
def test_a_run_that_passed_is_written_and_fit_for_contribution(run, empty, kit, tmp_path, name) -> None:
    kit()

    outcome = run("check", "--evidence", *name, "--out", str(tmp_path / "mine"))

    file = tmp_path / "mine" / "torch-sdpa-cpu.json"
    number = json.loads(file.read_text("utf-8"))["kit_tests"]["of"]
    assert outcome.code == 0
    assert outcome.out.splitlines() == [
        f"{file}: torch/sdpa passed all {number} tests of the kit on cpu",
        "to contribute it, move it to evidence/sdpa-cpu.json beside the manifest of torch; CONTRIBUTING.md says more",
    ]
    (found,) = read_folder(file.parent).evidence
    assert (found.id, found.device, found.verifies) == ("torch/sdpa", Device.cpu(), True)


def test_json_has_the_file_the_device_and_the_command(run, empty, kit, tmp_path) -> None:
    kit()

    (found,) = run("check", "--evidence", "torch/sdpa", "--out", str(tmp_path), "--json").json["evidence"]

    assert found["file"] == str(tmp_path / "torch-sdpa-cpu.json")
    assert (found["contribute_as"], found["device"]) == ("evidence/sdpa-cpu.json", {"type": "cpu"})
    assert found["command"].startswith("pytest ")
    assert {"python", "torch", "attnplug"} <= set(found["versions"])


@pytest.mark.parametrize(
    ("run_of_kit", "said"),
    [
        ({"outcome": "failed"}, ("failed the conformance kit here, so nothing was written", "test_mixed[a]: output")),
        (
            {"passed": False, "kit_tests": {"ran": 3, "of": 9}},
            ("only a part", "(3 of 9 tests)", "unset PYTEST_ADDOPTS"),
        ),
        ({"passed": False, "missing": [{"field": "sinks", "value": True}]}, ("did not serve", "sinks=True")),
    ],
)
def test_a_run_that_did_not_pass_has_no_file(run, empty, kit, tmp_path, run_of_kit, said) -> None:
    kit(**run_of_kit)

    outcome = run("check", "--evidence", "torch/sdpa", "--out", str(tmp_path / "mine"), "--json")

    assert (outcome.code, outcome.json["evidence"], [*(tmp_path / "mine").iterdir()]) == (1, [], [])
    (error,) = outcome.json["errors"]
    assert all(error[part] for part in ("problem", "expected", "fix"))
    assert all(each in outcome.err for each in said)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("torch", "--device", "cuda"), "the device 'cuda' is not on this machine"),
        (("torch", "--device", "h100"), "the device 'h100' is not on this machine"),
        (("acme",), "the backend 'acme' cannot be tested"),
        (("torch", "--out", "{file}/x"), "cannot be made"),
    ],
)
def test_evidence_is_refused_before_the_kit_runs(run, empty, kit, tmp_path, words, said) -> None:
    (tmp_path / "file").touch()

    outcome = run("check", "--evidence", *(word.format(file=tmp_path / "file") for word in words))

    assert (outcome.code, outcome.out) == (2, "")
    assert said in outcome.err
    assert "fix: " in outcome.err


def test_a_path_is_no_backend(run, empty) -> None:
    assert "a path, '.', was given with --evidence" in run("check", ".", "--evidence").err


@pytest.mark.slow
@pytest.mark.unmeasured
def test_a_part_of_the_real_kit_is_no_evidence(run, empty, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTEST_ADDOPTS", "-k test_one_token")

    outcome = run("check", "--evidence", "torch/sdpa", "--device", "cpu", "--out", str(tmp_path), "--json")

    assert outcome.code == 1
    assert outcome.json["errors"][0]["problem"].startswith("only a part of the kit ran for torch/sdpa (1 of ")
    assert [*tmp_path.glob("*.json")] == []
