"""The program as a whole: commands, errors in three lines, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import attnplug
from attnplug.cli import BUILT_IN, overview
from attnplug.cli import list as listing
from attnplug.cli.command import installed_commands
from attnplug.cli.device_report import DeviceReport
from attnplug.request.device import Device
from tests.command import FLASH

BUILT_IN_BACKEND = overview._Backend("torch", "", True, "ready", ("sdpa",), "")
ONE_LAYER = ["--head-size", "64", "--num-q-heads", "8", "--num-kv-heads", "8", "--dtype", "bfloat16"]


def test_help_lists_every_command_and_the_exit_codes(run) -> None:
    done = run("--help")

    assert done.code == 0
    assert all(f"  {command} " in done.out and summary in done.out for command, summary in BUILT_IN.items())
    assert "exit codes:" in done.out


@pytest.mark.parametrize("command", BUILT_IN)
def test_every_command_has_help_and_json(run, command: str) -> None:
    done = run(command, "--help")

    assert done.code == 0
    assert done.out.startswith(f"usage: attnplug {command}")
    assert "--json" in done.out


def test_the_version_is_the_core_s(run) -> None:
    assert run("--version").out == f"attnplug {attnplug.__version__}\n"


def _next(done) -> list[str]:
    return [each["command"] for each in done.json["next"]]


def test_without_a_command_what_is_installed_and_what_is_next_is_shown(run, site, monkeypatch) -> None:
    monkeypatch.setattr("attnplug.cli.overview.report_device", lambda: DeviceReport(Device.cpu(), "how"))

    lines = run().out.splitlines()

    assert lines[0].startswith(f"attnplug {attnplug.__version__} ")
    assert "device: cpu" in lines
    assert "  flash  can run: host  (attnplug-flash 1.0)" in lines
    assert "  torch  can run: sdpa  (built in)" in lines
    assert sum(line.startswith("  attnplug ") for line in lines) == 3
    assert run("--json").json["backends"][0] == {
        "name": "flash",
        "distribution": "attnplug-flash 1.0",
        "built_in": False,
        "status": "ready",
        "variants": ["host"],
        "install": "",
    }


def test_what_is_next_follows_from_what_is_installed(run, empty, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("attnplug.cli.overview.report_device", lambda: DeviceReport(Device.cuda("9.0"), "how"))
    assert _next(run("--json"))[0] == "attnplug list", "no plugin"

    empty.add("flash", FLASH)
    install, explain, doctor = _next(run("--json"))
    assert (install, doctor) == ("pip install 'flash-old >=2.7'", "attnplug doctor"), "a plugin without its libraries"
    assert explain == "attnplug explain --config path/to/config.json --assume-installed"
    assert "  flash  needs a library: pip install 'flash-old >=2.7'" in run().out

    empty.metadata("flash-old", "2.8")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert _next(run("--json")) == ["attnplug explain", "attnplug plan config.json", "attnplug doctor --load"]

    empty.add("alone", "api = 3")
    assert _next(run("--json"))[0] == "attnplug doctor", "a plugin is broken"
    assert "  alone  broken: attnplug list alone" in run().out


@pytest.mark.parametrize(("elsewhere", "second"), [(True, "attnplug explain --config"), (False, "attnplug plan")])
def test_plugins_for_gpus_are_asked_for_one_where_there_is_none(elsewhere, second, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    found = [overview._Backend("flash", "f 1.0", False, "other_device", (), ""), BUILT_IN_BACKEND]

    commands = [command for command, _ in overview._next(found, elsewhere=elsewhere)]

    assert commands[1].startswith(second)
    assert ("--device l40s" in commands[1]) == elsewhere


def test_options_without_a_command_are_those_of_the_program(run) -> None:
    assert run("--version", "--json").json == {"schema_version": 1, "version": attnplug.__version__}
    assert run("--json", "list").code == 2


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["lst"], "the command 'lst' was given; did you mean 'list'?"),
        (["--verison"], "'--verison' is not an option; did you mean '--version'?"),
        (["list", "--jsn"], "'--jsn' is not an option; did you mean '--json'?"),
        (["doctor", "flash"], "'flash' is not an option"),
        (["explain", "--head-size", "many"], "'many' is not a whole number from 1 to 2147483647"),
        (["explain", "--head-size"], "expected one argument"),
        (["explain", "--head", "64"], "'--head' is not an option; did you mean '--head-size'?"),
    ],
)
def test_a_wrong_command_line_is_refused_in_three_lines(run, words: list[str], given: str) -> None:
    done = run(*words)

    assert (done.code, done.out) == (2, "")
    first, allowed, fix = done.err.splitlines()
    assert given in first
    assert allowed.startswith("  expected: ")
    assert fix.startswith("  fix: ")


def test_impossible_requirements_are_a_wrong_request(run) -> None:
    done = run("explain", *ONE_LAYER, "--num-kv-heads", "3")

    assert done.code == 2
    assert "num_q_heads=8 and num_kv_heads=3 were given" in done.err


def test_an_unknown_backend_is_a_wrong_request(run, site) -> None:
    done = run("explain", *ONE_LAYER, "--backend", "flsh")

    assert done.code == 2
    assert "'flsh' was requested; did you mean 'flash'?" in done.err


def test_what_is_installed_may_be_the_mistake(run, site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.add("flash", "", distribution="other")
    monkeypatch.setenv("ATTNPLUG_STRICT", "1")

    assert run("list").code == 1


def test_a_setting_that_does_not_parse_is_a_wrong_request(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTNPLUG_STRICT", "maybe")

    done = run("list")

    assert done.code == 2
    assert done.err.startswith("attnplug: ATTNPLUG_STRICT='maybe' is set\n  expected: ")


@pytest.mark.parametrize("words", [["lst", "--json"], ["explain", "--json", "--head-size", "0"]])
def test_an_error_is_json_too_where_json_was_requested(run, words: list[str]) -> None:
    done = run(*words)

    assert done.code == 2
    error = done.json["error"]
    assert error["type"] in ("RequestError", "RequirementsError")
    assert f"{error['problem']}\n  expected: {error['expected']}\n  fix: {error['fix']}\n" in done.err


def test_the_place_of_a_malformed_manifest_is_reported(run, site, monkeypatch: pytest.MonkeyPatch) -> None:
    path = site.add("broken", 'api = "1.0"\nbackend = 3\n')
    monkeypatch.setenv("ATTNPLUG_STRICT", "1")

    done = run("list", "--json")

    assert done.json["error"]["path"] == str(path)
    assert done.json["error"]["line"] == 2


def test_the_strict_setting_shows_where_an_error_comes_from(run, monkeypatch: pytest.MonkeyPatch) -> None:
    quiet = run("explain", "--head-size", "0")
    monkeypatch.setenv("ATTNPLUG_STRICT", "1")
    loud = run("explain", "--head-size", "0")

    assert quiet.code == loud.code == 2
    assert "Traceback" not in quiet.err
    assert "Traceback" in loud.err
    assert quiet.err.removeprefix("attnplug: ") in loud.err


def test_an_interrupt_ends_quietly(run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(listing, "run", interrupted)

    done = run("list")

    assert (done.code, done.out, done.err) == (130, "", "")


def test_a_reader_that_goes_away_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    process = subprocess.run([sys.executable, "-m", "attnplug", "list"], stdout=writing, stderr=-1, check=False)
    os.close(writing)

    assert process.returncode == 141
    assert process.stderr == b""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")  # noqa: PTH110 - a device
@pytest.mark.parametrize("words", [["list"], ["list", "--json"], ["doctor"]])
def test_an_output_that_takes_nothing_is_named(words: list[str]) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:  # noqa: PTH123 - likewise
        process = subprocess.run([sys.executable, "-m", "attnplug", *words], stdout=full, stderr=-1, check=False)

    assert process.returncode == 1
    assert process.stderr == b"attnplug: the output cannot be written: No space left on device\n"


def test_the_package_is_the_command_too(start, site) -> None:
    done = start("-m", "attnplug", "list")

    assert (done.code, done.err) == (0, "")
    assert "flash/host  ready" in done.out
    assert start("-m", "attnplug", "nosuch").code == 2


def test_an_output_of_few_letters_gets_escapes(start, site) -> None:
    site.add("wide", FEW.replace("SUMMARY", "fast \N{GREEK SMALL LETTER MU}s"))

    done = start("-X", "utf8=0", "-m", "attnplug", "list", PYTHONIOENCODING="ascii", LC_ALL="C")

    assert done.code == 0, done.err
    assert r"fast \u03bcs" in done.out


FEW = """\
api = "1.0"
backend = { name = "wide", summary = "SUMMARY" }
[supports]
device_type = "cpu"
dtype = "float32"
head_size = { min = 1 }
"""


@pytest.mark.parametrize("command", [*BUILT_IN, "help"])
def test_help_of_a_command_is_that_of_its_option(run, command: str) -> None:
    found = run("help", command)

    assert (found.code, found.err) == (0, "")
    assert found.out == run(*(() if command == "help" else (command,)), "--help").out
    assert run("help").out == run("--help").out


def test_help_of_an_unknown_command_is_refused(run) -> None:
    assert "the command 'lst' was given; did you mean 'list'?" in run("help", "lst").err
    assert run("help", "list", "explain").code == 2


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_help_fits_the_terminal(run, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    names = [*BUILT_IN, *installed_commands()]

    for words in (["--help"], *([name, "--help"] for name in names)):
        lines = run(*words).out.splitlines()
        long = [line for line in lines if len(line) > columns and " | " not in line]
        assert not long, long


@pytest.mark.parametrize(
    "words",
    [["lst"], ["list", "--jsn"], ["explain"], ["explain", *ONE_LAYER, "--device", "h1000"], ["help", "lst"]],
)
def test_every_error_begins_alike(run, words: list[str]) -> None:
    done = run(*words)

    assert done.code == 2
    assert done.err.startswith("attnplug: ")
    assert not done.err.startswith("attnplug: attnplug")


def test_a_warning_that_is_logged_begins_alike(start, site, tmp_path) -> None:
    (tmp_path / "config.toml").write_text("block = 'nobody'")

    done = start("-m", "attnplug", "list", ATTNPLUG_CONFIG=str(tmp_path / "config.toml"))

    assert done.err.startswith("attnplug: warning: ")


@pytest.mark.parametrize(
    "words", [["list"], ["doctor"], ["options"], ["explain", *ONE_LAYER], ["lst"], ["explain", "--head-size", "0"]]
)
def test_every_json_document_has_its_version_first(run, site, words: list[str]) -> None:
    document = run(*words, "--json").json

    assert next(iter(document.items())) == ("schema_version", 1)
