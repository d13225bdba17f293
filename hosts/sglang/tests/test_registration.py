"""SGLang knows attnplug's names: in its registry, its lists of choices, its command line and its processes."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace

import pytest

import attnplug
from attnplug_sglang import registration
from attnplug_sglang.registration import AUTO, backend_names, factory_of, register
from hosts.sglang.tests import stand_ins

stand_ins.install()

NAMED = f"{AUTO}:torch/sdpa"
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.fixture
def server_args():
    """SGLang's module, with the lists as they were afterwards."""
    from sglang.srt import server_args as module  # noqa: PLC0415 - imports SGLang

    lists = [choices for name in registration._LISTS if (choices := getattr(module, name, None)) is not None]
    before = [list(choices) for choices in lists]
    yield module
    for choices, old in zip(lists, before, strict=True):
        choices[:] = old


@pytest.fixture
def backends():
    """SGLang's registry of attention backends, as it was afterwards."""
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS  # noqa: PLC0415 - imports SGLang

    before = dict(ATTENTION_BACKENDS)
    yield ATTENTION_BACKENDS
    ATTENTION_BACKENDS.clear()
    ATTENTION_BACKENDS.update(before)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A folder with the configuration of a tiny Llama."""
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return str(tmp_path)


def parse(server_args, model: str, *options: str):
    parser = argparse.ArgumentParser()
    server_args.ServerArgs.add_cli_args(parser)
    fixed = ["--model-path", model, "--device", "cpu", "--load-format", "dummy", "--skip-tokenizer-init"]
    return server_args.ServerArgs.from_cli_args(parser.parse_args([*fixed, *options]))


def test_the_entry_point_is_the_function_that_registers() -> None:
    (found,) = (each for each in entry_points(group="sglang.srt.plugins") if each.name == "attnplug")

    assert found.load() is register


def test_every_candidate_has_a_name() -> None:
    names = backend_names()

    assert names[AUTO] is None
    assert set(names.values()) - {None} == {c.id for c in attnplug.registry().candidates() if "/" in c.id}
    assert names[NAMED] == "torch/sdpa"


def test_names_are_registered_once(server_args, backends) -> None:
    register()
    made = backends[NAMED]
    register()

    assert backends[NAMED] is made
    for listed in registration._LISTS:
        choices = getattr(server_args, listed, None)
        assert choices is None or [choices.count(name) for name in backend_names()] == [1] * len(backend_names())


@pytest.mark.parametrize("name", [AUTO, NAMED])
def test_the_command_line_takes_a_name(server_args, backends, model: str, name: str) -> None:
    register()

    assert parse(server_args, model, "--attention-backend", name).attention_backend == name


def test_prefill_and_decode_may_have_names_of_their_kind(server_args, backends, model: str) -> None:
    register()

    options = ("--prefill-attention-backend", "torch_native", "--decode-attention-backend", AUTO)
    found = parse(server_args, model, *options, "--page-size", "16")

    assert (found.prefill_attention_backend, found.decode_attention_backend) == ("torch_native", AUTO)


def test_an_unknown_name_is_refused_by_the_command_line(server_args, backends, model: str, capsys) -> None:
    register()

    with pytest.raises(SystemExit):
        parse(server_args, model, "--attention-backend", "attnplug:torch/nothing")
    assert "attnplug:torch/sdpa" in capsys.readouterr().err  # what exists is listed


def test_wrong_settings_leave_the_name_that_raises_them(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    def fail() -> None:
        raise attnplug.errors.SettingsError("ATTNPLUG_ALLOW is wrong", "", "unset it")

    monkeypatch.setattr(registration.attnplug, "registry", fail)

    assert backend_names() == {AUTO: None}
    assert "ATTNPLUG_ALLOW is wrong" in caplog.text


def test_a_name_makes_the_backend_of_its_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    from attnplug_sglang import backend  # noqa: PLC0415 - imports SGLang

    made = []

    def record(runner, *, backend):
        made.append((runner, backend))
        return SimpleNamespace(explain=lambda: "")

    monkeypatch.setattr(backend, "AttnplugAttnBackend", record)
    factory_of(None)("first")
    factory_of("torch/sdpa")("second")

    assert made == [("first", None), ("second", "torch/sdpa")]


def test_sglangs_plugin_loader_registers_in_a_new_process() -> None:
    program = (
        "from hosts.sglang.tests import stand_ins\n"
        "stand_ins.install()\n"
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS\n"
        "print([name for name in ATTENTION_BACKENDS if name.startswith('attnplug')])\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=root)

    assert done.returncode == 0, done.stderr
    assert NAMED in done.stdout
