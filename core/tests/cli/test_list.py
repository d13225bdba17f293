"""``attnplug list``."""

from __future__ import annotations

import pytest

from attnplug.request.device import Device
from tests.command import FROM_A_VENDOR

KEYS = {"name", "aliases", "summary", "distribution", "module", "built_in", "api", "manifest", "variants"}


def _backend(done, name: str):
    return next(backend for backend in done.json["backends"] if backend["name"] == name)


def test_a_plugin_is_listed_with_its_variants(run, site) -> None:
    done = run("list", "--json")

    flash = _backend(done, "flash")
    assert done.code == 0
    assert flash.keys() == KEYS
    assert flash["distribution"] == "attnplug-flash 1.0"
    assert flash["module"] == "scratch_flash_flash.plugin"
    assert (flash["api"], flash["aliases"], flash["built_in"]) == ("1.0", ["FLASH"], False)
    assert {v["id"]: v["availability"] for v in flash["variants"]} == {
        "flash/old": "ready",
        "flash/new": "missing_dependency",
        "flash/host": "ready",
    }


def test_what_is_missing_is_listed_with_what_to_install(run, site) -> None:
    new = _backend(run("list", "--json"), "flash")["variants"][1]

    assert new["requires"] == ["flash-new >=4"]
    assert [(reason["code"], reason["field"]) for reason in new["reasons"]] == [("missing", "flash-new >=4")]
    assert new["install"] == ["flash-new >=4"]
    assert new["supports"]["block_size"] == "128, multiples of 16"


def test_a_known_plugin_is_listed_while_it_is_absent(run, empty) -> None:
    absent = next(backend for backend in run("list", "--json").json["backends"] if not backend["manifest"])

    assert absent["variants"][0]["availability"] == "absent"
    assert (absent["variants"][0]["install"], absent["variants"][0]["action"]) == (
        [],
        "pip install ./plugins/blocksparse",
    )
    assert "\n    fix: pip install ./plugins/blocksparse\n" in run("list").out


def test_what_the_settings_keep_out_stays_listed(run, site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_BLOCK", "flash/old")

    old = _backend(run("list", "--json"), "flash")["variants"][0]

    assert old["availability"] == "refused"
    assert "ATTNPLUG_BLOCK" in old["action"]


def test_a_broken_plugin_does_not_hide_the_others(run, site) -> None:
    site.add("aaa", "api = ")

    done = run("list", "--json")

    assert _backend(done, "aaa")["variants"][0]["availability"] == "broken"
    assert _backend(done, "flash")["variants"][0]["availability"] == "ready"


def test_plain_text_has_status_origin_and_fix(run, site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "current", lambda: Device.cuda("9.0"))
    done = run("list")

    assert "flash/old  ready  (attnplug-flash 1.0)\n    three libraries behind one name\n" in done.out
    assert "    - flash-new >=4 is required and not installed\n    fix: pip install 'flash-new >=4'\n" in done.out


def test_what_pip_does_not_install_has_the_fix_of_the_manifest(run, empty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "current", lambda: Device.cuda("9.0"))
    empty.add("flash", FROM_A_VENDOR)

    text, done = run("list").out, run("list", "--json")

    (new,) = [one for one in _backend(done, "flash")["variants"] if one["id"] == "flash/new"]
    assert (new["install"], new["action"]) == (["flash-tools"], "install flash-new >=4: from its vendor")
    assert "    fix: install flash-new >=4: from its vendor\n    then pip install flash-tools\n" in text


def test_notes_are_counted_and_left_to_doctor(run, site) -> None:
    site.metadata("neighbour", "1.0", "[console_scripts]\nno equals sign\n")

    done = run("list")

    assert done.out.endswith("1 note about this environment: see `attnplug doctor`\n")
    assert run("list", "--json").json["notes"][0]["subject"] == "neighbour 1.0"


def test_json_imports_nothing_heavy(start, site) -> None:
    code = (
        "import sys; from attnplug.cli.main import main; main(['list', '--json']);"
        "print(sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)"
    )

    done = start("-c", code)

    assert done.code == 0
    imported = set(done.err.strip("[]\n").replace("'", "").split(", "))
    assert {"attr", "argparse", "attnplug"} <= imported
    assert not imported & {
        "torch",
        "rich",
        "cattrs",
        "numpy",
        "pluggy",
        "packaging",
        "transformers",
        "scratch_flash_flash",
    }


@pytest.mark.parametrize("name", ["flash", "FLASH", "Attnplug.Flash"])
@pytest.mark.parametrize(("bounds", "blocked"), [("==1.0", True), (">=1,<2", True), ("==1.1", False), ("<1", False)])
def test_a_blocked_version_is_refused(run, site, monkeypatch, caplog, name: str, bounds: str, blocked: bool) -> None:
    monkeypatch.setenv("ATTNPLUG_BLOCK", f"{name}{bounds}")

    found = {v["id"]: v for b in run("list", "--json").json["backends"] for v in b["variants"]}

    assert (found["flash/host"]["availability"] == "refused") is blocked
    assert (f"{name}{bounds}" in str(found["flash/host"]["reasons"])) is blocked
    assert not caplog.records  # a version that is not installed is no unknown name


def test_an_entry_that_could_never_match_is_refused(run, site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_BLOCK", "flash=1.0")

    done = run("list")

    assert (done.code, done.out) == (2, "")
    assert "the entry 'flash=1.0' is in ATTNPLUG_BLOCK, and could never match" in done.err


def test_what_the_device_cannot_run_is_not_ready(run, site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run("list", "--all")
    document = run("list", "--json").json

    (old,) = [text for text in done.out.split("\n\n") if text.startswith("flash/old  ")]
    assert old.startswith("flash/old  other device  ")
    assert old.endswith("\n    - requires device type cuda; the device is cpu")
    (new,) = [text for text in done.out.split("\n\n") if text.startswith("flash/new  ")]
    assert "pip install" not in new  # nothing that is installed makes it run here
    runs = {v["id"]: v["runs_here"] for b in document["backends"] for v in b["variants"]}
    assert document["device"] == {"type": "cpu"}
    assert (runs["flash/old"], runs["flash/new"], runs["flash/host"]) == (False, False, True)
    here = [id_ for id_, found in runs.items() if found]
    assert f" can run on this machine (cpu): {', '.join(here)}\n" in done.out


def test_a_gpu_makes_its_backends_ready(run, site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "current", lambda: Device.cuda("9.0", name="NVIDIA H100"))

    done = run("list")

    assert "\nflash/old  ready  " in done.out
    assert "\nflash/new  missing dependency  " in done.out
    assert "\nflash/host  other device  " in run("list", "--all").out
    assert "can run on this machine (cuda:9.0 (NVIDIA H100)): flash/old" in done.out


def test_backends_for_other_devices_are_named_in_one_line(run, site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    short, whole = run("list").out, run("list", "--all").out

    assert "other device" in whole
    assert "other device  " not in short
    (line,) = [each for each in short.splitlines() if " for other devices " in each]
    assert "attnplug list --all" in line
    assert "flash/old" in short
    assert "\nflash/host  ready  " in f"\n{short}"
