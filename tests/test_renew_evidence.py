"""The command that runs the kit again for shipped evidence: its variants, its files, and nothing of a failed run."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from attnplug import Device
from attnplug.evidence import read_folder
from attnplug.manifest import read_manifest
from attnplug_kit.check.evidence import command_of_kit, short_name
from attnplug_kit.check.exercised import check_evidence
from tools import renew_evidence
from tools.renew_evidence import PLACES, ROOT, Target, named, place, renew, shipped

MANIFEST = """\
api = "1.0"
backend = { name = "acme", summary = "an example" }
supports = { device_type = ["cpu", "cuda"], dtype = "bfloat16", head_size = 64 }
[variants.fast]
[variants.slow]
"""
MANIFESTS = [path for place in PLACES for path in sorted(ROOT.glob(f"{place}/attnplug.toml"))]
SHIPPED = [found for path in MANIFESTS for found in read_folder(path.with_name("evidence")).evidence]
H200 = Device.cuda("9.0", name="NVIDIA H200")
RUN = """\
import json, os, pathlib, sys
evidence = json.loads(sys.argv[2])
evidence["told"] = [os.environ["OMP_NUM_THREADS"], *sys.argv[3:]]
pathlib.Path(sys.argv[1], "evidence-acme-fast.json").write_text(json.dumps(evidence))
test = {"id": "x.py::test_a", "outcome": "passed" if evidence["passed"] else "failed", "message": "it is wrong"}
pathlib.Path(sys.argv[1], "report.json").write_text(json.dumps([{"tests": [test]}]))
print("3 passed")
"""


def evidence(device=H200, variant="fast", **changes):
    plain = {"format": 2, "backend": f"acme/{variant}", "distribution": "attnplug-acme 1.0", "device": device.to_dict()}
    return {**plain, "passed": True, "features": [], "served": [], "ranges": {}, "unreached": [], **changes}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "plugins" / "acme" / "src" / "attnplug_acme"
    (folder / "evidence").mkdir(parents=True)
    (folder / "attnplug.toml").write_text(MANIFEST, "utf-8")
    return folder / "evidence"


@pytest.fixture
def run_of(monkeypatch):
    """Make the kit a process that writes this evidence."""

    def use(found) -> None:
        def command(_: str, report: str, **__: object) -> list[str]:
            return [sys.executable, "-c", RUN, report, json.dumps(found)]

        monkeypatch.setattr(renew_evidence, "command_of_kit", command)

    return use


def test_files_of_this_device_are_renewed(tmp_path: Path, package: Path) -> None:
    (package / "fast-h200.json").write_text(json.dumps(evidence(features=["acme.rope"])), "utf-8")
    (package / "slow-cpu.json").write_text(json.dumps(evidence(Device.cpu(), "slow")), "utf-8")

    assert [*shipped(tmp_path, H200)] == [Target("acme/fast", package / "fast-h200.json", ("acme.rope",))]
    assert [*shipped(tmp_path, Device.cpu())] == [Target("acme/slow", package / "slow-cpu.json")]


def test_another_product_of_the_capability_gets_a_file_of_its_own(tmp_path: Path, package: Path) -> None:
    for name in ("h100", "h200"):
        (package / f"fast-{name}.json").write_text(json.dumps(evidence()), "utf-8")

    found = [*shipped(tmp_path, Device.cuda("9.0", name="NVIDIA GH200 480GB"))]

    assert found == [Target("acme/fast", package / "fast-gh200.json")]


def test_a_variant_without_a_file_gets_one_by_its_name(tmp_path: Path, package: Path) -> None:
    assert [*named(tmp_path, ["acme/slow"], H200)] == [Target("acme/slow", package / "slow-h200.json")]
    assert [*named(tmp_path, ["acme/slow"], Device.cpu())] == [Target("acme/slow", package / "slow-cpu.json")]
    with pytest.raises(SystemExit, match="no manifest of this workspace has the variant 'acme/fats'"):
        [*named(tmp_path, ["acme/fats"], H200)]


def test_a_run_that_passed_is_written_and_placed(tmp_path: Path, package: Path, run_of, monkeypatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    run_of(evidence())
    target, out = Target("acme/fast", package / "fast-h200.json"), tmp_path / "out"

    assert renew(target, out).endswith(": 3 passed")
    assert not target.file.exists()
    assert [*place(tmp_path, out)] == [target.file]
    assert json.loads(target.file.read_text("utf-8")) == evidence(told=["1"])


def test_a_run_has_the_processes_and_threads_that_were_requested(package: Path, run_of, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    run_of(evidence())
    target = Target("acme/fast", package / "fast-h200.json")

    renew(target, None, processes=4)

    assert json.loads(target.file.read_text("utf-8"))["told"] == ["3", "-n", "4"]


def test_a_run_that_failed_writes_nothing(package: Path, run_of) -> None:
    run_of(evidence(passed=False))
    target = Target("acme/fast", package / "fast-h200.json")

    assert renew(target, None) == "acme/fast: not renewed: 3 passed\n  test_a: it is wrong"
    assert not target.file.exists()


def test_the_command_is_the_kit_with_the_features_of_the_file() -> None:
    command = command_of_kit("acme/fast", "report", features=["acme.rope"])

    assert command[1:3] == ["-m", "pytest"]
    assert command[-3:] == ["--attn-backend=acme/fast", "--attn-feature=acme.rope", "--attn-report=report"]


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.parent.name)
def test_contributed_files_are_complete_and_anonymous(path: Path) -> None:
    """The finding of `attnplug check` says what is wrong with a file: format, variant, device, versions, places."""
    assert [str(found) for found in check_evidence(read_manifest(path))] == []


@pytest.mark.parametrize("found", SHIPPED, ids=lambda found: f"{found.id}-{short_name(found.device)}")
def test_contributed_files_are_named_by_variant_and_device(found) -> None:
    assert Path(found.origin).stem == f"{found.id.partition('/')[2]}-{short_name(found.device)}"


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "rtx-4090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("Tesla T4", "t4"),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_a_product_names_its_file(name: str, short: str) -> None:
    assert short_name(Device.cuda("9.0", name=name)) == short
