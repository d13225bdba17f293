"""What the commands report of evidence: which devices were verified, and what was not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

LAYER = ("--head-size", "64", "--num-q-heads", "8", "--num-kv-heads", "2", "--dtype", "bfloat16", "--backend", "flash")
HERE = ("--device", "cpu")
SERVED = {"head_size": 64, "dtype": "bfloat16", "paged": True, "block_size": 16, "kv_layout": "NHD"}
SERVED |= {"kv_cache_form": "joint"}


def evidence(candidate: str, **change: Any) -> str:
    served = [{"field": name, "value": value} for name, value in SERVED.items()]
    plain = {
        "format": 1,
        "backend": candidate,
        "distribution": "attnplug-flash 1.0",
        "device": {"type": "cpu"},
        "passed": True,
        "served": served,
        "unreached": [],
    }
    return json.dumps({**plain, **change})


@pytest.fixture
def shipped(site: Any) -> Path:
    """The folder in which the flash plugin ships its evidence."""
    folder = site.folder / "scratch_flash_flash" / "evidence"
    folder.mkdir()
    (folder / "host-cpu.json").write_text(evidence("flash/host"))
    return folder


def _variants(done: Any) -> dict[str, Any]:
    return {v["id"]: v for backend in done.json["backends"] for v in backend["variants"]}


def test_list_names_the_devices_on_which_each_variant_was_verified(run, shipped) -> None:
    h200 = {"type": "cuda", "name": "NVIDIA H200", "compute_capability": "9.0"}
    (shipped / "host-h200.json").write_text(evidence("flash/host", device=h200))
    (shipped / "old-h200.json").write_text(evidence("flash/old", device=h200, distribution="attnplug-flash 0.9"))

    variants = _variants(run("list", "--json"))

    assert variants["flash/host"]["verified_on"] == [{"type": "cpu"}, {"vendor": "nvidia", **h200}]
    assert variants["flash/old"]["verified_on"] == variants["flash/new"]["verified_on"] == []
    text = run("list", "--all").out
    assert "    verified by the conformance kit on cpu, cuda:9.0 (NVIDIA H200)\n" in text
    assert text.count("    not verified by the conformance kit on any device\n") >= 2


def test_list_names_devices_that_read_alike_once(run, shipped) -> None:
    h200 = {"type": "cuda", "name": "NVIDIA H200", "compute_capability": "9.0"}
    (shipped / "host-h200.json").write_text(evidence("flash/host", device=h200))
    (shipped / "host-part-of-h200.json").write_text(evidence("flash/host", device={**h200, "num_multiprocessors": 66}))

    assert "    verified by the conformance kit on cpu, cuda:9.0 (NVIDIA H200)\n" in run("list").out


def test_explain_lists_what_is_unverified(run, shipped) -> None:
    found = run("explain", *LAYER, *HERE, "--sliding-window", "7")

    assert (
        "not verified by the conformance kit on this device: sliding_window=7 (no test has requested it)" in found.out
    )
    assert "not verified" not in run("explain", *LAYER, *HERE).out


def test_explain_as_json_has_records(run, shipped) -> None:
    (explanation,) = run("explain", *LAYER, *HERE, "--sliding-window", "7", "--json").json["explanations"]

    verdicts = {verdict["id"]: verdict["unverified"] for verdict in explanation["verdicts"]}
    assert verdicts["flash/host"] == [{"field": "sliding_window", "value": 7, "because": "no test has requested it"}]
    assert verdicts["flash/old"] == []  # it cannot serve, and says why


def test_devices_side_by_side_show_where_it_was_verified(run, shipped) -> None:
    done = run("explain", *LAYER, *HERE, "--device", "cuda:8.0", "--assume-installed", "--matrix")

    row = next(line for line in done.out.splitlines() if line.startswith("flash/host"))
    assert row.split()[:2] == ["flash/host", "chosen"]
    row = next(line for line in done.out.splitlines() if line.startswith("flash/old"))
    assert row.endswith("chosen?")


def test_a_terminal_shows_it_too(on_terminal, shipped) -> None:
    done = on_terminal("explain", *LAYER, *HERE, "--sliding-window", "7")

    assert done.code == 0
    assert "not verified" in done.out


@pytest.mark.parametrize("content", ["{", evidence("flash/host", format=2), evidence("other/host")])
def test_doctor_notes_a_file_that_is_of_no_use(run, shipped, content) -> None:
    (shipped / "bad.json").write_text(content)

    done = run("doctor", "--json")

    (note,) = (note for note in done.json["notes"] if note["stage"] == "evidence")
    assert note["subject"] == str(shipped / "bad.json")
    assert _variants(done)["flash/host"]["verified_on"] == [{"type": "cpu"}]
    assert not [problem for problem in done.json["problems"] if "evidence" in problem["what"]]
    told = run("doctor").out
    assert "bad.json" in told.replace("\n      ", "")
    assert "nothing is broken" not in told
    assert told.endswith("\nno backend is broken; 1 note about evidence that verifies nothing\n")


def test_doctor_warns_of_a_folder_that_is_not_there(run, site, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = str(tmp_path / "gone")
    monkeypatch.setenv("ATTNPLUG_EVIDENCE", gone)

    done = run("doctor", "--json")

    assert done.json["warnings"] == [
        f"{gone!r} in environment variable ATTNPLUG_EVIDENCE is no folder, and holds no evidence"
    ]
    rows = {row["name"]: row for row in done.json["settings"]}
    assert rows["evidence"]["value"] == [gone]


def test_the_users_folder_counts(run, site, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "evidence-flash-host.json").write_text(evidence("flash/host"))
    assert "not verified" in run("explain", *LAYER, *HERE).out
    monkeypatch.setenv("ATTNPLUG_EVIDENCE", str(tmp_path))

    assert "not verified" not in run("explain", *LAYER, *HERE).out
