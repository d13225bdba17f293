"""``attnplug explain`` fits a screen: at most 25 lines for a device, of the terminal's width, whatever is installed."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

import pytest

import attnplug
from attnplug.cli.explain.matrix import matrix_lines
from attnplug.cli.explain.result import explain_layers
from attnplug.cli.explain.short import MOST_LINES, short_lines
from attnplug.models import describe_model
from attnplug.request.device import Device
from attnplug.request.requirements import Requirements

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from attnplug.cli.explain.short import Line

SIZES = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "dtype": "bfloat16"}
MODELS = {
    "llama": {**SIZES, "model_type": "llama", "num_hidden_layers": 32},
    "mistral": {**SIZES, "model_type": "mistral", "num_hidden_layers": 32, "sliding_window": 4096},
    "gpt_oss": {**SIZES, "model_type": "gpt_oss", "num_hidden_layers": 24, "head_dim": 64, "sliding_window": 128},
    "gemma2": {
        **SIZES,
        "model_type": "gemma2",
        "num_hidden_layers": 26,
        "head_dim": 256,
        "sliding_window": 4096,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "hidden_activation": "gelu",
    },
    "kimi_linear": {"model_type": "kimi_linear", "dtype": "bfloat16"},
}
LAYERS = {
    name: {
        f"layers.{i}.attn": Requirements(
            head_size=64 + 8 * (i % groups), num_q_heads=32, num_kv_heads=8, dtype="bfloat16", paged=True
        )
        for i in range(groups)
    }
    for name, groups in (("six groups", 6), ("twenty groups", 20))
}
DEVICES = ("cpu", "cuda:7.0", "a100", "h100", "b200", "rtx5090", "mi300x", "xpu")
WIDTHS = (60, 80, 100, 120, 200)
ONE = ["--head-size", "64", "--num-q-heads", "8", "--num-kv-heads", "8", "--dtype", "bfloat16"]
VARIANT = """
[variants.of_hardware_number_{0}]
summary = "variant {0}"
requires = ["library-{0} >=1.{0},<2", "another-library-of-a-vendor"]
[variants.of_hardware_number_{0}.supports]
compute_capability = ["{1}.0"]
"""
MANY = """\
api = "1.0"
backend = { name = "many", summary = "as many variants as nobody has" }
[supports]
device_type = "cuda"
dtype = ["bfloat16", "float16"]
head_size = { multiple_of = 8, max = 256 }
features = ["paged", "sliding_window"]
block_size = 16
""" + "".join(VARIANT.format(i, (8, 9, 10)[i % 3]) for i in range(40))


def _text(line: Line) -> str:
    return "".join(part if isinstance(part, str) else part[0] for part in line)


def _layers(name: str) -> dict[str, Mapping[str, Requirements]]:
    if name in LAYERS:
        return {"layers": LAYERS[name]}
    model = describe_model(MODELS[name])
    return {"layers": model.requirements, "prefills": model.uncompressed}


def _check(lines: Sequence[Line], columns: int) -> None:
    texts = list(map(_text, lines))
    assert len(texts) <= MOST_LINES, "\n".join(texts)
    assert max(map(len, texts)) <= columns, "\n".join(texts)


@pytest.mark.parametrize("name", [*MODELS, *LAYERS])
@pytest.mark.parametrize("plugins", ["none", "flash", "many"])
def test_a_device_has_25_lines_that_fit(empty, request, monkeypatch, name, plugins) -> None:
    if plugins != "none":
        request.getfixturevalue("site")
    if plugins == "many":
        empty.add("many", MANY)
    attnplug.refresh()
    requested = _layers(name)
    devices = DEVICES if name in MODELS else DEVICES[2:4]
    results = [
        explain_layers(device=Device.parse(device), assume_installed=assumed, **requested)
        for device in devices
        for assumed in (False, True)
    ]

    for result in results:
        for columns in WIDTHS:
            monkeypatch.setenv("COLUMNS", str(columns))
            lines = short_lines(result, Device.cpu())
            _check(lines, columns)
            _check(short_lines(result, Device.cpu(), matrix=True), columns)
            assert max(len(_text(line)) for line in matrix_lines([result])) <= columns
            chosen = {group.explanation.chosen.id for group in result.groups[:3] if group.explanation.chosen}
            assert all(any(id_ in _text(line) for line in lines) for id_ in chosen)


@pytest.mark.parametrize("listed", [["torch/flex"], ["flash/new"], ["flash", "torch"], ["flash/old", "auto"]])
@pytest.mark.parametrize("field", [{}, {"kv_cache_dtype": "int8"}, {"block_size": 3}, {"alibi": "linear"}])
def test_what_is_listed_or_not_served_fits_too(site, monkeypatch, listed, field) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    attnplug.refresh()
    one = Requirements(head_size=64, num_q_heads=8, num_kv_heads=8, dtype="bfloat16", **field)

    for device in map(Device.parse, DEVICES):
        _check(short_lines(explain_layers({"": one}, device, assume_installed=False, backend=listed), device), 80)


def test_every_refused_candidate_has_its_line(run, site) -> None:
    done = run("explain", *ONE, "--sinks", "--device", "h100")

    explanation = attnplug.explain(
        Requirements(head_size=64, num_q_heads=8, num_kv_heads=8, dtype="bfloat16", sinks=True), "h100"
    )
    shown = {explanation.chosen.id, *([explanation.runner_up.id] if explanation.runner_up else [])}
    rows = [line.split(maxsplit=1) for line in done.out.partition("not chosen:\n")[2].partition("\n\n")[0].splitlines()]
    installed = {verdict.id for verdict in explanation.verdicts if verdict.status != "absent"}
    assert {row[0] for row in rows} == installed - shown
    assert dict(rows)["flash/host"] == "requires device type cpu; the device is cuda (and 2 more)"
    assert dict(rows)["flash/new"] == "missing: pip install 'flash-new >=4'"


@pytest.mark.parametrize("columns", [60, 100, 160])
def test_what_is_not_installed_was_not_considered(run, site, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """A command is there as a whole, or not at all."""
    monkeypatch.setenv("COLUMNS", str(columns))

    lines = run("explain", *ONE, "--device", "cpu").out.splitlines()

    start = next(index for index, line in enumerate(lines) if line.startswith("not considered, not installed: block"))
    plugins = " ".join(
        f"./plugins/{name}"
        for name in ("blocksparse", "flash_attn", "flashinfer", "flashmla", "int8_ixformer", "triton")
    )
    assert (lines[start + 1] == f"  pip install --no-deps {plugins}") == (columns > 100)
    assert columns > 100 or "--no-deps" not in "".join(lines)


def test_a_choice_that_supposes_libraries_says_what_to_install(run, site) -> None:
    found = run("explain", *ONE, "--device", "h100", "--assume-installed").out

    assert "\n  needs: pip install 'flash-new >=4'\n  flash/old could serve too, with nothing to install\n" in found
    assert "needs:" not in run("explain", *ONE, "--device", "cpu").out


def test_a_configuration_needs_no_option(run, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODELS["llama"]))

    assert run("explain", str(path)).out == run("explain", "--config", str(path)).out
    twice = run("explain", str(path), "--config", str(path))
    assert (twice.code, "one model is explained" in twice.err) == (2, True)


def test_the_command_line_names_options(run, site) -> None:
    done = run("explain", "--head-size", "64", "--dtype", "bfloat16")

    assert "on the command line --num-q-heads" in done.err
    assert "--late NAME, --late NAME" not in run("explain", "--help").out


def test_the_runner_up_is_named_with_why_it_lost(run, site) -> None:
    done = run("explain", *ONE, "--device", "h100")

    assert "chosen: flash/old (the only one besides the built-in)\n" in done.out
    assert "runner-up: torch/sdpa: it is built in, and plugins come first\n" in done.out
    assert (
        "runner-up: none; no other installed candidate can serve this\n"
        in run("explain", *ONE, "--kv-layout", "HND", "--block-size", "256", "--device", "xpu").out
        or "chosen: none" in run("explain", *ONE, "--device", "xpu").out
    )


def test_a_permitted_list_says_what_auto_would_add(run, site) -> None:
    done = run("explain", *ONE, "--device", "h100", "--backend", "flash/new")
    found = run("explain", *ONE, "--device", "h100", "--backend", "flash/new", "--json").json["explanations"][0]

    assert done.code == 1
    assert "permitted: flash/new (--backend auto would add flash/old, torch/sdpa" in done.out
    assert "\nfix: permit others with --backend auto\n" in done.out
    assert found["with_auto"][0] == "flash/old"
    fallen_back = run("explain", *ONE, "--device", "h100", "--backend", "flash/new", "--backend", "auto")
    assert fallen_back.code == 0
    assert "would add" not in fallen_back.out


def test_a_fix_is_an_option_that_works(run, site) -> None:
    wrong = ["--device", "h100", "--backend", "flash/old", "--block-size", "100"]
    refused = run("explain", *ONE, *wrong)

    (fix,) = [line for line in refused.out.splitlines() if line.startswith("fix for flash/old: request it with ")]
    options = shlex.split(fix.removeprefix("fix for flash/old: request it with "))
    assert (refused.code, run("explain", *ONE, *wrong, *options).code) == (1, 0)


def test_a_fix_of_another_device_installs_nothing_here(run, site) -> None:
    done = run("explain", *ONE, "--backend", "flash/new", "--device", "cpu", "--all")
    verdict = next(v for v in done.out.split("\n\n") if v.startswith("flash/new "))

    assert "fix: none on this device; it supports this with --device cuda:9.0" in verdict
    assert "pip install" not in verdict
    assert run("explain", *ONE, "--backend", "flash/new", "--device", "cuda:9.0", "--assume-installed").code == 0


def test_verdicts_are_filtered(run, site) -> None:
    done = run("explain", *ONE, "--device", "h100", "--verdict", "chosen")
    both = run("explain", *ONE, "--device", "h100", "--verdict", "chosen", "--verdict", "refused", "--json").json

    assert [line for line in done.out.splitlines() if "/" in line and not line.startswith(" ")] == [
        "chosen: flash/old (the only one besides the built-in)",
        "flash/old  chosen  (attnplug-flash 1.0)",
    ]
    assert {verdict["status"] for verdict in both["explanations"][0]["verdicts"]} == {"chosen", "refused"}
    assert run("explain", *ONE, "--verdict", "best").code == 2


def test_a_matrix_without_devices_has_common_ones(run, site) -> None:
    done = run("explain", *ONE, "--matrix", "--assume-installed")

    assert done.out.splitlines()[0].split()[-3:] == ["cuda:8.0", "cuda:9.0", "cuda:10.0"]
    assert {line.split()[0] for line in done.out.partition("\n\n")[0].splitlines()[1:]} >= {"flash/new", "torch/sdpa"}


def test_a_matrix_that_is_too_wide_goes_on_below(run, site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    devices = [word for name in DEVICES for word in ("--device", name)]

    done = run("explain", *ONE, "--matrix", *devices)

    assert max(map(len, done.out.splitlines())) <= 60
    heads = [line.split()[1:] for line in done.out.splitlines() if line.startswith("candidate ")]
    named = ["cpu", "cuda:7.0", "cuda:8.0", "cuda:9.0", "cuda:10.0", "cuda:12.0", "rocm:gfx942", "xpu"]
    assert [head for line in heads for head in line] == named
    assert len(heads) > 1


@pytest.mark.parametrize("columns", WIDTHS)
def test_everything_fits_the_terminal_too(
    run, site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    (tmp_path / "config.json").write_text(json.dumps(MODELS["gpt_oss"]))

    for device in ("cpu", "h100", "mi300x"):
        done = run("explain", "--config", str(tmp_path), "--device", device, "--all")
        long = [line for line in done.out.splitlines() if len(line) > columns]
        assert not long, long


def test_an_error_fits_the_terminal(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    whole = run("explain", *ONE, "--device", "h1000").err
    monkeypatch.setattr("attnplug.cli.main.sys.stderr.isatty", lambda: True, raising=False)

    shown = run("explain", *ONE, "--device", "h1000").err

    assert max(map(len, shown.splitlines())) <= 60
    assert shown.split() == whole.split()


def test_piped_output_has_100_columns(start, site) -> None:
    done = start("-m", "attnplug", "explain", *ONE, "--device", "h100", "--all", COLUMNS="")

    longest = max(map(len, done.out.splitlines()))
    assert 80 < longest <= 100
