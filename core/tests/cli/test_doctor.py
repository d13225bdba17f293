"""``attnplug doctor``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

import attnplug
from attnplug.cli.device_report import DeviceReport
from attnplug.cli.doctor import report
from attnplug.evidence import MeasuredTime, ProfileEntry, dump_entries
from attnplug.request import Requirements
from attnplug.request.device import Device
from tests.command import FROM_A_VENDOR

if TYPE_CHECKING:
    from pathlib import Path

LAYER = ("--head-size", "64", "--num-q-heads", "8", "--num-kv-heads", "8", "--dtype", "bfloat16")

ALONE = """\
api = "{api}"
backend = {{ name = "alone", summary = "on the CPU, {what}" }}
[supports]
device_type = "cpu"
dtype = {dtype}
head_size = {{ multiple_of = 48 }}
{more}
"""


def _alone(api: str = "1.0", dtype: str = '"float32"', more: str = "") -> str:
    return ALONE.format(api=api, what="dense", dtype=dtype, more=more)


def _loading(done) -> dict[str, tuple[str, str]]:
    return {result["id"]: (result["status"], result["text"]) for result in done.json["loading"]}


def test_a_sound_environment_has_no_problems(run, site) -> None:
    done = run("doctor", "--json")

    assert done.code == 0
    assert done.json["problems"] == []
    assert done.json["versions"]["attnplug"] == attnplug.__version__
    assert done.json["device"]["type"] in ("cpu", "cuda")
    assert done.json["loading"] == []
    assert "flash" in {backend["name"] for backend in done.json["backends"]}


def test_settings_are_listed_with_their_sources(run, site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('block = ["int8_ixformer"]\n[options.flash]\nsplits = 2\n')
    monkeypatch.setenv("ATTNPLUG_CONFIG", str(file))
    monkeypatch.setenv("ATTNPLUG_BACKEND", "flash,auto")
    monkeypatch.setenv("ATTNPLUG_OPT_TORCH__X", "1")

    done = run("doctor", "--json")

    rows = {row["name"]: (row["value"], row["source"]) for row in done.json["settings"]}
    assert rows == {
        "backend": (["flash", "auto"], "environment variable ATTNPLUG_BACKEND"),
        "allow": (None, "default"),
        "block": (["int8_ixformer"], f"file {file}"),
        "strict": (False, "default"),
        "profile": (None, "default"),
        "evidence": ([], "default"),
        "kv_layout": (None, "default"),
        "options.flash.splits": (2, f"file {file}"),
        "options.torch.x": ("1", "environment variable ATTNPLUG_OPT_TORCH__X"),
    }


def test_a_setting_without_effect_is_a_warning(run, site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_BAKEND", "flash")
    monkeypatch.setenv("ATTNPLUG_BLOCK", "flsh")

    done = run("doctor")

    assert done.code == 0
    assert done.err == ""
    text = " ".join(done.out.split())
    assert "'ATTNPLUG_BAKEND' is not a setting and has no effect; did you mean 'ATTNPLUG_BACKEND'?" in text
    assert "'flsh' in the setting block (environment variable ATTNPLUG_BLOCK) means no backend" in text


def test_a_setting_that_does_not_parse_is_a_problem_among_others(run, site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_STRICT", "maybe")
    site.add("alone", "api = 3")

    done = run("doctor", "--load", "--json")

    assert done.code == 1
    assert [problem["subject"] for problem in done.json["problems"]] == ["settings", "alone"]
    assert done.json["problems"][0]["fix"] == "set ATTNPLUG_STRICT=1 or ATTNPLUG_STRICT=0, or unset it"
    assert _loading(done)["flash/host"][0] == "not_loaded"


@pytest.mark.parametrize(
    ("variable", "value", "what", "fix"),
    [
        ("BACKEND", "flsh", "the backend 'flsh' was requested; did you mean 'flash'?", "correct the name"),
        ("BACKEND", "flsh,auto", "the backend 'flsh' was requested", "correct the name"),
        ("BACKEND", "flash/hst", "'flash' has the variants", "name one of them"),
        ("BACKEND", "flash/new", "flash/new: requires device type cuda; the device is cpu", "permit others"),
        ("BACKEND", "flash/old", "flash/old: requires device type cuda; the device is cpu", "flash/old,auto"),
        ("BACKEND", "flash/host+flsh", "the backend 'flsh' was requested; did you mean 'flash'?", "correct the name"),
        ("BACKEND", "flash/host+", "the pair 'flash/host+' was requested", "write 'flashmla+flash_attn'"),
        (
            "BACKEND",
            "flash/new+torch",
            "flash/new: requires device type cuda; the device is cpu",
            "flash/new+torch,auto",
        ),
        ("OPT_FLASH__SPLITZ", "1", "the option 'splitz' of 'flash'", "correct the name"),
        ("OPT_FLASH__SPLITS", "-1", "number of splits", "its default is 0"),
        ("OPT_FLASH__SPLITS", "many", "splits='many' was given by environment variable", "its default is 0"),
        ("OPT_FLSH__SPLITS", "1", "the backend 'flsh' was requested", "correct the name"),
    ],
)
def test_settings_on_which_every_selection_fails_are_problems(
    run, site, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, what: str, fix: str
) -> None:
    monkeypatch.setenv(f"ATTNPLUG_{variable}", value)

    done = run("doctor", "--json")

    assert done.code == 1
    assert len(done.json["problems"]) == 1
    problem = done.json["problems"][0]
    assert what in problem["what"]
    assert fix in problem["fix"]
    assert f"ATTNPLUG_{variable}" in problem["subject"] + problem["what"]


def test_every_wrong_setting_is_a_separate_problem(run, site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_BACKEND", "flsh,nothing")
    monkeypatch.setenv("ATTNPLUG_OPT_FLASH__A", "1")
    monkeypatch.setenv("ATTNPLUG_OPT_FLASH__B", "1")

    assert len(run("doctor", "--json").json["problems"]) == 4


def test_a_listed_backend_that_is_absent_is_a_problem(run, site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_BACKEND", "flash/new")
    fix = run("doctor", "--json").json["problems"][0]["fix"]
    assert fix.endswith("permit others: flash/new,auto")

    monkeypatch.setenv("ATTNPLUG_BACKEND", "flash/new,auto")
    assert run("doctor", "--json").json["problems"] == []
    monkeypatch.setenv("ATTNPLUG_BACKEND", "flash/new,flash/host")
    assert run("doctor", "--json").json["problems"] == []


def test_options_of_a_variant_are_a_problem(run, site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[options."flash/new"]\nsplits = 2\n')
    monkeypatch.setenv("ATTNPLUG_CONFIG", str(file))

    (problem,) = run("doctor", "--json").json["problems"]

    assert problem["what"].startswith("options for 'flash/new' were given")
    assert problem["fix"] == "give them to 'flash'"


def test_a_layout_that_no_ready_backend_has_is_a_problem(run, site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_KV_LAYOUT", "HND")
    assert run("doctor", "--json").json["problems"] == [], "the built-in backend has both"

    monkeypatch.setenv("ATTNPLUG_BACKEND", "flash")
    (problem,) = run("doctor", "--json").json["problems"]

    assert problem["subject"] == "environment variable ATTNPLUG_KV_LAYOUT"
    assert "kv_layout='HND'" in problem["what"]
    assert "flash/host" in problem["what"]
    assert "unset it" in problem["fix"]


@pytest.mark.parametrize("listed", ["FLASH", "flash/host+torch/sdpa", "torch+FLASH,auto"])
def test_settings_that_work_are_no_problems(run, site, monkeypatch: pytest.MonkeyPatch, listed: str) -> None:
    monkeypatch.setenv("ATTNPLUG_BACKEND", listed)
    monkeypatch.setenv("ATTNPLUG_OPT_FLASH__SPLITS", "3")

    assert run("doctor", "--json").json["problems"] == []


def test_odd_neighbours_are_notes(run, site) -> None:
    site.metadata("neighbour", "1.0", "[console_scripts]\nno equals sign\n")
    site.add("alone", _alone(api="1.9"))

    done = run("doctor")

    text = " ".join(done.out.split())
    assert done.code == 0
    assert "neighbour 1.0: its entry_points.txt has the line 'no equals sign'" in text
    assert "'alone' is written for contract 1.9" in text


def test_broken_plugins_are_problems_with_a_fix(run, site) -> None:
    malformed = site.add("alone", _alone(dtype="3"))
    site.add("future", _alone(api="2.0").replace("alone", "future"))
    site.add("flash", _alone().replace("alone", "flash"), distribution="rival")

    done = run("doctor", "--json")
    problems = {problem["subject"]: problem for problem in done.json["problems"]}

    assert done.code == 1
    assert problems.keys() == {"alone", "future", "flash"}
    assert f"{malformed}:5" in problems["alone"]["what"]
    assert "2.0" in problems["future"]["what"]
    assert "attnplug-flash" in problems["flash"]["fix"]
    assert all(problem["fix"] for problem in problems.values())


def test_what_is_blocked_on_purpose_is_no_problem(run, site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("alone", "api = 3")
    monkeypatch.setenv("ATTNPLUG_BLOCK", "alone")

    assert run("doctor", "--json").json["problems"] == []


def test_that_nothing_is_ready_is_a_problem(run, site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_ALLOW", "flash/new")

    done = run("doctor", "--json")

    assert done.code == 1
    assert done.json["problems"] == [
        {
            "subject": "selection",
            "what": "no backend is ready, so that nothing can be selected",
            "fix": "flash/new: pip install 'flash-new >=4'",
        }
    ]


@pytest.mark.parametrize("setting", ["ALLOW", "BACKEND"])
def test_what_pip_does_not_install_has_the_fix_of_the_manifest(
    run, empty, monkeypatch: pytest.MonkeyPatch, setting: str
) -> None:
    empty.add("flash", FROM_A_VENDOR)
    monkeypatch.setenv(f"ATTNPLUG_{setting}", "flash/new")
    monkeypatch.setattr(Device, "current", lambda: Device.cuda("9.0"))

    (problem,) = run("doctor", "--json").json["problems"]

    wanted = "flash/new: install flash-new >=4: from its vendor; pip install flash-tools"
    assert problem["fix"].partition("; or ")[0] == wanted


def test_that_everything_is_kept_out_is_a_problem(run, site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_ALLOW", "")

    assert "allow one" in run("doctor", "--json").json["problems"][0]["fix"]


def test_a_device_that_is_not_there_is_a_problem(run, site, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> DeviceReport:
        raise attnplug.errors.DeviceError("CUDA_VISIBLE_DEVICES='7' was set", "there is none", "unset it")

    monkeypatch.setattr(report, "report_device", absent)

    assert run("doctor", "--json").json["problems"] == [
        {"subject": "device", "what": "CUDA_VISIBLE_DEVICES='7' was set; there is none", "fix": "unset it"}
    ]


def test_an_overlooked_device_is_a_problem(run, site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        report, "report_device", lambda: DeviceReport(attnplug.Device.cpu(), "how", "a driver is here", "install it")
    )

    done = run("doctor")

    assert done.code == 1
    assert "problems\n    device: a driver is here\n      fix: install it\n\n1 problem\n" in done.out


def test_plain_text_says_what_is_missing(run, site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")

    done = run("doctor", "--all")

    assert done.out.startswith("environment\n    attnplug ")
    assert "    backend = automatic  (default)\n    allow = all  (default)\n    block = none  (default)\n" in done.out
    wrong = "for other devices (details: attnplug list --all): flash/old, flash/new"
    assert f"    {wrong}" in done.out
    monkeypatch.setattr(Device, "current", lambda: Device.cuda("9.0"))
    missing = "flash/new  missing dependency  (attnplug-flash 1.0): flash-new >=4 is required and not installed"
    assert f"    {missing}\n" in run("doctor").out
    assert done.out.endswith("\nnothing is broken\n")
    assert "loading" not in done.out


def test_what_is_as_expected_is_summed_up(run, site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "current", Device.cpu)

    plain, whole = run("doctor").out, run("doctor", "--all").out

    assert "settings\n" not in plain
    assert "flash/host  ready" in plain
    assert (
        "as expected (details: attnplug doctor --all)\n    all settings have their defaults\n    3 candidates" in plain
    )
    assert "as expected" not in whole
    assert "settings\n    backend = automatic  (default)\n" in whole

    monkeypatch.setenv("ATTNPLUG_BACKEND", "flash,auto")
    plain = run("doctor").out
    assert "settings\n    backend = flash, auto  (environment variable ATTNPLUG_BACKEND)\n\n" in plain
    assert "the other settings have their defaults" in plain


def test_loading_imports_each_ready_plugin(run, site) -> None:
    site.add("alone", _alone())

    done = run("doctor", "--load", "--json")

    results = _loading(done)
    assert done.code == 0
    assert results["flash/host"][0] == results["alone/default"][0] == "loaded"
    assert results["flash/old"][0] == "not_loaded"
    assert "cuda" in results["flash/old"][1]
    assert "flash/new" not in results
    assert "this plugin talks while it is imported" in done.err


def test_a_probe_that_refuses_is_a_problem(run, site) -> None:
    probe = "Reason('probe', 'alone', None, 'no compiler', 'install one')"
    site.add("alone", _alone(), probe=probe)

    done = run("doctor", "--load")

    assert done.code == 1
    assert "alone/default  failed" in done.out
    problems = " ".join(done.out.rpartition("problems\n")[2].split())
    assert problems.endswith("dtype=float32 paged=False on cpu: no compiler fix: install one 1 problem")


def test_a_candidate_is_loaded_for_what_it_can_serve(run, site) -> None:
    needs_more = '[[rules]]\nwhen = { return_lse = false }\nbecause = "it always writes one"\n'
    site.add("alone", _alone(more=f'features = ["return_lse"]\n{needs_more}'))

    assert _loading(run("doctor", "--load", "--json"))["alone/default"][0] == "loaded"


def test_what_serves_no_simple_request_is_not_loaded(run, site) -> None:
    site.add("alone", _alone(more='num_q_heads = 8\nnum_kv_heads = 3\nfeatures = ["return_lse"]'))

    status, text = _loading(run("doctor", "--load", "--json"))["alone/default"]

    assert status == "not_loaded"
    assert "num_q_heads=8 and num_kv_heads=3" in text


def test_that_torch_is_missing_is_a_problem_and_no_crash(run, site, monkeypatch: pytest.MonkeyPatch) -> None:
    def without_torch(_: object) -> None:
        raise ModuleNotFoundError("No module named 'torch'")

    monkeypatch.setattr(attnplug.Selection, "load", without_torch)

    done = run("doctor", "--load", "--json")

    problem = next(problem for problem in done.json["problems"] if problem["subject"] == "flash/host")
    assert done.code == 1
    assert problem["what"] == "No module named 'torch'"
    assert problem["fix"] == "pip install 'attnplug[torch]'"


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"\xff",
        b"[[measured]",
        b"other = 1",
        b"[[measured]]\nmicroseconds = 3",
        b"[[measured]]\nmicroseconds = { a = -1 }",
        b"[[measured]]\nwhen = { nothing_like_it = 1 }\nmicroseconds = { a = 1 }",
        "folder",
    ],
)
def test_commands_agree_about_a_wrong_profile(
    run, site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | str | None
) -> None:
    profile = tmp_path / "profile.toml"
    if isinstance(content, bytes):
        profile.write_bytes(content)
    elif content:
        profile.mkdir()
    monkeypatch.setenv("ATTNPLUG_PROFILE", str(profile))

    explained, examined, listed = run("explain", *LAYER, "--json"), run("doctor", "--json"), run("list", "--json")

    assert (explained.code, examined.code, listed.code) == (2, 1, 0)
    error, (problem,) = explained.json["error"], examined.json["problems"]
    assert str(profile) in error["problem"]
    assert problem["what"] == "; ".join(filter(None, (error["problem"], error["expected"])))
    assert problem["fix"] == error["fix"]
    assert problem["subject"] == "environment variable ATTNPLUG_PROFILE"
    (note,) = [note for note in listed.json["notes"] if note["stage"] == "settings"]
    assert note["subject"] == problem["subject"]
    assert note["message"] == f"{problem['what']}; fix: {problem['fix']}"


def test_a_sound_profile_is_no_problem(run, site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = tmp_path / "profile.toml"
    profile.write_text("[[measured]]\nmicroseconds = { 'flash/old' = 1 }\n")
    monkeypatch.setenv("ATTNPLUG_PROFILE", str(profile))

    assert run("doctor", "--json").json["problems"] == []
    assert run("explain", *LAYER, "--json").code == 0


def test_times_of_another_device_are_a_note(run, site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Requirements(head_size=64, num_q_heads=8, num_kv_heads=8, dtype="float32")
    lens = {"num_seqs": 4, "kv_len": 64, "query_len": 1}
    times = {"flash/old": MeasuredTime(1.0)}
    made = ProfileEntry("2026-11-28", Device.cuda("8.9"), {}, layer, "decode", **lens, default="flash/old", times=times)
    (tmp_path / "profile.json").write_text(dump_entries([made]))
    monkeypatch.setenv("ATTNPLUG_PROFILE", str(tmp_path / "profile.json"))

    found = run("doctor", "--json").json

    (note,) = [note for note in found["notes"] if note["stage"] == "profile"]
    assert found["problems"] == []
    assert note["subject"] == "environment variable ATTNPLUG_PROFILE"
    assert note["message"].startswith("1 entry of the profile is not used: measured on cuda:8.9; this is ")


def test_a_configuration_folder_out_of_reach_stops_no_command(
    run, site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "file"
    place.touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(place))

    listed, examined = run("list", "--json"), run("doctor", "--json")

    assert run("explain", *LAYER).code == 0
    assert (listed.code, examined.code) == (0, 0)
    for done in (listed, examined):
        (note,) = [note for note in done.json["notes"] if note["stage"] == "settings"]
        assert note["subject"] == str(place / "attnplug" / "config.toml")


def test_a_listed_backend_that_is_missing_is_a_problem(run, site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_BACKEND", "flash/new")
    monkeypatch.setattr(Device, "current", lambda: Device.cuda("9.0"))

    done = run("doctor", "--json")

    (problem,) = done.json["problems"]
    assert done.code == 1
    assert "flash-new >=4 is required and not installed" in problem["what"]
    assert "pip install 'flash-new >=4'" in problem["fix"]


@pytest.mark.parametrize(("listed", "why"), [("flash/old,torch", "the device is cpu"), ("flash/new,auto", "flash/new")])
def test_a_listed_backend_that_is_passed_over_is_a_warning(run, site, monkeypatch, listed: str, why: str) -> None:
    monkeypatch.setenv("ATTNPLUG_BACKEND", listed)

    done = run("doctor", "--json")

    (warning,) = done.json["warnings"]
    assert done.code == 0
    assert f"{listed.partition(',')[0]!r} in environment variable ATTNPLUG_BACKEND is passed over: " in warning
    assert why in warning
