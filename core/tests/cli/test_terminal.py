"""What a person sees: tables of 80 columns, in color unless that is not wanted."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

COLOR = r"\x1b\[(\d+;)*3\d"
LAYER = ["--head-size", "64", "--num-q-heads", "64", "--num-kv-heads", "8", "--dtype", "bfloat16"]


def _plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def _fits(text: str) -> bool:
    return max(map(len, _plain(text).splitlines())) <= 80


def test_a_list_is_a_table_in_color(on_terminal, site) -> None:
    shown = on_terminal("list", "--all")

    assert shown.code == 0
    assert "\x1b[" in shown.out
    assert _fits(shown.out)
    assert re.search(r"flash/new +other device +three libraries behind one name", _plain(shown.out))
    assert re.search(r"- requires device type cuda; the device is cpu", _plain(shown.out))


@pytest.mark.parametrize("words", [[], ["list"], ["explain", *LAYER, "--all"], ["doctor"]])
def test_colors_are_for_terminals_and_no_color_is_honored(on_terminal, run, site, words: list[str]) -> None:
    colored, shown = on_terminal(*words), on_terminal(*words, NO_COLOR="1")

    assert re.search(COLOR, colored.out)
    assert not re.search(COLOR, shown.out)
    assert _plain(shown.out) == _plain(colored.out)
    assert "\x1b" not in run(*words).out


def test_an_explanation_begins_with_device_and_request(on_terminal, site) -> None:
    shown = on_terminal("explain", *LAYER, "--device", "cuda:9.0", "--assume-installed", "--backend", "flash")

    text = _plain(shown.out)
    heading = [line.split(": ", 1) for line in text.splitlines()[:4]]
    assert shown.code == 0
    assert _fits(shown.out)
    assert heading == [
        ["device", "cuda:9.0, not this machine, kernel libraries assumed installed"],
        ["permitted", "flash (--backend auto would add torch/sdpa, torch/flex)"],
        ["requested", "head_size=64 num_q_heads=64 num_kv_heads=8 dtype=bfloat16"],
        ["chosen", "flash/new (a tie, settled by name)"],
    ]
    assert re.search(r"  flash/host +requires device type cpu; the device is", text)
    assert "settle it with --backend flash/old --backend auto" in " ".join(text.split())


def test_what_a_setting_requests_is_shown_with_its_origin(on_terminal, site) -> None:
    shown = on_terminal("explain", *LAYER, "--device", "cuda:9.0", ATTNPLUG_KV_LAYOUT="HND")

    text = _plain(shown.out)
    assert re.search(r"^set: kv_layout=HND by environment variable ATTNPLUG_KV_LAYOUT$", text, re.MULTILINE)
    assert _fits(shown.out)


def test_devices_are_shown_side_by_side(on_terminal, site) -> None:
    devices = ["--device", "cuda:8.0", "--device", "cuda:10.0"]

    shown = on_terminal("explain", *LAYER, *devices, "--backend", "flash", "--assume-installed")

    assert _fits(shown.out)
    assert re.search(r"flash/new +no: device +chosen", _plain(shown.out))


def test_that_nothing_can_serve_is_shown(on_terminal, site) -> None:
    shown = on_terminal("explain", *LAYER, "--device", "cpu", "--backend", "flash/new")

    assert shown.code == 1
    assert re.search(r"^chosen: none$", _plain(shown.out), re.MULTILINE)


def test_a_model_ends_with_its_plan(on_terminal, site, tmp_path: Path) -> None:
    config = {"model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))

    shown = on_terminal("explain", "--config", str(tmp_path), "--device", "cuda:9.0")

    assert shown.code == 0
    assert _plain(shown.out).startswith("device: cuda:9.0, not this machine\nlayers.{0..3}.self_attn (4 layers): ")
    assert "\nplan: block_size=256" in _plain(shown.out)


def test_problems_are_shown_last(on_terminal, site) -> None:
    sound = on_terminal("doctor")
    site.add("alone", "api = 3")
    broken = on_terminal("doctor")

    assert (sound.code, broken.code) == (0, 1)
    assert _plain(sound.out).endswith("\nnothing is broken\n")
    assert _plain(broken.out).endswith("\n1 problem\n")
    assert "\x1b[1;31mproblems" in broken.out


def test_a_benchmark_prints_its_verdict(on_terminal, empty) -> None:
    shown = on_terminal("bench", "cached", "--repeats", "1")

    assert shown.code in (0, 1)
    assert re.search(r"cached +[0-9.]+ us  best [0-9.]+ us  budget 0.3 us  (within|over)\n", _plain(shown.out))
