"""``attnplug explain``."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

import attnplug
from attnplug.cli.device_report import DeviceReport
from attnplug.cli.explain import request as options
from attnplug.cli.parser import Parser
from attnplug.errors import DeviceError
from attnplug.request.fields import fields_of

if TYPE_CHECKING:
    from pathlib import Path

LAYER = {"head_size": 64, "num_q_heads": 64, "num_kv_heads": 8, "dtype": "bfloat16"}
OPTIONS = ["--head-size", "64", "--num-q-heads", "64", "--num-kv-heads", "8", "--dtype", "bfloat16"]
HOPPER = ["--device", "cuda:9.0"]


def _statuses(explanation: dict[str, Any]) -> dict[str, str]:
    return {verdict["id"]: verdict["status"] for verdict in explanation["verdicts"]}


def test_it_prints_what_explain_returns(run, site) -> None:
    done = run("explain", *OPTIONS, "--sinks", *HOPPER, "--json")

    expected = attnplug.explain(attnplug.Requirements(**LAYER, sinks=True), attnplug.Device.cuda("9.0"))
    assert done.json == {
        "schema_version": 1,
        "explanations": [{"layers": [], **json.loads(json.dumps(expected.to_dict()))}],
        "plans": [],
    }
    assert done.code == 0


def test_all_of_it_is_what_an_explanation_prints(run, site) -> None:
    done = run("explain", *OPTIONS, *HOPPER, "--all")

    printed = str(attnplug.explain(attnplug.Requirements(**LAYER), attnplug.Device.cuda("9.0")))
    readable = [line.replace("missing_dependency", "missing dependency") for line in printed.splitlines()]
    differing = [line for line in done.out.splitlines() if line not in readable]
    assert "chosen: flash/old (the only one besides the built-in)" in readable
    assert len(done.out.splitlines()) == len(readable) + 1
    assert all(line.lstrip().startswith(("fix: ", "then ")) for line in differing)  # options in place of Python


def test_a_supposed_library_makes_its_candidate_eligible(run, site) -> None:
    plain = run("explain", *OPTIONS, *HOPPER, "--json").json["explanations"][0]
    supposed = run("explain", *OPTIONS, *HOPPER, "--json", "--assume-installed").json["explanations"][0]

    assert _statuses(plain)["flash/new"] == "missing_dependency"
    assert _statuses(supposed)["flash/new"] in ("chosen", "eligible")
    assert supposed["assumed_installed"] is True


def test_devices_are_shown_side_by_side(run, site) -> None:
    devices = ["--device", "cuda:8.0", "--device", "cuda:9.0", "--device", "cuda:10.0", "--device", "cuda:9.0"]

    done = run("explain", *OPTIONS, "--backend", "flash", *devices, "--assume-installed", "--matrix")
    both = run("explain", *OPTIONS, "--backend", "flash", *devices, "--assume-installed")

    head, *rows = (line.split("  ") for line in done.out.split("\n\n")[0].splitlines())
    found = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in rows}
    assert [cell.strip() for cell in head if cell.strip()] == ["candidate", "cuda:8.0", "cuda:9.0", "cuda:10.0"]
    assert found["flash/old"] == ["chosen?", "eligible?", "no: device"]
    assert found["flash/new"] == ["no: device", "chosen?", "chosen?"]
    assert both.out.endswith(done.out)
    assert f"\n{both.out}".count("\ndevice: cuda:") == 3
    assert done.code == 0


def test_what_is_late_is_left_to_bind(run, site) -> None:
    options = ["--head-size", "64", "--dtype", "bfloat16", "--late", "num_q_heads,num_kv_heads", "--late", "block_size"]

    done = run("explain", *options, *HOPPER, "--backend", "flash/old")

    assert "left for the engine to set: block_size (" in done.out
    assert "num_q_heads, num_kv_heads" in done.out
    assert done.code == 0


def test_one_device_that_cannot_serve_is_exit_code_1(run, site) -> None:
    done = run("explain", *OPTIONS, "--backend", "flash/old", *HOPPER, "--device", "cpu", "--json")

    assert done.code == 1
    assert [found["chosen"] for found in done.json["explanations"]] == ["flash/old", None]


def test_backends_are_tried_in_the_given_order(run, site) -> None:
    listed = ["--backend", "flash/new", "--backend", "torch", "--backend", "auto"]

    explanation = run("explain", *OPTIONS, *HOPPER, *listed, "--json").json["explanations"][0]

    assert explanation["chosen"].startswith("torch/")
    assert _statuses(explanation)["flash/old"] == "eligible"
    assert explanation["provenance"]["backend"] == "the call"


def test_a_pair_is_shown_with_both_candidates(run, site) -> None:
    words = [*OPTIONS, "--paged", *HOPPER, "--backend", "flash/old+torch/sdpa"]
    routed = "routed: pure decodes to flash/old, all other batches to torch/sdpa"

    explanation = run("explain", *words, "--json").json["explanations"][0]
    statuses = {id_: status for id_, status in _statuses(explanation).items() if status == "chosen"}
    assert statuses == dict.fromkeys(["flash/old+torch/sdpa", "flash/old", "torch/sdpa"], "chosen")
    short = run("explain", *words)
    assert (short.code, short.out.count(routed)) == (0, 1)
    rest = short.out.partition("not chosen:")[2]
    assert "flash/old" not in rest
    assert "torch/sdpa" not in rest
    for option in ("--all", "--matrix"):
        assert "flash/old+torch/sdpa" in run("explain", *words, option).out

    wrong = run("explain", *words, "--batch-invariant")
    assert wrong.code == 1
    assert "flash/old+torch/sdpa" in wrong.out.partition("not chosen:")[2]


def test_options_of_a_plugin_are_part_of_the_agreement(run, site) -> None:
    done = run("explain", *OPTIONS, *HOPPER, "--option", "flash.splits=3", "--json")

    agreement = done.json["explanations"][0]["verdicts"][0]["agreement"]
    assert agreement["options"] == {"splits": 3}


@pytest.mark.parametrize(
    ("option", "given"),
    [
        ("flash.splits", "--option 'flash.splits' was given"),
        ("splits=3", "--option 'splits=3' was given"),
        ("flash.splits=-1", "splits='-1' was given"),
        ("flash.split=3", "the option 'split' of 'flash' was given by the call; did you mean 'splits'?"),
        ("nothing.splits=3", "the backend 'nothing' was requested"),
    ],
)
def test_a_wrong_option_is_a_wrong_request(run, site, option: str, given: str) -> None:
    done = run("explain", *OPTIONS, *HOPPER, "--option", option)

    assert done.code == 2
    assert given in done.err


def test_requirements_come_as_json_or_from_a_file_and_options_win(run, empty, tmp_path: Path) -> None:
    file = tmp_path / "layer.json"
    file.write_text(json.dumps({**LAYER, "sinks": True}))

    written = run("explain", "--requirements", json.dumps(LAYER), "--json").json["explanations"][0]
    read = run("explain", "--requirements", f"@{file}", "--no-sinks", "--head-size", "96", "--json").json

    assert written["requirements"] == LAYER
    assert read["explanations"][0]["requirements"] == {**LAYER, "head_size": 96}


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ([], "no requirements were given"),
        (["--requirements", "{"], "'{' is not JSON"),
        (["--requirements", "[" * 100_000], "is not JSON"),
        (["--requirements", "[1]"], "'[1]' was given"),
        (["--requirements", "@/nowhere/layer.json"], "'@/nowhere/layer.json' does not open"),
        (["--requirements", '{"head_sizes": 64}'], "'head_sizes' was given; did you mean 'head_size'?"),
        (["--requirements", "{}", "--config", "x"], "--requirements and --config were given"),
        ([*OPTIONS, "--assume", "llama"], "--assume was given without --config"),
        ([*OPTIONS, "--partial"], "--partial was given without --config"),
        (["--config", "x", "--sinks"], "--sinks and --config were given"),
        (["--config", "/nowhere/config.json"], "'/nowhere/config.json' was given as the configuration"),
        ([*OPTIONS, "--device", "gpu:x"], "the device 'gpu:x' was given"),
        ([*OPTIONS, "--block-sparse", "[" * 100_000], "is not a table of names"),
        ([*OPTIONS, "--block-sparse", "3,"], "'3,' is not a table of names"),
        ([*OPTIONS, "--kv-layout", "NDH"], "kv_layout='NDH' was given"),
    ],
)
def test_a_wrong_request_is_refused(run, words: list[str], given: str) -> None:
    done = run("explain", *words)

    assert (done.code, done.out) == (2, "")
    assert given in done.err


def _parsed(*words: str) -> dict[str, Any]:
    parser = Parser("test", "")
    options.add_field_options(parser)
    return options.given_fields(parser.parse_args(words))


SAMPLES = {
    "Integer": ("7", 7),
    "Level": ("word", "word"),
    "Name": ("word", "word"),
    "Names": ("acme.x", ["acme.x"]),
    "Number": ("30", 30.0),
    "Table": ('{"local_blocks": 16}', {"local_blocks": 16}),
}


def test_every_field_is_an_option() -> None:
    assert _parsed() == {}
    for item in fields_of("model", "engine", "selection"):
        option, kind = options.option_of(item.name), type(item.domain).__name__
        if kind == "Flag":
            assert _parsed(option) == {item.name: True}
            assert _parsed(option.replace("--", "--no-", 1)) == {item.name: False}
        else:
            text, value = SAMPLES[kind]
            assert _parsed(option, text) == {item.name: value}


def test_names_add_up() -> None:
    assert _parsed("--feature", "acme.x", "--features", "acme.y,acme.z") == {"features": ["acme.x", "acme.y", "acme.z"]}


def test_torch_is_not_imported(start, site) -> None:
    code = (
        "import sys; from attnplug.cli.main import main;"
        f"code = main(['explain', *{OPTIONS}, '--device', 'cuda:8.0', '--device', 'cuda:10.0', '--assume-installed']);"
        "sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'transformers', 'rich')) or code)"
    )

    done = start("-c", code)

    assert done.code == 0, done.out
    assert "flash/new   no: device  chosen?" in done.out


def test_a_device_that_may_have_been_overlooked_is_reported(run, empty, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "attnplug.cli.explain.report_device",
        lambda: DeviceReport(attnplug.Device.cpu(), "", "there may be another", "name it"),
    )

    assert run("explain", *OPTIONS).err == (
        "attnplug: warning: the device is cpu, though there may be another\n  fix: name it\n"
    )
    assert run("explain", *OPTIONS, *HOPPER).err == ""


@pytest.mark.parametrize("name", ["h100", "sm90", "cuda:9.0"])
def test_a_device_has_several_names(run, site, name: str) -> None:
    found = run("explain", *OPTIONS, "--device", name, "--json").json["explanations"][0]

    assert found["device"]["compute_capability"] == "9.0"
    assert found["chosen"] == "flash/old"


def test_an_unknown_device_is_a_wrong_request(run, site) -> None:
    done = run("explain", *OPTIONS, "--device", "h1000")

    assert (done.code, done.out) == (2, "")
    assert "the device 'h1000' was given; did you mean h100" in done.err
    assert attnplug.explain(attnplug.Requirements(**LAYER), "h100").chosen is not None
    with pytest.raises(DeviceError, match="did you mean h100"):
        attnplug.explain(attnplug.Requirements(**LAYER), "h1000")


def test_a_declared_device_type_is_a_device(run, empty) -> None:
    manifest = 'api = "1.0"\nbackend = { name = "acme", summary = "of Acme" }\n[supports]\ndevice_type = "acmecore"\n'
    empty.add(
        "acme", f'{manifest}dtype = "bfloat16"\nhead_size = 64\nfeatures = ["paged"]\nblock_size = 16\n[variants.one]\n'
    )

    done = run("explain", *OPTIONS, "--device", "acmecore", "--json")

    assert done.json["explanations"][0]["chosen"] == "acme/one", done.out
    assert "did you mean acmecore?" in run("explain", *OPTIONS, "--device", "acmecor").err
