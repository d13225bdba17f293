"""``attnplug check`` lists what evidence beside a manifest does not cover, and the command that exercises it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from attnplug.request.device import Device
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


def evidence(package: Path, name: str, device=Device.cuda("9.0"), **changes) -> None:  # noqa: B008 - frozen
    data = {
        "format": 2,
        "backend": "acme/fast",
        "distribution": "attnplug-acme 1.1",
        "device": device.to_dict(),
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


def test_with_all_of_it_nothing_is_listed(check, package) -> None:
    for name, device in (("a", Device.cpu()), ("b", Device.cuda("8.0")), ("c", Device.cuda("9.0"))):
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
    for name, device in (("a", Device.cpu()), ("b", Device.cuda("8.0")), ("c", Device.cuda("9.0"))):
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
